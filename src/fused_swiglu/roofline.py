"""roofline: how near kernels come to the ceilings that were measured in their run, at how many tokens a problem turns
from memory-bound to compute-bound with and without fusion, and which kernel is the fastest where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .intervals import SAME, verdict
from .problem import Problem
from .results import Environment, Row
from .standings import Standing, standings

# Elements that a token moves to and from memory, beside the weights, as (of k, of n). A pointwise kernel reads its
# operands and writes its result; torch.eager has two of them, silu and the product, torch.compile one.
MOVED = {
    "fused": (1, 1),
    "torch.compile": (2, 2 + 3),
    "torch.eager": (2, 2 + 2 + 3),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel's rates on one problem. compute, memory: 4mnk operations, and the fewest bytes, over its time, as shares
    of the matrix rate and the read bandwidth that were measured in its run; None where these were not."""

    standing: Standing
    row: Row
    compute: float | None
    memory: float | None


def point(standing: Standing, row: Row, environments: Mapping[str, Environment]) -> Point:
    here = environments.get(row.run or "")
    compute = row.tflops / here.peak_tflops if here and here.peak_tflops and row.tflops else None
    memory = row.gbs / here.peak_gbs if here and here.peak_gbs and row.gbs else None
    return Point(standing, row, compute, memory)


def ridge(k: int, n: int, moved: tuple[int, int], tflops: float, gbs: float) -> float | None:
    """Tokens at which 4mnk operations at the matrix rate (10^12/s) take as long as the bytes at the bandwidth (10^9/s):
    the weights once, and for each token moved[0] * k + moved[1] * n elements of two bytes. None where moving a token
    takes longer than computing it: then more tokens never make the problem compute-bound."""
    computing = 4 * n * k / (tflops * 1e12)
    moving = 2 * (moved[0] * k + moved[1] * n) / (gbs * 1e9)
    weights = 2 * 2 * n * k / (gbs * 1e9)
    return weights / (computing - moving) if computing > moving else None


def least(standing: Standing, here: Environment) -> tuple[float, str] | None:
    """The least time (us) that a fused kernel can take by the ceilings, and which decides: `computing` or `memory`."""
    if not here.peak_tflops or not here.peak_gbs:
        return None
    problem = Problem(standing.m, standing.n, standing.k)
    computing, moving = problem.flops / here.peak_tflops / 1e6, problem.bytes / here.peak_gbs / 1e3
    return (computing, "computing") if computing >= moving else (moving, "memory")


@dataclass(frozen=True, slots=True)
class Fastest:
    """The kernel that takes the least GPU time on a problem, and those that are not distinguished from it."""

    standing: Standing
    row: Row
    ties: tuple[str, ...]


def fastest(standing: Standing) -> Fastest | None:
    """Among the kernels that compute SwiGLU; None where that is one or none."""
    bests = [row for name in standing.kernels() if (row := standing.best(name)) and row.role in ("fused", "unfused")]
    if len(bests) < 2:
        return None
    first = standing.best(*(row.kernel for row in bests))
    assert first is not None
    compared = (standing.compare(row, first) for row in bests if row.kernel != first.kernel)
    return Fastest(standing, first, tuple(c.row.kernel for c in compared if c and verdict(c.ratio) == SAME))


def problems(rows: Iterable[Row]) -> list[Standing]:
    """Those of the models' sizes on normal operands that several kernels were timed on."""
    return [s for s in standings(rows) if s.model and s.inputs == "normal" and len(s.kernels()) > 1]
