"""The rows of `explain` as tables: a line for each kernel's ladder, for a terminal or as markdown."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .ladder import RUNGS
from .results import Row
from .tables import WIDE, percent, reasons, short_arithmetic

NOTES = (
    "A step's cell: the outputs that flip when it is added to the steps before it, and in brackets those that are then",
    "off the correctly rounded exact result (M1 > 0). rest: the kernel's outputs that no step explains.",
)
Ladder = dict[str, Row]
"""A row for each rung, by its name, in their order."""


def ladders(rows: Iterable[Row]) -> list[Ladder]:
    """The ladders that are whole; of one that was climbed several times in a run, the last."""
    found: dict[tuple, Ladder] = {}
    for row in rows:
        if row.rung is not None:
            key = (*row.case, row.kernel, row.config, row.arithmetic, row.seed)
            if "rest" in found.get(key, {}):
                del found[key]
            found.setdefault(key, {})[row.rung] = row
    return [found[key] for key in found if "rest" in found[key]]


def labels(shown: list[Ladder]) -> list[str]:
    """What each ladder is called: the kernel, with its config where it has several, and `(model)` or `(interpreter)`
    where it ran as that."""
    rests = [ladder["rest"] for ladder in shown]
    configs: dict[str, set[str | None]] = {}
    for row in rests:
        configs.setdefault(row.kernel, set()).add(row.config)
    return [
        " ".join(
            filter(
                None,
                (
                    row.kernel,
                    row.config if len(configs[row.kernel]) > 1 else None,
                    f"({row.ran_on})" if row.ran_on in ("interpreter", "model") else None,
                ),
            )
        )
        for row in rests
    ]


def _cells(shown: list[Ladder]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines."""
    steps = [name for name in RUNGS[:-1] if any(name in ladder for ladder in shown)]
    heads = ["inputs", "k", "m", "kernel", "explained as", *steps, "rest", "M1>0", "M1>1", "outputs"]
    lines = []
    for label, ladder in zip(labels(shown), shown, strict=True):
        rest = ladder["rest"]
        taken = [
            f"{percent(ladder[name].flipped)} ({percent(ladder[name].m1_gt0)})" if name in ladder else ""
            for name in steps
        ]
        lines.append([rest.inputs or "", str(rest.k), str(rest.m), label, short_arithmetic(rest.hypothesis), *taken])
        lines[-1] += [percent(rest.flipped), percent(rest.m1_gt0), percent(rest.m1_gt1), str(rest.outputs or 0)]
    return heads, lines


_WORDS = ("inputs", "kernel", "explained as")


def markdown(rows: Iterable[Row]) -> str:
    """A markdown table with a line for each ladder, and how its cells are read."""
    heads, lines = _cells(sorted(ladders(rows), key=_order))
    rule = ["---" if head in _WORDS else "---:" for head in heads]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines)), "", *NOTES]) + "\n"


def _order(ladder: Ladder) -> tuple:
    rest = ladder["rest"]
    return rest.inputs or "", rest.k, rest.m, rest.kernel, rest.config or "", rest.arithmetic or ""


def show(rows: list[Row]) -> None:
    """Prints the same table, why kernels did not run, and how each hypothesis was found."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    shown = ladders(rows)
    if shown:
        heads, lines = _cells(shown)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for head in heads:
            table.add_column(Text(head), justify="left" if head in _WORDS else "right", overflow="fold")
        for cells in lines:
            table.add_row(*map(Text, cells))
        console.print(table)
        for line in NOTES:
            console.print(Text(line))
    for line in reasons(rows):
        console.print(Text(f"  {line}"), soft_wrap=True)
