"""cutlass.evt, Kernel-2: SwiGLU as a node of an epilogue visitor tree on CUTLASS's GemmUniversal, computed between the
stores of half-width tiles.

Tiles, schedule and cluster are in `TABLE`; evt.cu says at its head where all else is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fused_swiglu import Arithmetic, Config, Problem

from .launching import (
    SHARED_MEMORY,
    TEAMS,
    CutlassKernel,
    WithoutActivation,
    best_first,
    geometry_defines,
    invalid_geometry,
)


@dataclass(frozen=True, slots=True)
class EvtConfig(Config):
    """bm x bn: output tile, of a warpgroup in the pingpong schedule and of two in the cooperative one. stages: of 64
    along k; 0 is as many as fit. cluster_m, cluster_n: thread blocks along m that share a tile of the weights, and
    along n that share one of x. subtile: columns that are computed and stored at a time; 0 leaves it to evt/config.cuh.
    band: rows of clusters swept together, a launch argument."""

    bm: int
    bn: int
    stages: int = 0
    schedule: str = "pingpong"
    cluster_m: int = 1
    cluster_n: int = 1
    subtile: int = 0
    band: int = 8

    @property
    def at_launch(self) -> int:
        """What is chosen at launch and not compiled."""
        return self.band

    @property
    def team(self) -> int:
        """Warpgroups that work on one tile."""
        return TEAMS[self.schedule]

    @property
    def accumulators(self) -> int:
        """Of a thread."""
        return self.bm // (64 * self.team) * self.bn

    @property
    def stage_bytes(self) -> int:
        return (self.bm + 2 * self.bn) * 64 * 2


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
        return geometry_defines(config) | {"FS_SUBTILE": config.subtile}

    def ring(self, config: EvtConfig) -> tuple[int, int]:
        stages = config.stages or _most_stages(config)
        return stages, _beside_stages(config) + stages * config.stage_bytes

    def why_not(self, problem: Problem, config: EvtConfig, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        return _too_many_stages(config, "preactivations" in problem.outputs)

    def invalid(self, config: EvtConfig) -> str | None:
        """What evt/config.cuh and evt.cu assert, in words."""
        if reason := invalid_geometry(config, 16, 128):
            return reason
        if config.cluster_m * config.cluster_n > 8:
            return "takes clusters of at most 8 thread blocks"
        if config.subtile not in (0, 16, 32, 64) or (config.subtile and config.bn % config.subtile):
            return "takes subtiles of 16, 32 or 64 columns that divide bn"
        if config.stages < 0 or config.stages == 1:
            return "takes at least 2 stages; stages=0 takes as many as fit"
        return _too_many_stages(config, False)


def _beside_stages(config: EvtConfig, preactivations: bool = False) -> int:
    """Bytes of shared memory beside the stages: two subtiles of the output in flight, as many of either half where the
    pre-activations are stored too, and a KiB each for barriers and for what the tree keeps."""
    crowded = preactivations and config.accumulators >= 192
    subtile = config.subtile or (16 if config.bn % 32 or crowded else 32)
    return 2048 + 2 * 64 * config.team * subtile * 2 * (3 if preactivations else 1)


def _most_stages(config: EvtConfig, preactivations: bool = False) -> int:
    return (SHARED_MEMORY - _beside_stages(config, preactivations)) // config.stage_bytes


def _too_many_stages(config: EvtConfig, preactivations: bool) -> str | None:
    """What evt.cu asserts of shared memory."""
    most = _most_stages(config, preactivations)
    return f"has shared memory for at most {most} stages of this tile" if config.stages > most else None


class EvtProduct(WithoutActivation, Evt):
    name = "cutlass.evt.product"
