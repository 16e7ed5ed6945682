"""cutlass.pingpong, Kernel-1: a gate pass and an up pass over k, and Swish between them in registers, while the other
warpgroup has the tensor cores.

Tiles, schedule, cluster, stages and the place of Swish are in `TABLE`; pingpong.cu says at its head where all else is
decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fused_swiglu import Problem

from .launching import CutlassKernel, TileConfig, WithoutActivation, best_first, invalid_tile, most_stages, tile_defines

PASSES = 2
SWISH = ("overlap", "held", "epilogue", "sliced")  # as two_passes.cuh numbers them


@dataclass(frozen=True, slots=True)
class PingpongConfig(TileConfig):
    """TileConfig's, and swish: where the activation happens. `overlap`: between the passes, while the other warpgroup
    has the tensor cores; `held`: there, but before giving them away; `epilogue`: after both passes; `sliced`: between
    the warpgroup's own wgmmas of the up pass."""

    swish: str = "overlap"


def _config(
    bm: int, bn: int, schedule: str = "pingpong", cluster_m: int = 1, cluster_n: int = 1, swish: str = "overlap"
) -> PingpongConfig:
    return PingpongConfig(bm, bn, most_stages(bm, bn, PASSES), schedule, cluster_m, cluster_n, swish=swish)


TABLE = (
    _config(64, 192, cluster_m=4),
    _config(64, 192, cluster_m=2),
    _config(64, 192),
    _config(128, 96, cluster_m=2),
    _config(64, 128, cluster_m=2),
    _config(64, 160, cluster_m=2),
    _config(128, 64, cluster_n=2),
    _config(64, 96),
    _config(64, 64),
    _config(64, 192, cluster_m=2, swish="held"),
    _config(64, 192, cluster_m=2, swish="epilogue"),
    _config(64, 192, cluster_m=2, swish="sliced"),
    _config(128, 192, "cooperative", cluster_m=2, swish="sliced"),
    _config(128, 192, "cooperative", cluster_m=2, swish="epilogue"),
    _config(256, 96, "cooperative", cluster_m=2, swish="sliced"),
    _config(128, 128, "cooperative", swish="sliced"),
)


class Pingpong(CutlassKernel):
    name = "cutlass.pingpong"
    role = "fused"
    source = "pingpong.cu"
    config_type = PingpongConfig

    def table(self) -> tuple[PingpongConfig, ...]:
        return TABLE

    def configs(self, problem: Problem) -> Iterable[PingpongConfig]:
        return best_first(problem, TABLE, PASSES)

    def defines(self, config: PingpongConfig) -> dict[str, int]:
        return tile_defines(config, PASSES) | {"FS_SWISH": SWISH.index(config.swish)}

    def invalid(self, config: PingpongConfig) -> str | None:
        if reason := invalid_tile(config, PASSES):
            return reason
        if config.swish not in SWISH:
            return f"has swish={', '.join(SWISH)}, not {config.swish!r}"
        if config.swish in ("overlap", "held") and config.schedule != "pingpong":
            return f"swish={config.swish} is of the pingpong schedule: choose epilogue or sliced"
        return None


class PingpongProduct(WithoutActivation, Pingpong):
    name = "cutlass.pingpong.product"
