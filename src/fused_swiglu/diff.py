"""diff: what changed between two runs, cell by cell; from stored rows alone.

A cell is what can be measured again: kernel, config, arithmetic, problem, inputs, regime and launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from .intervals import FASTER, SAME, SLOWER, Interval, verdict
from .results import Environment, Row

REFERENCES = ("cublas.gemm", "torch.eager", "quack.gated")
_UNTIMED = (None, None)


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in runs A and B: `a` or `b` is None where that run has no such cell.

    ratio: time B over time A, with its least and greatest value over the quartiles; None where either is no GPU's time.
    reference: the kernel whose time, in each run, this one's is compared with: the first of `REFERENCES` that both rows
        have a ratio to, or None. relative: ratio B over ratio A to it, with its least and greatest value over both 95%
        intervals.
    """

    a: Row | None
    b: Row | None
    ratio: Interval | None = None
    reference: str | None = None
    relative: Interval | None = None

    @property
    def row(self) -> Row:
        row = self.b or self.a
        assert row is not None
        return row

    @property
    def verdict(self) -> str | None:
        """`faster`, `slower` or `not distinguished`; None without two times.

        Both must say so: the quartiles of the times, which do not overlap, and, where there is a reference, the time in
        units of the reference's, whose intervals do not overlap. The first alone would take a drift of the clock for
        a change of the kernel: a drift moves the reference too, and leaves the second. The second alone would
        take a change of the reference for one of the kernel.
        """
        if self.ratio is None:
            return None
        evidence = [self.ratio] if self.relative is None else [self.ratio, self.relative]
        if all(high < 1 for _, _, high in evidence):
            return FASTER
        return SLOWER if all(low > 1 for _, low, _ in evidence) else SAME

    @property
    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Against each kernel that both rows have a ratio to: what A and B say, each on its own."""
        if self.a is None or self.b is None or not (self.a.is_result and self.b.is_result):
            return {}
        ours, theirs = self.a.ratios or {}, self.b.ratios or {}
        return {
            name: (verdict(ours[name]), verdict(theirs[name]))
            for name in ours
            if name in theirs and name != self.row.kernel
        }

    @property
    def status(self) -> tuple[str | None, str | None] | None:
        """Status in A and B, where it changed; None stands for a run without the cell."""
        before, after = (None if row is None else row.status for row in (self.a, self.b))
        return None if before == after else (before, after)

    @property
    def m0(self) -> tuple[float, float] | None:
        """M0 in A and B, where both know it and it changed."""
        if self.a is None or self.b is None or self.a.m0 is None or self.b.m0 is None or self.a.m0 == self.b.m0:
            return None
        return self.a.m0, self.b.m0

    @property
    def changed(self) -> bool:
        other = any(before != after for before, after in self.verdicts.values())
        return self.verdict in (FASTER, SLOWER) or other or bool(self.status or self.m0)

    @property
    def worse(self) -> bool:
        """Slower, no longer ok, or further from its declaration; a cell that was not run again is not worse."""
        lost = self.status is not None and self.status[0] == "ok" and self.status[1] not in (None, "ok")
        before, after = self.m0 or (0.0, 0.0)
        return self.verdict == SLOWER or lost or after > before


def diff(a: Iterable[Row], b: Iterable[Row]) -> list[Change]:
    """A Change for every cell of either run, in A's order, then what only B has. Of rows of one cell the last counts.

    A row without a time (it failed, say, or was not supported) is compared with each regime and launch of the other
    run's cell.
    """
    before, after = _cells(a), _cells(b)
    return [
        _change(one, other)
        for key in dict.fromkeys([*before, *after])
        for one, other in _pairs(before.get(key, {}), after.get(key, {}))
    ]


def environments(a: Iterable[Environment], b: Iterable[Environment]) -> dict[str, tuple[str, str]]:
    """Field -> (A's values, B's values), of the fields that differ. Several runs' values are joined."""
    before, after = list(a), list(b)
    found = {}
    for name in (field.name for field in fields(Environment) if field.name not in ("run", "schema", "date")):
        pair = _values(before, name), _values(after, name)
        if pair[0] != pair[1]:
            found[name] = pair
    return found


def _values(given: list[Environment], name: str) -> str:
    values = (getattr(environment, name) for environment in given)
    return ", ".join(dict.fromkeys(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values if v is not None))


def _cells(rows: Iterable[Row]) -> dict[tuple, dict[tuple, Row]]:
    cells: dict[tuple, dict[tuple, Row]] = {}
    for row in rows:
        problem = row.case[1:]  # without the run
        key = (row.kernel, row.config, row.arithmetic, *problem, row.relation)
        cells.setdefault(key, {})[row.regime, row.launch] = row
    return cells


def _pairs(a: dict[tuple, Row], b: dict[tuple, Row]) -> Iterable[tuple[Row | None, Row | None]]:
    for way in dict.fromkeys([*a, *b]):
        if way == _UNTIMED and a and b and not (way in a and way in b):
            continue  # it stands in for what the other run has timed, below
        yield a.get(way, a.get(_UNTIMED)), b.get(way, b.get(_UNTIMED))


def _change(a: Row | None, b: Row | None) -> Change:
    if a is None or b is None or not (a.is_result and b.is_result):
        return Change(a, b)
    before, after = _quartiles(a), _quartiles(b)
    if before is None or after is None:
        return Change(a, b)
    ours, theirs = a.ratios or {}, b.ratios or {}
    for name in REFERENCES:
        if name != a.kernel and name in ours and name in theirs and min(*ours[name], *theirs[name]) > 0:
            return Change(a, b, _over(after, before), name, _over(theirs[name], ours[name]))
    return Change(a, b, _over(after, before))


def _quartiles(row: Row) -> Interval | None:
    """Median and quartiles of the time, where all are known."""
    if not row.time_us or not row.time_us_q1 or not row.time_us_q3:
        return None
    return row.time_us, row.time_us_q1, row.time_us_q3


def _over(b: Interval, a: Interval) -> Interval:
    """b / a: of the middles, and the least and greatest that the intervals allow."""
    return b[0] / a[0], b[1] / a[2], b[2] / a[1]
