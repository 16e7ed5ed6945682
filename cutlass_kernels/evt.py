"""cutlass.evt, Kernel-2: SwiGLU as a node of an epilogue visitor tree on CUTLASS's GemmUniversal, computed between the
stores of half-width tiles.

Tiles, schedule and cluster are in `TABLE`; evt.cu says at its head where all else is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fused_swiglu import Config, Problem

from .launching import SHARED_MEMORY, CutlassKernel, best_first


@dataclass(frozen=True, slots=True)
class EvtConfig(Config):
    """bm x bn: output tile, of a warpgroup in the pingpong schedule and of two in the cooperative one. stages: of 64
    along k; 0 is as many as fit. cluster_m, cluster_n: thread blocks along m that share a tile of the weights, and
    along n that share one of x. subtile: columns that are computed and stored at a time; 0 leaves it to evt/config.cuh.
    band: rows of clusters swept together, a launch argument; 0 leaves it to CUTLASS."""

    bm: int
    bn: int
    stages: int = 0
    schedule: str = "pingpong"
    cluster_m: int = 1
    cluster_n: int = 1
    subtile: int = 0
    band: int = 8


TABLE = (
    EvtConfig(128, 96, cluster_m=2),
    EvtConfig(128, 96),
    EvtConfig(128, 96, cluster_n=2),
    EvtConfig(256, 96, schedule="cooperative", cluster_m=2),
    EvtConfig(256, 96, schedule="cooperative", cluster_n=2),
    EvtConfig(128, 64, cluster_m=2),
    EvtConfig(128, 80, cluster_m=2),
    EvtConfig(64, 128, cluster_m=2),
    EvtConfig(64, 96),
    EvtConfig(64, 64),
    EvtConfig(128, 128, schedule="cooperative", cluster_m=2),
    EvtConfig(128, 96, schedule="cooperative", cluster_m=2, cluster_n=2),
    EvtConfig(256, 64, schedule="cooperative", cluster_m=2),
)


class Evt(CutlassKernel):
    name = "cutlass.evt"
    role = "fused"
    source = "evt.cu"
    config_type = EvtConfig

    def table(self) -> tuple[EvtConfig, ...]:
        return TABLE

    def configs(self, problem: Problem) -> Iterable[EvtConfig]:
        return best_first(problem, TABLE)

    def defines(self, config: EvtConfig) -> dict[str, int]:
        return {
            "FS_BM": config.bm,
            "FS_BN": config.bn,
            "FS_STAGES": config.stages,
            "FS_PINGPONG": int(config.schedule == "pingpong"),
            "FS_CLUSTER_M": config.cluster_m,
            "FS_CLUSTER_N": config.cluster_n,
            "FS_SUBTILE": config.subtile,
        }

    def invalid(self, config: EvtConfig) -> str | None:
        """What evt/config.cuh asserts, in words."""
        team = {"pingpong": 1, "cooperative": 2}.get(config.schedule)
        if team is None:
            return f"has the schedules pingpong and cooperative, not {config.schedule!r}"
        if config.bm < 64 * team or config.bm % (64 * team) or config.bm > 256:
            return f"takes bm in multiples of {64 * team} up to 256 in the {config.schedule} schedule, not {config.bm}"
        if config.bn < 16 or config.bn % 16 or config.bn > 128:
            return f"takes bn in multiples of 16 up to 128, not {config.bn}"
        if config.bm // team * config.bn // 64 > 208:
            return "has too few registers for these accumulators: choose a smaller tile"
        if {config.cluster_m, config.cluster_n} - {1, 2, 4}:
            return "takes clusters of 1, 2 or 4 along either dimension"
        if config.bn % (8 * config.cluster_m) or config.bm % (8 * config.cluster_n):
            return "each thread block of a cluster loads whole groups of 8 rows: choose a smaller cluster"
        if config.subtile not in (0, 16, 32, 64) or (config.subtile and config.bn % config.subtile):
            return "takes subtiles of 16, 32 or 64 columns that divide bn"
        if not 2 <= (config.stages or 2) <= SHARED_MEMORY // ((config.bm + 2 * config.bn) * 128):
            return "has no shared memory for that many stages: stages=0 takes as many as fit"
        if not -8 <= config.band <= 8:
            return "takes a band of -8 to 8: negative ones are of columns"
        return None
