"""effects: what each factor does to the time, from stored rows alone: pairs of variants that differ in it and share
everything else.

Two variants that were timed together have a paired ratio, round by round. Two that were not are compared through the
reference that was timed beside either: the ratio of their ratios to it, as wide as both intervals allow. (Near 100 us
one may have been launched in a graph and the other not; each was so with its reference.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import median

from .diff import REFERENCES
from .factors import ACTIVATION, CLUSTER, FUSION, RECIPE, TILE, Design, Variant, natural, rank
from .intervals import Interval, paired_ratio, verdict
from .results import Row

_paired = cache(paired_ratio)  # tables and figures ask for the same ones
EQUAL_TILE, BEST = "equal tile", "each one's best"


@dataclass(frozen=True, slots=True)
class Pair:
    """A variant's time over another's. through: the reference by which they were compared, None if round by round."""

    row: Row
    other: Row
    ratio: Interval
    through: str | None

    @property
    def verdict(self) -> str | None:
        """`faster`, `slower` or `not distinguished`; None where a time is no result."""
        return verdict(self.ratio) if self.row.is_result and self.other.is_result else None


@dataclass(frozen=True, slots=True)
class Effect:
    """A level of a factor over another, in every matched pair of one problem.

    kernel: whose variants these are; empty for `fusion`, which is between kernels. context: the recipe, or
    `no activation`; empty where the factor is one of the two.
    """

    factor: str
    kernel: str
    context: str
    level: str
    base: str
    pairs: tuple[Pair, ...]

    @property
    def middle(self) -> float:
        """The median over the pairs."""
        return median(pair.ratio[0] for pair in self.pairs)

    @property
    def range(self) -> tuple[float, float]:
        """Of one pair its interval, of several the least and the greatest of their middles."""
        if len(self.pairs) == 1:
            return self.pairs[0].ratio[1:]
        middles = [pair.ratio[0] for pair in self.pairs]
        return min(middles), max(middles)

    def count(self, wanted: str) -> int:
        return sum(pair.verdict == wanted for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class Answer:
    """A variant of one kernel over one of another. question: EQUAL_TILE or BEST. matched: they share all but the
    fusion."""

    question: str
    context: str
    variant: Variant
    other: Variant
    pair: Pair
    matched: bool


class Cell:
    """The timed variants of one problem: rows that may be compared."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[Variant, list[Row]] = {}
        for row in rows:
            self.rows.setdefault(Variant.of_row(row), []).append(row)
        self.design = Design(self.rows)

    @property
    def row(self) -> Row:
        return next(iter(self.rows.values()))[0]

    def pair(self, a: Variant, b: Variant) -> Pair | None:
        """By the last run that timed both; without one through a reference; None if there is none either."""
        others = {(row.run, row.launch): row for row in self.rows[b] if row.rounds}
        together = [
            (row, others[row.run, row.launch]) for row in self.rows[a] if row.rounds and (row.run, row.launch) in others
        ]
        if together:
            last = [(row, other) for row, other in together if row.run == together[-1][0].run]
            row, other = next((pair for pair in last if pair[0].launch == "graph"), last[-1])
            return Pair(row, other, _paired(row.rounds or (), other.rounds or ()), None)
        row, other = self.rows[a][-1], self.rows[b][-1]
        ours, theirs = row.ratios or {}, other.ratios or {}
        for name in REFERENCES:
            if name in ours and name in theirs:
                (mid, low, high), (at, least, most) = ours[name], theirs[name]
                return Pair(row, other, (mid / at, low / most, high / least), name)
        return None

    def standing(self, variant: Variant) -> float:
        """For choosing the best: the first time that was taken of it, in units of a reference's if there is one. (Later
        times are of variants that were chosen by the first.)"""
        row = self.rows[variant][0]
        return next(
            ((row.ratios or {})[name][0] for name in REFERENCES if name in (row.ratios or {})), row.time_us or 0
        )

    def best(self, variants: Iterable[Variant]) -> Variant | None:
        return min(variants, key=self.standing, default=None)


def cells(rows: Iterable[Row]) -> list[Cell]:
    """A cell for each problem, operands, regime and device; of rows that are ok and have a time, and without the
    references, which are what the others are compared through."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.status == "ok" and row.time_us and row.relation is None and row.kernel not in REFERENCES:
            place = row.ran_on if row.is_result else "cpu"
            found.setdefault((*row.case[1:], row.seed, row.regime, place), []).append(row)
    return [Cell(group) for group in found.values()]


def effects(cell: Cell, every: bool = False) -> list[Effect]:
    """For each set of variants that differ in one factor alone, each of its levels over the commonest; every: also over
    each other. The commonest is what most variants of that kernel and context have, of several the first in order.
    Sorted by factor, kernel, context.
    """
    found: dict[tuple[str, str, str], list[tuple[Variant, Variant]]] = {}
    for a, b in combinations(cell.design.variants, 2):
        if factor := cell.design.factor(a, b):
            kernel = "" if factor == FUSION else a.family
            context = "" if factor in (RECIPE, ACTIVATION) else a.context
            found.setdefault((factor, kernel, context), []).append((a, b))
    keys = sorted(found, key=lambda key: (rank(key[0]), *key[1:]))
    return [effect for key in keys for effect in _of_factor(cell, key, found[key], every)]


def _of_factor(
    cell: Cell, key: tuple[str, str, str], matched: list[tuple[Variant, Variant]], every: bool
) -> Iterator[Effect]:
    factor, kernel, context = key
    levels = {v: cell.design.level(v, factor) for pair in matched for v in pair}
    like = (v for v in cell.rows if kernel in ("", v.family) and context in ("", v.context) and factor in v.levels)
    counts = Counter(cell.design.level(v, factor) for v in like)
    order = {level: i for i, level in enumerate(sorted(counts, key=lambda level: (-counts[level], natural(level))))}
    first = {v: order[level] for v, level in levels.items()}  # of the level that a variant is compared with
    for a, b in matched:
        least = min(first[a], first[b])
        first[a] = first[b] = least
    pairs: dict[tuple[str, str], list[Pair]] = {}
    for a, b in matched:
        if order[levels[a]] < order[levels[b]]:
            a, b = b, a
        if (every or order[levels[b]] == first[b]) and (pair := cell.pair(a, b)):
            pairs.setdefault((levels[a], levels[b]), []).append(pair)
    for level, base in sorted(pairs, key=lambda both: (order[both[1]], natural(both[0]))):
        yield Effect(*key, level, base, tuple(pairs[level, base]))


def answers(
    cell: Cell,
    kernel: str = "cutlass.pingpong",
    levels: tuple[tuple[str, str], ...] = (("swish", "overlap"),),
    other: str = "cutlass.evt",
) -> list[Answer]:
    """The question that the study asks first: Pingpong overlap against EVT, at each equal output tile and at each one's
    best, for each recipe.

    At an equal tile: every pair that shares cluster, schedule and all else but the fusion; for a tile that has none the
    best of either in the same schedule.
    """
    ours = [v for v in cell.rows if v.kernel == kernel and all(v.levels.get(f) == level for f, level in levels)]
    theirs = [v for v in cell.rows if v.kernel == other]
    found: list[Answer] = []
    for context in dict.fromkeys(v.context for v in ours):
        sides = [v for v in ours if v.context == context], [v for v in theirs if v.context == context]
        asked = [(EQUAL_TILE, a, b) for a, b in _equal_tiles(cell, *sides)]
        a, b = map(cell.best, sides)
        if a and b:
            asked.append((BEST, a, b))
        for question, a, b in asked:
            if pair := cell.pair(a, b):
                found.append(Answer(question, context, a, b, pair, cell.design.factor(a, b) == FUSION))
    return found


def _equal_tiles(cell: Cell, ours: list[Variant], theirs: list[Variant]) -> Iterator[tuple[Variant, Variant]]:
    places = {tuple(v.levels.get(name, "") for name in (TILE, "schedule")) for v in ours if TILE in v.levels}
    for place in sorted(places, key=lambda place: natural(place[0])):
        here, there = (
            [v for v in side if tuple(v.levels.get(name, "") for name in (TILE, "schedule")) == place]
            for side in (ours, theirs)
        )
        matched = [(a, b) for a in here for b in there if cell.design.factor(a, b) == FUSION]
        if matched:
            yield from sorted(matched, key=lambda pair: natural(pair[0].levels[CLUSTER]))
        elif (a := cell.best(here)) and (b := cell.best(there)):
            yield a, b
