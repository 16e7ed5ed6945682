"""The `diff` subcommand: what changed between two runs, as a table."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from .cli import PROGRAM
from .errors import ArgumentError

if TYPE_CHECKING:
    from .diff import Change
    from .intervals import Interval


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `diff`."""
    parser.description = (
        "Compares two files of rows: what differs in the environment, and what changed in each cell (kernel, config,\n"
        "arithmetic, problem, inputs, regime, launch): time, status, M0. Of several rows of a cell the last counts.\n"
        "\n"
        "A kernel is faster or slower in B where both of these say so; otherwise it is not distinguished:\n"
        "- B's time over A's, its quartiles apart: even the slower quarter of one is beyond the faster of the other;\n"
        "- the same in units of a reference (cublas.gemm, or torch.eager) that both runs timed beside it, 95%\n"
        "  intervals apart. A drift of clock or temperature moves the reference too, and is no change of the kernel.\n"
        "A row without such a reference has the first alone, which may be a drift. Times on a CPU have no verdict."
    )
    parser.epilog = (
        f"example:\n  {PROGRAM} diff before.jsonl after.jsonl --kernels 'cutlass.*'\n\n"
        "exit code: 0; 1 if a cell of B is slower, no longer ok, or differs more from its model (M0); 2 for bad input."
    )
    parser.add_argument("a", metavar="A", help="JSONL file of rows, from before")
    parser.add_argument("b", metavar="B", help="JSONL file of rows, from after")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="GLOB", help="only these kernels")
    parser.add_argument("--all", action="store_true", help="also the cells in which nothing changed")


def run(args: argparse.Namespace) -> int:
    """Prints what changed. Raises ArgumentError for a file that cannot be read, or where no row is left."""
    from . import diff
    from .results import load

    (rows_a, environments_a), (rows_b, environments_b) = load(args.a), load(args.b)
    changes = [
        change
        for change in diff.diff(rows_a, rows_b)
        if any(fnmatchcase(change.row.kernel, glob) for glob in args.kernels)
    ]
    if not changes:
        raise ArgumentError("kernels", "no row of either file matches", "see the kernels in `table A B`")
    _show_environments(diff.environments(environments_a, environments_b))
    shown = [change for change in changes if args.all or change.changed]
    if shown:
        _show(shown)
    print(_total(changes))
    return int(any(change.worse for change in changes))


def _show_environments(changed: dict[str, tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("environment", "A", "B", box=None)
    for name, values in changed.items():
        table.add_row(name, *(Text(value or "unknown") for value in values))
    _print(table if changed else "environment: no difference")


def _show(changes: list[Change]) -> None:
    from rich.table import Table
    from rich.text import Text

    from . import tables

    table = Table(box=None)
    for header in ("kernel", "config", "arithmetic", "problem", "launch"):
        table.add_column(header, overflow="fold")
    for header in ("time A", "time B", "B / A [quartiles]", "B / A over a reference"):
        table.add_column(header, justify="right")
    table.add_column("change", overflow="fold")
    for change in changes:
        row = change.row
        times = (None if one is None or not one.is_result else one.time_us for one in (change.a, change.b))
        cells = (
            row.kernel,
            row.config or "",
            tables.short_arithmetic(row.arithmetic),
            tables.describe(row),
            row.launch or "",
            *("" if time is None else tables.duration(time) for time in times),
            _interval(change.ratio),
            _interval(change.relative) + (f" {change.reference}" if change.reference else ""),
            _words(change),
        )
        table.add_row(*map(Text, cells))
    _print(table)


def _interval(of: Interval | None) -> str:
    return "" if of is None else f"{of[0]:.3f} [{of[1]:.3f}, {of[2]:.3f}]"


def _words(change: Change) -> str:
    from . import tables

    said = [change.verdict] if change.verdict else []
    if change.status is not None:
        before, after = change.status
        if before is None or after is None:
            said.append(f"only in {'B' if before is None else 'A'} ({before or after})")
        else:
            reason = f": {change.row.reason}" if change.row.reason else ""
            said.append(f"{before} -> {after}{reason}")
    for name, (before, after) in change.verdicts.items():
        if before != after:
            said.append(f"than {name}: {before} -> {after}")
    if change.m0 is not None:
        said.append(f"M0 {' -> '.join(map(tables.percent, change.m0))}")
    return ", ".join(said)


def _total(changes: list[Change]) -> str:
    """How many cells there are of each kind."""
    from .intervals import FASTER, SAME, SLOWER

    counts = {verdict: sum(change.verdict == verdict for change in changes) for verdict in (FASTER, SLOWER, SAME)}
    counts["without two GPU times"] = sum(change.verdict is None for change in changes)
    counts["of another status"] = sum(change.status is not None for change in changes)
    counts["of another M0"] = sum(change.m0 is not None for change in changes)
    pairs = [pair for change in changes for pair in change.verdicts.values()]
    agree = f"{sum(a == b for a, b in pairs)} of {len(pairs)} verdicts against a reference are the same in both runs"
    said = f"{len(changes)} cells: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{said}\n{agree}" if pairs else said


def _print(what: object) -> None:
    from rich.console import Console

    from .tables import WIDE

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    console.print(what)
