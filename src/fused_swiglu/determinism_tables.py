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
    "of SwiGLU, at the same m: the median over few rows, that over many, and the most. Bits are declared by a complete",
    "arithmetic, so that at each m any of its kernels gives them, or seen: one kernel kept them at these m. At one m:",
    "the median over rounds, with its 95% interval where both were timed in one process; else by way of a kernel that",
    "was timed in both. No time: not in a graph, where others were.",
)
NO_CUBLAS = "A CPU has no cuBLAS, whose split-K a second process would turn off."


def tables(found: Iterable[Range]) -> list[Table]:
    """For each range: the kernels; where anything was timed and kept its bits, what these cost; and that at each m."""
    made = []
    for shown in found:
        made.append(_kernels(shown))
        if shown.kept:
            made += [_bits(shown), _choices(shown)]
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
    columns |= _times(f"{_cpu(shown)}time / fastest", [shown.over_fastest(line) for line in shown.lines])
    return _table(shown.title, columns)


def _times(name: str, over: list[dict[int, float]]) -> dict[str, list[str]]:
    """Columns of ratios by m: their median over few rows and over many, and the most."""
    return {
        f"{name}, m <= {FEW}": [_median(ratios, lambda m: m <= FEW) for ratios in over],
        f"m > {FEW}": [_median(ratios, lambda m: m > FEW) for ratios in over],
        "at most": [_most(ratios) for ratios in over],
    }


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


def _bits(shown: Range) -> Table:
    columns = {
        "bits of": [short_arithmetic(bits.name) for bits in shown.kept],
        "known": ["declared" if bits.declared else "seen" for bits in shown.kept],
        "by": [", ".join(dict.fromkeys(choice.keeps.label for choice in bits.choices)) for bits in shown.kept],
    }
    columns |= _times(f"{_cpu(shown)}time / fastest", [bits.costs for bits in shown.kept])
    return _table(f"{shown.title}: what bits that never changed cost", columns)


def _choices(shown: Range) -> Table:
    """The best bits that were seen to be kept, and, where they are others, the best that are declared."""
    best, declared = shown.kept[0], next((bits for bits in shown.kept if bits.declared), None)
    columns = {
        "m": [str(m) for m in shown.fastest],
        "fastest": [_named(line) for line in shown.fastest.values()],
        f"{_cpu(shown)}time": [duration(line.timed[m].time_us or 0.0) for m, line in shown.fastest.items()],
    }
    for word, bits in (("declared", declared), ("kept", None if best is declared else best)):
        choices = {choice.m: choice for choice in bits.choices} if bits else {}
        columns[f"{word} bits"] = [_named(choices[m].keeps) if m in choices else "" for m in shown.fastest]
        columns[f"{word} / fastest"] = [_cost(choices[m]) if m in choices else "" for m in shown.fastest]
    return _table(f"{shown.title}: the fastest kernel, and the fastest of those whose bits cost least", columns)


def _named(line: Line) -> str:
    recipe = short_arithmetic(line.arithmetic)
    return " ".join(filter(None, (line.label, recipe, line.setting)))


def _cost(choice: Choice) -> str:
    middle, low, high = choice.cost
    return f"{middle:.3f}" if low == high else interval(choice.cost)


_WORDS = frozenset(
    ("kernel", "arithmetic", "setting", "bits of", "known", "by", "fastest", "kept bits", "declared bits")
)


def _table(title: str, columns: dict[str, list[str]]) -> Table:
    """Without columns that say nothing."""
    said = {head: cells for head, cells in columns.items() if any(cells)}
    return Table(title, tuple(said), list(zip(*said.values(), strict=True)), _WORDS)


def _on_cpu(shown: Range) -> bool:
    return not any(row.is_result for row in shown.rows)


def _cpu(shown: Range) -> str:
    return "CPU " if _on_cpu(shown) else ""


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
