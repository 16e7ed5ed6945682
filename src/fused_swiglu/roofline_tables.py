"""Roofline, crossover and the map of the fastest as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from .results import Environment, Row
from .roofline import MOVED, fastest, least, point, ridge
from .standings import Standing
from .tables import EAGER, digits, duration, short_arithmetic

FUSED = ("cutlass.*", "triton.fused", "quack.gated")
NOTES = (
    "Rates count 4mnk operations, and the fewest bytes that a fused kernel moves; in brackets their share of the",
    "matrix rate and of the read bandwidth that the run measured. `least`: the time that these ceilings allow a fused",
    "kernel; bound by memory where moving takes longer. The matrix rate is a large product's: others can pass it.",
)


def rates(found: Iterable[Standing], environments: Mapping[str, Environment]) -> str:
    """A line for each problem, with torch.eager and the fastest fused kernel: time, TFLOP/s and GB/s with shares."""
    heads = ("model", "regime", "m", "bound", "least", "torch.eager", "fused", "fused by", "TFLOP/s", "GB/s")
    lines = []
    for standing in found:
        row = _fused(standing)
        here = environments.get(row.run or "") if row else None
        bound = least(standing, here) if here else None
        if row is None or bound is None:
            continue
        eager = standing.best(EAGER)
        at = point(standing, row, environments)
        lines.append(
            (
                standing.model or "",
                standing.regime or "",
                str(standing.m),
                bound[1],
                duration(bound[0]),
                duration(eager.time_us) if eager and eager.time_us else "",
                duration(row.time_us or 0),
                f"{row.kernel} {_recipe(row)}",
                _rate(row.tflops, at.compute),
                _rate(row.gbs, at.memory),
            )
        )
    return _table(heads, lines, numbers=("m", "least", "torch.eager", "fused", "TFLOP/s", "GB/s"))


def _fused(standing: Standing) -> Row | None:
    return standing.best(*(name for name in standing.kernels(*FUSED) if _is_fused(standing, name)))


def _is_fused(standing: Standing, name: str) -> bool:
    row = standing.best(name)
    return row is not None and row.role == "fused"


def _rate(value: float | None, share: float | None) -> str:
    return "" if value is None else digits(value) + (f" ({100 * share:.0f}%)" if share is not None else "")


def _recipe(row: Row) -> str:
    return short_arithmetic(row.arithmetic).split(":")[1] if row.arithmetic else ""


def crossover(found: Iterable[Standing], environments: Iterable[Environment]) -> str:
    """For each model the tokens at which it turns from memory-bound to compute-bound, by the median of the ceilings
    that runs measured: fused, by torch.compile and by torch.eager."""
    measured = [(e.peak_tflops, e.peak_gbs) for e in environments if e.peak_tflops and e.peak_gbs]
    tflops, gbs = (median(values) for values in zip(*measured, strict=True))
    models = dict.fromkeys((s.model, s.k, s.n) for s in found)
    lines = []
    for model, k, n in models:
        tokens = (ridge(k, n, moved, tflops, gbs) for moved in MOVED.values())
        lines.append((model or "", str(k), str(n), *("never" if m is None else f"{m:.0f}" for m in tokens)))
    heads = ("model", "k", "n", *MOVED)
    said = f"At {tflops:.0f} TFLOP/s and {gbs:.0f} GB/s, as measured, compute-bound from so many tokens on:"
    return f"{said}\n\n{_table(heads, lines, numbers=heads[1:])}"


def fastest_map(found: Iterable[Standing]) -> str:
    """The kernel that takes the least GPU time for each model and number of tokens, of those that were timed there;
    = before those not distinguished from it."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for standing in found:
        if best := fastest(standing):
            text = " = ".join((best.row.kernel, *best.ties))
            cells.setdefault((standing.model or "", standing.regime or ""), {})[standing.m] = text
    tokens = sorted({m for line in cells.values() for m in line})
    lines = [(*key, *(line.get(m, "") for m in tokens)) for key, line in cells.items()]
    return _table(("model", "regime", *(f"m={m}" for m in tokens)), lines)


def _table(heads: tuple[str, ...], lines: list[tuple[str, ...]], numbers: Iterable[str] = ()) -> str:
    right = set(numbers)
    made = [heads, tuple("---:" if head in right else "---" for head in heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in made)
