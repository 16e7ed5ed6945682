"""What rows of `determinism` say together: which kernels kept a row's bits over all m, each one's time over the fastest
at each m, and what keeping bits costs. From stored rows alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median

from .arithmetic import UNDECLARED, Arithmetic
from .intervals import Interval, paired_ratio
from .results import Environment, Row


def with_several_configs(variants: Iterable[tuple[str, str, object, str]]) -> set[tuple[str, str]]:
    """Of variants (kernel, arithmetic, where, config) those kernels and arithmetics that have several configs at one
    place: there a config is another way to compute; else it is what the kernel takes at that m."""
    configs: dict[tuple, set[str]] = {}
    for kernel, arithmetic, where, config in variants:
        configs.setdefault((kernel, arithmetic, where), set()).add(config)
    return {(kernel, arithmetic) for (kernel, arithmetic, _), found in configs.items() if len(found) > 1}


@dataclass(frozen=True, eq=False)
class Line:
    """One kernel under one arithmetic and one setting of the environment, at each m.

    config: None where it is whatever the kernel takes at each m. setting: NAME=VALUE, or empty. rows: by m. timed:
    those of them whose times can be compared, where any were timed by graph replay those that were.
    """

    kernel: str
    config: str | None
    arithmetic: str
    setting: str
    rows: dict[int, Row] = field(default_factory=dict)
    timed: dict[int, Row] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The kernel, with its config where it has several, and `(model)` or `(interpreter)` where it ran as that."""
        ran_on = next(iter(self.rows.values())).ran_on
        suffix = f"({ran_on})" if ran_on in ("interpreter", "model") else None
        return " ".join(filter(None, (self.kernel, self.config, suffix)))

    @property
    def declared(self) -> bool:
        """Whether the bits follow from its arithmetic."""
        return Arithmetic.parse(self.arithmetic).complete

    @property
    def library(self) -> bool:
        """Whether a library chooses the order of sums, and may heed the setting."""
        return Arithmetic.parse(self.arithmetic).accumulation == UNDECLARED

    @property
    def control(self) -> bool:
        return any(row.role == "control" for row in self.rows.values())

    @property
    def shares(self) -> dict[int, float]:
        """By m, the share of the first row's words that differ from those at the first m; without that m."""
        return {m: row.batch or 0.0 for m, row in self.rows.items() if m != row.first_m}

    @property
    def run_to_run(self) -> float | None:
        """The most, over all m; None where nothing was repeated."""
        return max((row.run_to_run for row in self.rows.values() if row.run_to_run is not None), default=None)

    @property
    def kept(self) -> bool:
        """Whether no word changed, at two m or more."""
        return bool(self.shares) and not any(self.shares.values()) and not self.run_to_run


@dataclass(frozen=True)
class Choice:
    """At one m: the fastest kernel, the fastest of those with some bits, and the time of this over that of the former,
    whose interval has no width where the two were not timed in one process."""

    m: int
    fastest: Line
    keeps: Line
    cost: Interval


@dataclass(frozen=True)
class Bits:
    """Bits that never changed: what gives them, and what they cost at each m. declared: they follow from the arithmetic
    `name`, so that each of its kernels gives them; else one kernel was only seen to keep them."""

    name: str
    declared: bool
    choices: list[Choice]

    @property
    def costs(self) -> dict[int, float]:
        """By m, the time over that of the fastest kernel."""
        return {choice.m: choice.cost[0] for choice in self.choices}


@dataclass(frozen=True)
class Range:
    """Lines of one problem but for m, and where they were run. everything: also what only links two processes."""

    title: str
    everything: list[Line]
    rows: list[Row]

    @cached_property
    def lines(self) -> list[Line]:
        """Those to be shown. What no setting touches is shown without, where it was run so."""
        plain = {(line.kernel, line.config, line.arithmetic) for line in self.everything if not line.setting}
        return [
            line
            for line in self.everything
            if not line.setting or line.library or (line.kernel, line.config, line.arithmetic) not in plain
        ]

    @cached_property
    def tokens(self) -> list[int]:
        return sorted({m for line in self.lines for m in line.rows})

    @cached_property
    def _links(self) -> dict[tuple[str | None, int], dict[tuple, Row]]:
        """By run and m, by variant: what no setting touches, so that it links processes."""
        found: dict[tuple[str | None, int], dict[tuple, Row]] = {}
        for line in self.everything:
            for m, row in () if line.library else line.timed.items():
                found.setdefault((row.run, m), {})[row.kernel, row.config, row.arithmetic] = row
        return found

    def over(self, row: Row, other: Row) -> float | None:
        """The median ratio of their times at one m. Of two processes: by way of the fastest variant that was timed in
        both and that no setting touches; None if there is none."""
        if row.run == other.run:
            return _ratio(row, other)
        mine, others = (self._links.get((run, row.m), {}) for run in (row.run, other.run))
        common = mine.keys() & others.keys()
        if not common:
            return None
        link = min(common, key=lambda variant: others[variant].time_us or math.inf)
        return _ratio(row, mine[link]) * _ratio(others[link], other)

    def cost(self, row: Row, other: Row) -> Interval | None:
        """`over` with its 95% interval, which has no width where they are of two processes."""
        if row.run == other.run:
            return paired_ratio(row.rounds or (), other.rounds or ())
        middle = self.over(row, other)
        return None if middle is None else (middle, middle, middle)

    @cached_property
    def fastest(self) -> dict[int, Line]:
        """By m, of the kernels that compute all of SwiGLU."""
        found = {}
        for m in self.tokens:
            racing = [line for line in self.lines if m in line.timed and not line.control]
            if racing:
                found[m] = min(racing, key=lambda line: self._order(line.timed[m], racing[0].timed[m]))
        return found

    def _order(self, row: Row, other: Row) -> float:
        ratio = self.over(row, other)
        return math.inf if ratio is None else ratio

    def over_fastest(self, line: Line) -> dict[int, float]:
        """By m, the line's time over that of the fastest."""
        ratios = {m: self.over(line.timed[m], other.timed[m]) for m, other in self.fastest.items() if m in line.timed}
        return {m: ratio for m, ratio in ratios.items() if ratio is not None}

    def links(self) -> list[Line]:
        """What a second process times again, so that its times can be compared: at each m the fastest that kept its
        bits and that no setting touches."""
        found = []
        for m in self.fastest:
            able = [line for line in self.lines if m in line.timed and line.kept and not line.library]
            if able:
                found.append(min(able, key=lambda line: self._order(line.timed[m], able[0].timed[m])))
        return list(dict.fromkeys(found))

    @cached_property
    def kept(self) -> list[Bits]:
        """All bits that never changed, of kernels that were timed; those at the most m first, and then those that cost
        least, in the geometric mean."""
        givers: dict[tuple[str, bool], list[Line]] = {}
        for line in self.lines:
            if line.kept and not line.control:
                alone = " ".join(filter(None, (line.label, line.arithmetic, line.setting)))
                givers.setdefault((line.arithmetic if line.declared else alone, line.declared), []).append(line)
        found = [Bits(*name, self._choices(lines)) for name, lines in givers.items()]
        timed = [bits for bits in found if bits.choices]
        return sorted(timed, key=lambda bits: (-len(bits.choices), mean(map(math.log, bits.costs.values()))))

    def _choices(self, lines: list[Line]) -> list[Choice]:
        choices = []
        for m, fastest in self.fastest.items():
            other = fastest.timed[m]
            able = [line for line in lines if m in line.timed]
            keeps = min(able, key=lambda line: self._order(line.timed[m], other), default=None)
            if keeps and (cost := self.cost(keeps.timed[m], other)):
                choices.append(Choice(m, fastest, keeps, cost))
        return choices


def ranges(rows: Iterable[Row], environments: Iterable[Environment]) -> list[Range]:
    """A Range for each problem but for m, of rows that are ok; of what was run several times, the last. environments:
    those of the rows' runs, which give the settings."""
    settings = {
        environment.run: " ".join(f"{name}={value}" for name, value in (environment.settings or {}).items())
        for environment in environments
    }
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.status == "ok" and row.first_m is not None and row.batch is not None and row.arithmetic is not None:
            found.setdefault(_title(row), []).append(row)
    return [Range(title, _lines(members, settings), members) for title, members in found.items()]


def _lines(rows: list[Row], settings: dict[str, str]) -> list[Line]:
    several = with_several_configs((r.kernel, r.arithmetic or "", (r.run, r.m), r.config or "") for r in rows)
    replayed = {(row.run, row.m) for row in rows if row.launch == "graph"}
    lines: dict[tuple, Line] = {}
    for row in rows:
        kernel, arithmetic, setting = row.kernel, row.arithmetic or "", settings.get(row.run or "", "")
        config = row.config if (kernel, arithmetic) in several else None
        line = lines.setdefault((kernel, config, arithmetic, setting), Line(kernel, config, arithmetic, setting))
        line.rows[row.m] = row
        if row.time_us and row.rounds and (row.launch == "graph" or (row.run, row.m) not in replayed):
            line.timed[row.m] = row
    return list(lines.values())


def _title(row: Row) -> str:
    """The problem but for m, its operands, and where it was run."""
    where = row.ran_on if row.is_result else "CPU"
    layout = f"{row.layout} weights" if row.layout else None
    parts = (f"k={row.k}", f"n={row.n}", row.dtype, row.activation, layout, f"inputs {row.inputs}", where)
    return ", ".join(filter(None, (*parts, f"seed {row.seed}" if row.seed else None)))


def _ratio(row: Row, other: Row) -> float:
    return median(a / b for a, b in zip(row.rounds or (), other.rounds or (), strict=False))
