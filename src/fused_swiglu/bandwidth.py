"""bandwidth: what a GPU of other memory bandwidth would make of times that were measured here.

The model has two parts, both from measurements of one run. A GEMM takes as long as its flops at the measured matrix
rate or its fewest bytes at the measured read bandwidth, whichever is longer, and scales as that does. What torch.eager
takes beside its GEMMs (its time less the bare GEMM's) moves tensors only, and scales with the bandwidth. Launches scale
with neither, and count as part of what they launch: the model is at its weakest below about 20 us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .problem import Problem
from .results import Environment, Row
from .standings import Standing
from .tables import EAGER

H100_OVER_H200 = 3.35 / 4.8  # TB/s of the SXM cards, by NVIDIA's datasheets


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another GPU of the same matrix rate. gbs: its read bandwidth (GB/s), if it was measured; otherwise the one
    measured here by the datasheets' quotient."""

    name: str = "an H100"
    gbs: float | None = None

    def slower(self, here: Environment) -> float | None:
        """This GPU's read bandwidth over the other's; None where it was not measured."""
        if not here.peak_gbs:
            return None
        return here.peak_gbs / self.gbs if self.gbs else 1 / H100_OVER_H200

    def speedup(
        self, standing: Standing, fused: Row | None, environments: Mapping[str, Environment]
    ) -> tuple[float, None, list[Row]] | None:
        """torch.eager's time there over the fused kernel's; None where a part of it was not measured."""
        eager, gemm = standing.best(EAGER), standing.best("cublas.gemm")
        here = environments.get(fused.run or "") if fused else None
        slower = self.slower(here) if here else None
        if not (fused and eager and gemm and here and slower and here.peak_tflops and fused.tflops and fused.time_us):
            return None
        bare, ours = standing.compare(gemm, eager), standing.compare(fused, eager)
        if not bare or not ours:
            return None
        problem = Problem(standing.m, standing.n, standing.k)
        written_twice = problem.bytes + 2 * standing.m * standing.n  # gate and up, two bytes each, in place of out
        gemm_there = bare.ratio[0] * _scale(problem.flops, written_twice, here, slower)
        fused_there = ours.ratio[0] * _scale(problem.flops, problem.bytes, here, slower)
        beside_there = max(0.0, 1 - bare.ratio[0]) * slower
        return (gemm_there + beside_there) / fused_there, None, [eager, gemm, fused]


def _scale(flops: int, moved: int, here: Environment, slower: float) -> float:
    """By what a GEMM's time grows where reading takes `slower` times as long."""
    computing, moving = flops / ((here.peak_tflops or 1) * 1e12), moved / ((here.peak_gbs or 1) * 1e9)
    return max(computing, moving * slower) / max(computing, moving)
