"""cutlass.interleaved: gate and up in one accumulator, from one B stage that two TMA boxes fill side by side.

Tiles, schedule, cluster and stages are in `TABLE`; interleaved.cu says at its head where all else is decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from fused_swiglu import Problem

from .launching import CutlassKernel, TileConfig, best_first, invalid_tile, most_stages, tile_defines

PASSES = 1


def _config(bm: int, bn: int, schedule: str = "pingpong", cluster_m: int = 1, cluster_n: int = 1) -> TileConfig:
    return TileConfig(bm, bn, most_stages(bm, bn, PASSES), schedule, cluster_m, cluster_n)


TABLE = (
    _config(128, 96, cluster_m=2),
    _config(128, 96),
    _config(256, 96, "cooperative", cluster_m=2),
    _config(256, 96, "cooperative", cluster_n=2),
    _config(128, 80, cluster_m=2),
    _config(128, 64, cluster_m=2),
    _config(64, 128, cluster_n=2),
    _config(64, 96, cluster_m=2),
    _config(64, 64),
    _config(192, 64, cluster_m=2),
    _config(128, 128, "cooperative", cluster_m=2),
    _config(128, 96, "cooperative"),
    _config(256, 64, "cooperative", cluster_m=2),
)


class Interleaved(CutlassKernel):
    name = "cutlass.interleaved"
    role = "fused"
    source = "interleaved.cu"
    config_type = TileConfig

    def table(self) -> tuple[TileConfig, ...]:
        return TABLE

    def configs(self, problem: Problem) -> Iterable[TileConfig]:
        return best_first(problem, TABLE)

    def defines(self, config: TileConfig) -> dict[str, int]:
        return tile_defines(config, PASSES)

    def invalid(self, config: TileConfig) -> str | None:
        return invalid_tile(config, PASSES)
