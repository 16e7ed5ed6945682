"""cutlass.gemm, the control: the products with w_gate and w_up side by side, by the same code without the activation.

passes=1 is the control of cutlass.interleaved and cutlass.evt, passes=2 that of cutlass.pingpong, at equal tile,
schedule, cluster and stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from fused_swiglu import DTYPES, Arithmetic, Operands, Problem

from . import interleaved, pingpong
from .launching import IDENTITY, CutlassKernel, TileConfig, best_first, invalid_tile, preactivations, tile_defines


@dataclass(frozen=True, slots=True)
class GemmConfig(TileConfig):
    """TileConfig's, and passes over k for each tile: 1 with gate and up in one accumulator, or 2."""

    passes: int = 1


def _control(config: TileConfig, passes: int) -> GemmConfig:
    shared = {field.name: getattr(config, field.name) for field in fields(TileConfig)}
    return GemmConfig(**shared, passes=passes)


TABLE = tuple(
    dict.fromkeys(
        _control(config, passes) for passes, table in ((1, interleaved.TABLE), (2, pingpong.TABLE)) for config in table
    )
)


class Gemm(CutlassKernel):
    name = "cutlass.gemm"
    role = "control"
    computes = "gate_up"
    source = "gemm.cu"
    config_type = GemmConfig
    adds_bias = False
    writes_preactivations = False

    def table(self) -> tuple[GemmConfig, ...]:
        return TABLE

    def configs(self, problem: Problem) -> Iterable[GemmConfig]:
        return best_first(problem, TABLE)

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic("sm90", "none"),)

    def defines(self, config: GemmConfig) -> dict[str, int]:
        return tile_defines(config, config.passes) | {"FS_ACTIVATION": IDENTITY, "FS_SWISH": 2}

    def invalid(self, config: GemmConfig) -> str | None:
        if config.passes not in (1, 2):
            return f"makes 1 or 2 passes, not {config.passes}"
        return invalid_tile(config, config.passes)

    def predict(self, problem: Problem, arithmetic: Arithmetic, operands: Operands) -> torch.Tensor:
        return preactivations(operands).to(DTYPES[problem.out_dtype])
