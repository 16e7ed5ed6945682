"""One product of matrices, x @ w.T, by the GEMM of triton.unfused: `sm90:none:out` on an SM90 GPU.

Each output is one chain of tensor-core steps over ascending k, rounded once. So the tile, which is chosen by the
problem's size, changes no bit, and neither do the rows beside a row. The price is that k is never split: with few rows
and a long k, where cuBLAS would split it, only n / bn multiprocessors work.
"""

from __future__ import annotations

import torch

from fused_swiglu.operands import Weights, problem_of

from .launching import Launch, alignment, operand, programs_for, units
from .unfused import UnfusedConfig, _gemm

# From the fewest bytes a product to the most tiles.
CONFIGS = (
    UnfusedConfig(128, 256, 64, 3, 8),
    UnfusedConfig(128, 128, 64, 4, 4),
    UnfusedConfig(64, 128, 64, 4, 4),
    UnfusedConfig(64, 64, 128, 4, 4),
    UnfusedConfig(64, 32, 128, 5, 4),
)


def config_for(m: int, n: int, sms: int) -> UnfusedConfig:
    """The first whose tiles fill all multiprocessors; else the one with the most tiles."""
    return next((c for c in CONFIGS if programs_for(m, n, c.bm, c.bn, sms) == sms), CONFIGS[-1])


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x[m, k] @ w[n, k].T in x's dtype, [m, n], on the current stream; allocates the result.

    Raises ArgumentError for operands that do not fit together.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    m, n = len(x), len(w)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    launch = launch_of(x, w, out, config_for(m, n, sms), sms)
    with torch.cuda.device_of(x):
        launch()
    return out


def launch_of(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, config: UnfusedConfig, sms: int) -> Launch:
    """x @ w.T into out with the tiles of that config; by TMA where the GPU has it and rows start where it can."""
    p = problem_of(x, Weights(w, w), out)
    tma = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0) and not p.no_tma
    programs = programs_for(p.m, p.n, config.bm, config.bn, sms)
    arguments = (
        operand(x, p.x_stride, config.bm, config.bk, tma),
        operand(w, p.gate_stride, config.bn, config.bk, tma),
        operand(out, p.out_stride, config.bm, config.bn, tma),
        p.m, *units(p, p.n, p.k, p.x_stride, p.gate_stride, p.out_stride), programs,
    )  # fmt: skip
    options = dict(
        BM=config.bm, BN=config.bn, BK=config.bk, GROUP=config.group, TMA=tma, ALIGN=alignment(p),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return Launch(_gemm, programs, arguments, options, out)
