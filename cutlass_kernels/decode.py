"""cutlass.decode: SwiGLU for few tokens. The weights are operand A of the products and pass through shared memory once;
the tokens are operand B, 8 to 64 at a time.

Which tile a problem gets is decided in `Decode.configs`; decode.cu says at its head where all else is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fused_swiglu import Config, Problem

from .launching import SHARED_MEMORY, CutlassKernel

TOKENS = (8, 16, 32, 64)
MOST_FEATURES, MOST_STAGES = 128, 32
SMS = 132


@dataclass(frozen=True, slots=True)
class DecodeConfig(Config):
    """bm: tokens of a tile. bn: features of a tile, a launch argument: so many rows of each weight make a stage, and
    there are as many stages as fit into shared memory."""

    bm: int
    bn: int

    @property
    def at_launch(self) -> int:
        return self.bn

    @property
    def slabs(self) -> int:
        """Products of 64 rows for either half of the features."""
        return -(-self.bn // 64)

    @property
    def stage_bytes(self) -> int:
        return (2 * self.bn + self.bm) * 64 * 2


TABLE = tuple(DecodeConfig(bm, bn) for bm in TOKENS for bn in (40, 72, 112, 24, 64, 128))


class Decode(CutlassKernel):
    name = "cutlass.decode"
    role = "fused"
    source = "decode.cu"
    config_type = DecodeConfig

    def table(self) -> tuple[DecodeConfig, ...]:
        return TABLE

    def configs(self, problem: Problem) -> Iterable[DecodeConfig]:
        """The fewest tokens that cover m; of the features, what gives the busiest SM the fewest rows first."""
        bm = next((tokens for tokens in TOKENS if tokens >= problem.m), TOKENS[-1])

        def rows(bn: int) -> int:
            tiles = -(-problem.n // bn) * -(-max(problem.m, 1) // bm)
            return -(-tiles // SMS) * (bn + 4)  # a tile has a beginning and an end

        return tuple(DecodeConfig(bm, bn) for bn in sorted(range(MOST_FEATURES, 8, -8), key=rows))

    def defines(self, config: DecodeConfig) -> dict[str, int]:
        return {"FS_BM": config.bm, "FS_SLABS": config.slabs}

    def ring(self, config: DecodeConfig) -> tuple[int, int]:
        """As decode.cuh's `Decode` works it out."""
        beside = 1024 + config.bm * config.bn * 2 + 2 * 8 * MOST_STAGES + 64 * config.slabs * 64 * 2
        stages = min((SHARED_MEMORY - beside) // config.stage_bytes, MOST_STAGES)
        return stages, beside + stages * config.stage_bytes

    def invalid(self, config: DecodeConfig) -> str | None:
        if config.bm not in TOKENS:
            return f"takes bm of {', '.join(map(str, TOKENS))} tokens, not {config.bm}"
        if config.bn < 8 or config.bn % 8 or config.bn > MOST_FEATURES:
            return f"takes bn in multiples of 8 up to {MOST_FEATURES}, not {config.bn}"
        return None
