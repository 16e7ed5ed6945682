"""triton.fused: SwiGLU in one launch, gate and up accumulated side by side from one x tile.

Where things are decided: tiles, stages, warps, raster and memory path in `FusedConfig` and `CONFIGS`; the schedule
and the rounding (once, after the fp32 product) in `_fused`; the activation's operations in `recipes`.
"""

# What a jitted function iterates over, only Triton's compiler knows.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from fused_swiglu import Arithmetic, Config, Operands, Problem

from .launching import Launch, TritonKernel, operand, programs_for
from .recipes import silu
from .tiles import load_tile, store_tile, tile_position


@dataclass(frozen=True, slots=True)
class FusedConfig(Config):
    """bm x bn: output tile; bk: depth of a stage; group: tile rows swept together; memory: tma or pointer."""

    bm: int
    bn: int
    bk: int
    stages: int
    warps: int
    group: int = 8
    memory: str = "tma"


# The fp32 accumulators of gate and up take 2 bm bn / (32 warps) registers of each thread. bm = 64 is the smallest
# wgmma, so that decode keeps the declared arithmetic.
CONFIGS = (
    FusedConfig(128, 128, 64, 4, 8),
    FusedConfig(128, 128, 64, 3, 8),
    FusedConfig(128, 64, 128, 3, 8),
    FusedConfig(64, 64, 128, 4, 4),
    FusedConfig(64, 128, 64, 4, 4),
    FusedConfig(64, 32, 128, 6, 4),
)
DECODE = slice(3, None)


@triton.jit
def _fused(
    x, w_gate, w_up, out, M, N, K, x_stride, gate_stride, up_stride, out_stride, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    RECIPE: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BM, tile_n * BN
        gate = tl.full((BM, BN), 0.0, tl.float32)
        up = tl.full((BM, BN), 0.0, tl.float32)
        for k in tl.range(0, K, BK):
            a = load_tile(x, row, k, M, K, x_stride, BM, BK, TMA)
            b_gate = load_tile(w_gate, column, k, N, K, gate_stride, BN, BK, TMA)
            b_up = load_tile(w_up, column, k, N, K, up_stride, BN, BK, TMA)
            gate = tl.dot(a, b_gate.T, gate)
            up = tl.dot(a, b_up.T, up)
        store_tile(out, silu(gate, RECIPE) * up, row, column, M, N, out_stride, BM, BN, TMA)


class Fused(TritonKernel):
    name = "triton.fused"
    role = "fused"
    config_type = FusedConfig

    def configs(self, problem: Problem) -> Iterable[FusedConfig]:
        memory = "tma" if problem.row_alignment == 16 else "pointer"
        ordered = CONFIGS if problem.m > 64 else CONFIGS[DECODE] + CONFIGS[: DECODE.start]
        return tuple(replace(config, memory=memory) for config in ordered)

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return tuple(Arithmetic("sm90", recipe) for recipe in ("ieee", "ex2"))

    def launches(self, problem: Problem, config: FusedConfig, arithmetic: Arithmetic, operands: Operands, sms: int):
        tma = config.memory == "tma"
        weights, p = operands.weights, problem
        programs = programs_for(p.m, p.n, config.bm, config.bn, sms)
        arguments = (
            operand(operands.x, p.x_stride, config.bm, config.bk, tma),
            operand(weights.gate, p.gate_stride, config.bn, config.bk, tma),
            operand(weights.up, p.up_stride, config.bn, config.bk, tma),
            operand(operands.out, p.out_stride, config.bm, config.bn, tma),
            p.m, p.n, p.k, p.x_stride, p.gate_stride, p.up_stride, p.out_stride, programs,
        )  # fmt: skip
        options = dict(
            BM=config.bm, BN=config.bn, BK=config.bk, GROUP=config.group, TMA=tma, RECIPE=arithmetic.recipe,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        yield Launch(_fused, programs, arguments, options, operands.out)
