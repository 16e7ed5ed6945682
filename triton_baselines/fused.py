"""triton.fused: SwiGLU in one launch; gate and up are the halves of one accumulator, fed from one x tile.

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

from .launching import SIZES, Launch, TritonKernel, alignment, operand, pair, programs_for, recipes_of, units
from .recipes import activate
from .tiles import load_pair, load_tile, store_tile, tile_position


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


# The fp32 accumulator takes 2 bm bn / (32 warps) registers of each thread. bm = 64 is the smallest wgmma, so that
# decode keeps the declared arithmetic.
LARGE = FusedConfig(128, 128, 64, 4, 8)
WIDE = FusedConfig(64, 128, 64, 4, 4)
SMALL = FusedConfig(64, 64, 128, 4, 4)
CONFIGS = (
    LARGE,
    WIDE,
    SMALL,
    FusedConfig(128, 128, 64, 3, 8),
    FusedConfig(128, 64, 64, 5, 4),
    FusedConfig(64, 32, 128, 6, 4),
)


def best_guess(problem: Problem) -> FusedConfig:
    """By measurements on an H200: tiles as large as still keep most multiprocessors busy."""
    if problem.m > 256 and programs_for(problem.m, problem.n, LARGE.bm, LARGE.bn, 100) == 100:
        return LARGE
    return WIDE if problem.m <= 64 and problem.n >= 128 * 132 else SMALL


@triton.jit(do_not_specialize=SIZES)
def _fused(
    x, weights, out, M, N, K, x_stride, gate_stride, up_stride, out_stride, apart, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    ALIGN: tl.constexpr, GATE_FIRST: tl.constexpr, ACTIVATION: tl.constexpr, RECIPE: tl.constexpr,
):  # fmt: skip
    # Lengths come in units of ALIGN elements, which tells the compiler how wide it may load.
    N, K, x_stride, out_stride = N * ALIGN, K * ALIGN, x_stride * ALIGN, out_stride * ALIGN
    gate_stride, up_stride, apart = gate_stride * ALIGN, up_stride * ALIGN, apart * ALIGN
    tiles_m, tiles_n = (M + BM - 1) // BM, (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row, column = tile_m * BM, tile_n * BN
        both = tl.full((BM, 2 * BN), 0.0, tl.float32)
        for k in tl.range(0, K, BK):
            a = load_tile(x, row, k, M, K, x_stride, BM, BK, TMA)
            b = load_pair(weights, column, k, N, K, apart, gate_stride, up_stride, BN, BK, TMA)
            both = tl.dot(a, b.T, both)
        # Column j of either half is in the registers of one thread: nothing is exchanged here.
        first, second = both.reshape(BM, 2, BN).permute(0, 2, 1).split()
        gate = first if GATE_FIRST else second
        up = second if GATE_FIRST else first
        value = activate(gate, ACTIVATION, RECIPE) * up
        store_tile(out, value, row, column, M, N, out_stride, BM, BN, TMA)


class Fused(TritonKernel):
    name = "triton.fused"
    role = "fused"
    config_type = FusedConfig

    def configs(self, problem: Problem) -> Iterable[FusedConfig]:
        memory = "pointer" if self.no_tma(problem) else "tma"
        ordered = dict.fromkeys((best_guess(problem), *CONFIGS))
        return tuple(replace(config, memory=memory) for config in ordered)

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return tuple(Arithmetic("sm90", recipe) for recipe in recipes_of(problem))

    def no_tma(self, problem: Problem) -> str | None:
        if problem.gate_stride != problem.up_stride:
            return f"needs gate and up of one row stride, these have {problem.gate_stride} and {problem.up_stride}"
        return super().no_tma(problem)

    def launches(
        self, problem: Problem, config: FusedConfig, arithmetic: Arithmetic, operands: Operands, sms: int
    ) -> Iterable[Launch]:
        p, gate, up, tma = problem, operands.weights.gate, operands.weights.up, config.memory == "tma"
        # A descriptor's strides are unsigned: where up lies below gate it starts from up.
        gate_first = not tma or gate.data_ptr() < up.data_ptr()
        first, second = (gate, up) if gate_first else (up, gate)
        weights = pair(first, second, p.gate_stride, config.bn, config.bk) if tma else gate
        apart = (up.data_ptr() - gate.data_ptr()) // gate.element_size()
        programs = programs_for(p.m, p.n, config.bm, config.bn, sms)
        arguments = (
            operand(operands.x, p.x_stride, config.bm, config.bk, tma),
            weights,
            operand(operands.out, p.out_stride, config.bm, config.bn, tma),
            p.m, *units(p, p.n, p.k, p.x_stride, p.gate_stride, p.up_stride, p.out_stride, apart), programs,
        )  # fmt: skip
        options = dict(
            BM=config.bm, BN=config.bn, BK=config.bk, GROUP=config.group, TMA=tma,
            ALIGN=alignment(p), GATE_FIRST=gate_first, ACTIVATION=p.activation, RECIPE=arithmetic.recipe,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        yield Launch(_fused, programs, arguments, options, operands.out)
