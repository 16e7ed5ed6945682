"""Answers and effects as tables: for a terminal, and in markdown for a README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .effects import BEST, Answer, Cell, Effect, answers, cells, effects
from .factors import CLUSTER, TILE, Variant, rank
from .intervals import FASTER, SAME, SLOWER, Interval
from .results import Row
from .tables import CPU_NOTE, WIDE, duration

HEADLINE = "headline"
NOTES = (
    "Ratios are of times, the first over the second; below 1 the first is faster. Of two variants that were timed",
    "together: the median over rounds, and its 95% interval. Of several pairs, which differ in this factor alone: the",
    "median of theirs (from the least to the greatest). A pair is faster or slower where its whole interval is on one",
    "side of 1, and the middle at least 0.5% from it. * or `by reference`: timed in different groups, so compared",
    "through the reference that was timed with both. The best is chosen by a first look, then timed anew, together.",
)


@dataclass(frozen=True)
class Table:
    title: str
    heads: tuple[str, ...]
    lines: list[tuple[str, ...]]
    words: frozenset[str]  # heads of columns that are no numbers

    def markdown(self) -> str:
        made = [self.heads, tuple("---" if head in self.words else "---:" for head in self.heads), *self.lines]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in made) + "\n"


def factors_of(rows: Iterable[Row]) -> list[str]:
    """Every factor that has an effect in these rows, in order."""
    return sorted({effect.factor for cell in cells(rows) for effect in effects(cell)}, key=rank)


def tables(rows: Iterable[Row], factors: Sequence[str] = (), every: bool = False) -> list[Table]:
    """The headline and the effects of these factors, of all if there are none; every: each level over each other."""
    found = cells(rows)
    shared, columns = _problems(found)
    made = []
    if not factors or HEADLINE in factors:
        lines = [(*columns(cell), *_answer(answer)) for cell in found for answer in answers(cell)]
        made.append(_table("Pingpong overlap against EVT", columns.heads, _ANSWER, lines))
    lines = [
        (*columns(cell), *_effect(effect))
        for cell in found
        for effect in effects(cell, every)
        if not factors or effect.factor in factors
    ]
    made.append(_table("Effects", columns.heads, _EFFECT, lines))
    return [Table(f"{table.title} ({shared})", table.heads, table.lines, table.words) for table in made if table.lines]


_WORDS = ("dtype", "layout", "inputs", "regime", "ran on", "recipe", "at", "pingpong", "evt", "verdict")
_WORDS += ("factor", "kernel", "with", "level", "over")
_ANSWER = ("recipe", "at", "pingpong", "evt", "time", "time of evt", "ratio", "verdict")
_EFFECT = ("factor", "kernel", "with", "level", "over", "ratio", "pairs", FASTER, SLOWER, SAME, "by reference")


def _table(title: str, problem: tuple[str, ...], heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    return Table(title, (*problem, *heads), lines, frozenset(_WORDS))


@dataclass(frozen=True)
class _Columns:
    heads: tuple[str, ...]
    of: Callable[[Row], dict[str, str]]

    def __call__(self, cell: Cell) -> tuple[str, ...]:
        values = self.of(cell.row)
        return tuple(values[head] for head in self.heads)


def _problems(found: list[Cell]) -> tuple[str, _Columns]:
    """What all have in common, and columns for the sizes and for what they do not."""
    values = [problem_of(cell.row) for cell in found]
    varying = [name for name in (values[0] if values else ()) if len({v[name] for v in values}) > 1]
    common = [text for name, text in (values[0] if values else {}).items() if name not in (*varying, "k", "n", "m")]
    heads = ("k", "n", "m", *(name for name in varying if name not in ("k", "n", "m")))
    return ", ".join(filter(None, common)), _Columns(heads, problem_of)


def problem_of(row: Row) -> dict[str, str]:
    sizes = {"k": str(row.k), "n": str(row.n), "m": str(row.m)}
    layout, inputs = (
        f"{text} {what}" if text else "" for text, what in ((row.layout, "weights"), (row.inputs, "inputs"))
    )
    ran_on = row.ran_on or "" if row.is_result else "CPU"
    return sizes | {
        "dtype": row.dtype or "", "layout": layout, "inputs": inputs, "regime": row.regime or "", "ran on": ran_on
    }  # fmt: skip


def _answer(answer: Answer) -> tuple[str, ...]:
    pair = answer.pair
    question = (
        answer.question if answer.matched or answer.question == BEST else f"{answer.question}, else each one's best"
    )
    return (
        answer.context,
        question,
        geometry(answer.variant),
        geometry(answer.other),
        duration(pair.row.time_us or 0),
        duration(pair.other.time_us or 0),
        interval(pair.ratio) + ("*" if pair.through else ""),
        pair.verdict or "no result",
    )


def _effect(effect: Effect) -> tuple[str, ...]:
    middle, (low, high) = effect.middle, effect.range
    one = len(effect.pairs) == 1
    results = any(pair.verdict for pair in effect.pairs)
    return (
        effect.factor,
        effect.kernel,
        effect.context,
        effect.level,
        effect.base,
        interval((middle, low, high)) if one else f"{middle:.3f} ({low:.3f} to {high:.3f})",
        str(len(effect.pairs)),
        *(str(effect.count(verdict)) if results else "" for verdict in (FASTER, SLOWER, SAME)),
        str(sum(pair.through is not None for pair in effect.pairs)),
    )


def geometry(variant: Variant) -> str:
    """Tile and cluster, and a schedule that is not pingpong."""
    levels = variant.levels
    schedule = levels.get("schedule", "pingpong")
    return f"{levels.get(TILE, '')} c{levels.get(CLUSTER, '1x1')}" + ("" if schedule == "pingpong" else f" {schedule}")


def interval(of: Interval) -> str:
    return f"{of[0]:.3f} [{of[1]:.3f}, {of[2]:.3f}]"


def notes(rows: Iterable[Row]) -> list[str]:
    """How to read the tables."""
    measured = [row for row in rows if row.time_us is not None]
    return [*([CPU_NOTE] if measured and not any(row.is_result for row in measured) else []), *NOTES]


def show(made: list[Table], rows: Iterable[Row]) -> None:
    """Prints the tables, and how to read them. Where stdout is no terminal lines may be long."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    for table in made:
        shown = RichTable(title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for head in table.heads:
            shown.add_column(Text(head), justify="left" if head in table.words else "right", overflow="fold")
        for line in table.lines:
            shown.add_row(*map(Text, line))
        console.print(shown)
    for line in notes(rows):
        console.print(Text(line))
