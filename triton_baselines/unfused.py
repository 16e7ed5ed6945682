"""triton.unfused: a GEMM kernel that writes gate and up, then an elementwise kernel that reads them back.

Where things are decided: tiles in `UnfusedConfig` and `CONFIGS`; schedule and first rounding (gate and up, to the
output dtype) in `_gemm`; the second, after the fp32 product, in `_silu_mul`; the activation's operations in `recipes`.
"""

# What a jitted function iterates over, only Triton's compiler knows.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fused_swiglu import Arithmetic, Config, Operands, Problem

from .launching import SIZES, Launch, TritonKernel, alignment, operand, programs_for, recipes_of, units
from .recipes import activate
from .tiles import load_tile, store_tile, tile_position


@dataclass(frozen=True, slots=True)
class UnfusedConfig(Config):
    """bm x bn: the GEMM's output tile; bk: depth of a stage; group: tile rows swept together; memory: tma, pointer."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int
    group: int = 8
    memory: str = "tma"


CONFIGS = (
    UnfusedConfig(128, 256, 64, 3, 8),
    UnfusedConfig(128, 128, 64, 4, 4),
    UnfusedConfig(64, 128, 64, 4, 4),
    UnfusedConfig(64, 64, 128, 4, 4),
)
# The elementwise kernel's tile: 16 values a thread with 8 warps, loaded 16 bytes at a time along the row.
ROWS, COLUMNS = 16, 256


@triton.jit(do_not_specialize=SIZES)
def _gemm(
    x, w, out, M, N, K, x_stride, w_stride, out_stride, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """out[M, N] = x[M, K] @ w[N, K].T"""
    # Lengths come in units of ALIGN elements, which tells the compiler how wide it may load.
    N, K, x_stride, w_stride, out_stride = N * ALIGN, K * ALIGN, x_stride * ALIGN, w_stride * ALIGN, out_stride * ALIGN
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BM, tile_n * BN
        product = tl.full((BM, BN), 0.0, tl.float32)
        for k in tl.range(0, K, BK):
            a = load_tile(x, row, k, M, K, x_stride, BM, BK, TMA)
            b = load_tile(w, column, k, N, K, w_stride, BN, BK, TMA)
            product = tl.dot(a, b.T, product)
        store_tile(out, product, row, column, M, N, out_stride, BM, BN, TMA)


@triton.jit(do_not_specialize=["M", "N", "both_stride", "out_stride"])
def _silu_mul(
    both, out, M, N, both_stride, out_stride,
    BR: tl.constexpr, BC: tl.constexpr, ACTIVATION: tl.constexpr, RECIPE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out[M, N] = silu(both[:, :N]) * both[:, N:]"""
    N, both_stride, out_stride = N * ALIGN, both_stride * ALIGN, out_stride * ALIGN
    tiles_n = (N + BC - 1) // BC
    tile = tl.program_id(0)
    row, column = tile // tiles_n * BR, tile % tiles_n * BC
    gate = load_tile(both, row, column, M, N, both_stride, BR, BC, False)
    up = load_tile(both + N, row, column, M, N, both_stride, BR, BC, False)
    value = activate(gate.to(tl.float32), ACTIVATION, RECIPE) * up.to(tl.float32)
    store_tile(out, value, row, column, M, N, out_stride, BR, BC, False)


class Unfused(TritonKernel):
    name = "triton.unfused"
    role = "unfused"
    config_type = UnfusedConfig

    def configs(self, problem: Problem) -> Iterable[UnfusedConfig]:
        memory = "pointer" if self.no_tma(problem) else "tma"
        ordered = CONFIGS if problem.m > 64 else CONFIGS[2:] + CONFIGS[:2]
        return tuple(replace(config, memory=memory) for config in ordered)

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return tuple(Arithmetic("sm90", recipe, ("gate", "up")) for recipe in recipes_of(problem))

    def launches(self, problem: Problem, config: UnfusedConfig, arithmetic: Arithmetic, operands: Operands, sms: int):
        p, weights, out = problem, operands.weights, operands.out
        both = torch.full((p.m, 2 * p.n), float("nan"), dtype=out.dtype, device=out.device)
        stacked = weights.stacked
        if stacked is None:
            halves = (weights.gate, p.gate_stride, both[:, : p.n]), (weights.up, p.up_stride, both[:, p.n :])
        else:
            halves = ((stacked, stacked.stride(0), both),)
        for w, stride, product in halves:
            yield self._gemm(p, config, operands.x, w, stride, product, both, sms)
        rows, columns = -(-p.m // ROWS), -(-p.n // COLUMNS)
        yield Launch(
            _silu_mul,
            rows * columns,
            (both, out, p.m, *units(p, p.n, 2 * p.n, p.out_stride)),
            dict(
                BR=ROWS, BC=COLUMNS, ACTIVATION=p.activation, RECIPE=arithmetic.recipe, ALIGN=alignment(p), num_warps=8
            ),
            out,
        )

    @staticmethod
    def _gemm(p: Problem, config: UnfusedConfig, x, w, w_stride: int, product, both, sms: int) -> Launch:
        tma = config.memory == "tma"
        n = w.shape[0]
        programs = programs_for(p.m, n, config.bm, config.bn, sms)
        arguments = (
            operand(x, p.x_stride, config.bm, config.bk, tma),
            operand(w, w_stride, config.bn, config.bk, tma),
            operand(product, 2 * p.n, config.bm, config.bn, tma),
            p.m, *units(p, n, p.k, p.x_stride, w_stride, 2 * p.n), programs,
        )  # fmt: skip
        options = dict(
            BM=config.bm, BN=config.bn, BK=config.bk, GROUP=config.group, TMA=tma, ALIGN=alignment(p),
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return Launch(_gemm, programs, arguments, options, both)
