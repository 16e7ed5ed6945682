"""standings: how the kernels stand to each other on each problem, from rows of any number of runs.

Every run that counts has timed torch.eager too. Two kernels of one run are compared round by round; two of different
runs through torch.eager, by the ratio of their ratios to it, as wide as both intervals allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from .intervals import Interval, paired_ratio
from .problem import MODELS, Problem
from .results import Row
from .tables import EAGER

_paired = cache(paired_ratio)
CASE = ("k", "n", "m", "dtype", "activation", "bias", "layout", "inputs", "regime", "ran_on")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row's time over another's, as (middle, low, high); through: what they were compared by, None if directly."""

    row: Row
    other: Row
    ratio: Interval
    through: str | None


def call_us(row: Row) -> float | None:
    """Time of a call (us) where Python calls again and again: the GPU's part or the host's, whichever is longer.
    None where the host's was not measured."""
    return None if row.host_us is None or row.time_us is None else max(row.time_us, row.host_us)


class Standing:
    """The timed rows of one problem under one regime on one GPU, from runs that timed torch.eager too; its sizes."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._eager = {(row.run, row.launch): row for row in self.rows if row.kernel == EAGER}
        first = self.rows[0]
        self.k, self.n, self.m = first.k, first.n, first.m
        self.regime, self.ran_on, self.inputs = first.regime, first.ran_on, first.inputs

    @property
    def model(self) -> str | None:
        """Which model's sizes these are; None for others."""
        return next((name for name, sizes in MODELS.items() if sizes == (self.k, self.n)), None)

    @property
    def flops(self) -> int:
        """4mnk."""
        return Problem(self.m, self.n, self.k).flops

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte that a fused kernel moves at least."""
        return self.flops / Problem(self.m, self.n, self.k).bytes

    def kernels(self, *globs: str) -> list[str]:
        """Names of the kernels that were timed and match, in order."""
        return list(dict.fromkeys(row.kernel for row in self.rows if _matches(row, globs)))

    def best(self, *globs: str, calls: bool = False) -> Row | None:
        """The quickest variant among the kernels that match; None without one. calls: by the time of a call.

        Of a variant that several runs timed, the one in the middle stands for it: none is picked for being lucky. Where
        a kernel was replayed from a graph, its launches from a stream do not count.
        """
        variants: dict[tuple, list[tuple[float, int]]] = {}
        replayed = {row.kernel for row in self.rows if row.launch == "graph"}
        for i, row in enumerate(self.rows):
            if not _matches(row, globs) or (row.kernel in replayed and row.launch != "graph" and not calls):
                continue
            place = self._place(row, calls)
            if place is not None:
                variants.setdefault((row.kernel, row.config, row.arithmetic), []).append((place, i))
        middles = [sorted(places)[(len(places) - 1) // 2] for places in variants.values()]
        return self.rows[min(middles)[1]] if middles else None

    def _place(self, row: Row, calls: bool) -> float | None:
        """Its time in units of torch.eager's in the same run."""
        eager = self._eager.get((row.run, row.launch))
        if not calls:
            return 1.0 if row is eager else (row.ratios or {}).get(EAGER, (None,))[0]
        ours, other = call_us(row), call_us(eager) if eager else None
        return ours / other if ours and other else None

    def compare(self, row: Row, other: Row, calls: bool = False) -> Comparison | None:
        """The row's time over the other's; None where nothing relates them. calls: of a call; where the host's part is
        the longer, the ratio of two medians, with no interval about it."""
        if calls and any((r.host_us or 0) > (r.time_us or 0) for r in (row, other)):
            ours, theirs = self._place(row, calls), self._place(other, calls)
            if ours is None or theirs is None:
                return None
            ratio = ours / theirs
            return Comparison(row, other, (ratio, ratio, ratio), None if row.run == other.run else EAGER)
        if (row.run, row.launch) == (other.run, other.launch) and row.rounds and other.rounds:
            return Comparison(row, other, _paired(row.rounds, other.rounds), None)
        ours, theirs = (_to_eager(r) for r in (row, other))
        if ours is None or theirs is None:
            return None
        (mid, low, high), (at, least, most) = ours, theirs
        return Comparison(row, other, (mid / at, low / most, high / least), EAGER)


def _to_eager(row: Row) -> Interval | None:
    return (1.0, 1.0, 1.0) if row.kernel == EAGER else (row.ratios or {}).get(EAGER)


def _matches(row: Row, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(row.kernel, glob) for glob in globs or ("*",))


def standings(rows: Iterable[Row]) -> list[Standing]:
    """One for each problem, operands, regime and GPU, by sizes; of rows that are ok and whose time is a GPU's."""
    cases: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.status == "ok" and row.time_us and row.is_result and row.relation is None and row.rung is None:
            cases.setdefault(tuple(getattr(row, name) for name in CASE), []).append(row)
    return [Standing(cases[key]) for key in sorted(cases, key=_order)]


def _order(key: tuple) -> tuple:
    return (*key[:3], *map(str, key[3:]))
