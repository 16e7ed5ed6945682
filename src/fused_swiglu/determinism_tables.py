"""The rows of `determinism` as tables: a line for each kernel over all m, and what bits that never change cost at each
m; for a terminal or as markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .ablate_tables import Table, interval
from .choice import FEW
from .determinism_lines import Choice, Line, Range, ranges
from .results import Environment, Row
from .tables import CPU_NOTE, WIDE, duration, percent, short_arithmetic

NOTES = (
    "Words changed: of the first row of x, at worst over m, against those at the first m; and at how many other m any",
    "did. Run to run: words that change over repeats, at worst. Time over that of the fastest kernel that computes all",
    "of SwiGLU, at the same m: the median over few rows, that over many, and the most. Kernels of one declared",
    "arithmetic have the same bits. A cost is the median over rounds, with its 95% interval where both were timed in",
    "one process; else it goes by a kernel that was timed in both. No time: not in a graph, where others were.",
)
NO_CUBLAS = "A CPU has no cuBLAS, whose split-K a second process would turn off."


def tables(found: Iterable[Range]) -> list[Table]:
    """Two for each range: the kernels; and, where anything was timed and kept its bits, the cost of that."""
    made = []
    for shown in found:
        made.append(_kernels(shown))
        if kept := shown.keeping():
            made.append(_costs(shown, *kept))
    return made


def _kernels(shown: Range) -> Table:
    columns = {
        "kernel": [line.label for line in shown.lines],
        "arithmetic": [short_arithmetic(line.arithmetic) for line in shown.lines],
        "setting": [line.setting for line in shown.lines],
        "words changed": [percent(max(line.shares.values(), default=None)) for line in shown.lines],
        "at": [_changed_at(line) for line in shown.lines],
        "run to run": [percent(line.run_to_run) for line in shown.lines],
    }
    over = [shown.over_fastest(line) for line in shown.lines]
    time = f"{'CPU ' if _on_cpu(shown) else ''}time / fastest"
    columns |= {
        f"{time}, m <= {FEW}": [_median(ratios, lambda m: m <= FEW) for ratios in over],
        f"m > {FEW}": [_median(ratios, lambda m: m > FEW) for ratios in over],
        "at most": [_most(ratios) for ratios in over],
    }
    return _table(shown.title, columns)


def _changed_at(line: Line) -> str:
    shares = line.shares
    return f"{sum(map(bool, shares.values()))} of {len(shares)} m" if shares else ""


def _median(ratios: dict[int, float], wanted: Callable[[int], bool]) -> str:
    chosen = [ratio for m, ratio in ratios.items() if wanted(m)]
    return f"{median(chosen):.3f}" if chosen else ""


def _most(ratios: dict[int, float]) -> str:
    if not ratios:
        return ""
    m = max(ratios, key=lambda m: ratios[m])
    return f"{ratios[m]:.3f} (m={m})"


def _costs(shown: Range, name: str, choices: list[Choice]) -> Table:
    time = "CPU time, no result" if _on_cpu(shown) else "time"
    columns = {
        "m": [str(choice.m) for choice in choices],
        "fastest": [_named(choice.fastest) for choice in choices],
        time: [duration(choice.fastest.timed[choice.m].time_us or 0.0) for choice in choices],
        "keeps its bits": [_named(choice.keeps) for choice in choices],
        "its time / fastest": [_cost(choice) for choice in choices],
    }
    costs = {choice.m: choice.cost[0] for choice in choices}
    medians = {f"m <= {FEW}": _median(costs, lambda m: m <= FEW), f"m > {FEW}": _median(costs, lambda m: m > FEW)}
    told = " and ".join(f"{cost} ({where})" for where, cost in medians.items() if cost)
    title = (
        f"bits that never change, by {short_arithmetic(name)}, cost {told} of the fastest kernel's time in the median"
    )
    return _table(f"{shown.title}: {title}, {_most(costs)} at most", columns)


def _named(line: Line) -> str:
    recipe = short_arithmetic(line.arithmetic)
    return " ".join(filter(None, (line.label, recipe, line.setting)))


def _cost(choice: Choice) -> str:
    middle, low, high = choice.cost
    return f"{middle:.3f}" if low == high else interval(choice.cost)


_WORDS = frozenset(("kernel", "arithmetic", "setting", "fastest", "keeps its bits"))


def _table(title: str, columns: dict[str, list[str]]) -> Table:
    """Without columns that say nothing."""
    said = {head: cells for head, cells in columns.items() if any(cells)}
    return Table(title, tuple(said), list(zip(*said.values(), strict=True)), _WORDS)


def _on_cpu(shown: Range) -> bool:
    return not any(row.is_result for row in shown.rows)


def missing(rows: Iterable[Row]) -> list[str]:
    """A line for each reason why a kernel gave nothing, with the m where that was not everywhere."""
    rows = list(rows)
    every = {row.m for row in rows}
    reasons: dict[tuple[str, str, str], set[int]] = {}
    for row in rows:
        if row.reason:
            status = "" if row.status == "ok" else f"{row.status}: "
            reasons.setdefault((row.kernel, status, row.reason), set()).add(row.m)
    return [
        f"{kernel}: {status}{reason}" + ("" if at == every else f" (m = {', '.join(map(str, sorted(at)))})")
        for (kernel, status, reason), at in reasons.items()
    ]


def notes(found: list[Range]) -> list[str]:
    """How to read the tables."""
    on_cpu = bool(found) and all(map(_on_cpu, found))
    return [*((CPU_NOTE, NO_CUBLAS) if on_cpu else ()), *NOTES]


def markdown(rows: Iterable[Row], environments: Iterable[Environment]) -> str:
    """The tables in markdown, each after its title, and how to read them."""
    found = ranges(rows, environments)
    made = [f"{table.title}:\n\n{table.markdown()}" for table in tables(found)]
    return "\n".join([*made, "\n".join(notes(found))]) + "\n"


def show(rows: list[Row], environments: Iterable[Environment]) -> None:
    """Prints the tables, why kernels are missing, and how to read it. Where stdout is no terminal lines may be long."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    found = ranges(rows, environments)
    for table in tables(found):
        shown = RichTable(title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for head in table.heads:
            shown.add_column(Text(head), justify="left" if head in table.words else "right", overflow="fold")
        for line in table.lines:
            shown.add_row(*map(Text, line))
        console.print(shown)
    for line in missing(rows):
        console.print(Text(f"  {line}"), soft_wrap=True)
    for line in notes(found):
        console.print(Text(line))
