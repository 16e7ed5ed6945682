"""Rows as tables: rich ones for a terminal, markdown for a README."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from .intervals import SAME, verdict
from .results import Row

EAGER = "torch.eager"
WIDE = 240
CPU_NOTE = "Times were taken on a CPU or in an interpreter: they are no results. A model of a kernel is not timed."
NOTES = (
    "M0: bits differ from the model of the declared arithmetic. M1: distance in ulps from the correctly rounded exact",
    "result, no ulp smaller than that at 2^-8 of the outputs' RMS. M2: |out - exact| > atol + rtol |exact|, unrounded.",
    "Ratios are to the named kernel's time in the same run, round by round: the median and a 95% interval; below 1 is",
    "faster, = is not distinguished. ? in an arithmetic is undeclared: a library chooses, or no SM90 GPU ran it.",
)


@dataclass(frozen=True)
class Column:
    """header: one or more lines. cell: a row's text, empty where nothing is known."""

    header: str
    cell: Callable[[Row], str]
    numeric: bool = True


def columns(rows: Iterable[Row]) -> list[Column]:
    """The columns that say something about these rows."""
    rows = list(rows)
    results = any(row.is_result for row in rows)
    wanted = [
        Column("kernel", lambda row: row.kernel, numeric=False),
        Column("config", lambda row: row.config or "", numeric=False),
        Column("arithmetic", lambda row: short_arithmetic(row.arithmetic), numeric=False),
        Column("ran on", lambda row: row.ran_on or "", numeric=False),
        Column("launch", lambda row: (row.launch or "") if row.is_result else "", numeric=False),
        Column("status", lambda row: row.status, numeric=False),
        Column("median\ntime" if results else "CPU time,\nno result", lambda row: _time(row, mixed=results)),
        Column("TFLOP/s", lambda row: digits(row.tflops)),
        Column("% of\npeak", lambda row: "" if row.peak is None else f"{100 * row.peak:.1f}"),
        *(_ratio(name, results) for name in dict.fromkeys(name for row in rows for name in row.ratios or {})),
        Column("M0", lambda row: percent(row.m0)),
        Column("run to\nrun", lambda row: percent(row.run_to_run)),
        Column("in a\nbatch", lambda row: percent(row.batch)),
        Column("M1>0", lambda row: percent(row.m1_gt0)),
        Column("M1>1", lambda row: percent(row.m1_gt1)),
        *(_tolerance(rtol, atol) for rtol, atol in dict.fromkeys((r, a) for row in rows for r, a, _ in row.m2 or ())),
    ]
    always = ("kernel", "status")
    return [c for c in wanted if c.header in always or any(c.cell(row) for row in rows)]


def _tolerance(rtol: float, atol: float) -> Column:
    def cell(row: Row) -> str:
        return percent(next((share for r, a, share in row.m2 or () if (r, a) == (rtol, atol)), None))

    return Column(f"M2\nrtol {rtol:g}\natol {atol:g}", cell)


def table(rows: list[Row], *, compact: bool = False) -> Table:
    """One case's rows; those that are not ok come last. compact: what a row is takes one cell, over several lines."""
    made = Table(
        title=Text(describe(_ok_first(rows)[0])),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0 if compact else (0, 1, 0, 0),
    )
    words = [column for column in columns(rows) if not column.numeric]
    numbers = [column for column in columns(rows) if column.numeric]
    for header in [", ".join(c.header for c in words)] if compact else [c.header for c in words]:
        made.add_column(Text(header), overflow="fold")
    for column in numbers:
        made.add_column(Text(_lines(column.header) if compact else column.header), justify="right", no_wrap=True)
    for row in _ok_first(rows):
        said = [column.cell(row) for column in words]
        counted = [column.cell(row) for column in numbers]
        if compact:
            said = ["\n".join(filter(None, (*said[:3], ", ".join(filter(None, said[3:])))))]
            counted = [cell.replace(" [", "\n[") for cell in counted]
        made.add_row(*map(Text, (*said, *counted)))
    return made


def _lines(header: str) -> str:
    return header.replace(" ", "\n")


def print_markdown(text: str) -> None:
    """Prints it as it stands; on a terminal set as a page."""
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        sys.stdout.write(text)


def show(rows: Iterable[Row], file: TextIO | None = None, width: int | None = None) -> None:
    """Prints a table per case and what there is to say about it. Where the file is no terminal lines may be long.

    file: stdout by default. width: in columns, the terminal's by default.
    """
    console = Console(file=file, width=width, highlight=False)
    if width is None and not console.is_terminal:
        console.width = WIDE
    rows = list(rows)
    for case in _cases(rows):
        made = table(case)
        if console.measure(made, options=console.options.update_width(10_000)).maximum > console.width:
            made = table(case, compact=True)
        console.print(made)
        for line in reasons(case):
            console.print(Text(f"  {line}"), soft_wrap=True)
    for line in notes(rows):
        console.print(Text(line))


def notes(rows: list[Row]) -> list[str]:
    """How to read these rows."""
    measured = [row for row in rows if row.time_us is not None]
    first = [CPU_NOTE] if measured and not any(row.is_result for row in measured) else []
    if any(row.ran_on == "model" for row in rows):
        first.append("model: the kernel's declared arithmetic in NumPy, not the kernel; it says nothing of its code.")
    return [*first, *NOTES]


def reasons(rows: Iterable[Row]) -> list[str]:
    """A line for each row that has a reason: why it was not run, or how it failed."""
    return [
        f"{' '.join(filter(None, (row.kernel, row.config, short_arithmetic(row.arithmetic))))}: "
        f"{'' if row.status == 'ok' else row.status + ': '}{row.reason}"
        for row in rows
        if row.reason
    ]


def describe(row: Row) -> str:
    """The problem that a row is about, in a line."""
    return ", ".join(filter(None, _problem(row).values()))


def _problem(row: Row) -> dict[str, str]:
    return {
        "tokens": f"m={row.m}",
        "k": f"k={row.k}",
        "n": f"n={row.n}",
        "dtype": row.dtype or "",
        "layout": f"{row.layout} weights" if row.layout else "",
        "inputs": f"inputs {row.inputs}" if row.inputs else "",
        "regime": row.regime or "" if row.is_result else "",
    }


def markdown_table(rows: Iterable[Row]) -> str:
    """A markdown table of these rows, after a line with what they share; reasons and notes follow it."""
    rows = [row for case in _cases(rows) for row in _ok_first(case)]
    found = {name: {_problem(row)[name] for row in rows} - {""} for name in (_problem(rows[0]) if rows else ())}
    varying = [name for name, texts in found.items() if len(texts) > 1]
    shared = [text for texts in found.values() if len(texts) == 1 for text in texts]
    shown = [*(Column(name, _problem_cell(name)) for name in varying), *columns(rows)]
    lines = [", ".join(shared) + ":" if shared else "", ""]
    lines.append(_pipes(column.header.replace("\n", " ") for column in shown))
    lines.append(_pipes("---:" if column.numeric else "---" for column in shown))
    lines += [_pipes(column.cell(row) for column in shown) for row in rows]
    lines += ["", *(f"- {line}" for line in dict.fromkeys(reasons(rows)))]
    return "\n".join([*lines, "", *notes(rows)]).strip() + "\n"


def _problem_cell(name: str) -> Callable[[Row], str]:
    return lambda row: re.sub(r"^(\w=|inputs )", "", _problem(row)[name])


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _cases(rows: Iterable[Row]) -> list[list[Row]]:
    cases: dict[tuple, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return list(cases.values())


def _ok_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.status != "ok")


def short_arithmetic(text: str | None) -> str:
    """An arithmetic's id with `?` for undeclared."""
    return (text or "").replace("undeclared", "?")


def duration(microseconds: float) -> str:
    """Three digits with the unit that suits them: us, ms or s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= 0.9995 * size:
            return f"{digits(microseconds / size)} {unit}"
    return f"{digits(microseconds)} us"


def percent(share: float | None) -> str:
    """A share in 0..1 as per cent, three digits."""
    return "" if share is None else f"{100 * share:.3g}%"


def _time(row: Row, mixed: bool) -> str:
    if row.time_us is None:
        return ""
    return duration(row.time_us) + (" (CPU)" if mixed and not row.is_result else "")


def _ratio(name: str, results: bool) -> Column:
    """Time over the named kernel's; `=` marks what is not distinguished from it."""

    def cell(row: Row) -> str:
        ratio = (row.ratios or {}).get(name)
        if ratio is None:
            return ""
        middle, low, high = map(digits, ratio)
        if low == high:
            return middle
        mark = " =" if row.kernel != name and verdict(ratio) == SAME else ""
        return f"{middle} [{low}, {high}]{mark}"

    return Column(f"{'' if results else 'CPU '}time /\n{name}", cell)


def digits(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def summary(rows: Iterable[Row], over: str = EAGER) -> str:
    """A markdown table with a line for each problem and regime and a column for each kernel (and recipe).

    A cell is the best median time among the kernel's rows that are ok, of graph replay where it was used, with the
    ratio to the kernel `over`.
    """
    timed = [row for row in rows if row.status == "ok" and row.time_us is not None]
    names = sorted({_variant(row) for row in timed}, key=lambda name: (name != over, name))
    lines: dict[tuple, dict[str, Row]] = {}
    for row in timed:
        line = lines.setdefault((row.inputs or "", row.k, row.n, row.regime or "", row.m), {})
        known = line.get(_variant(row))
        if known is None or _preference(row) < _preference(known):
            line[_variant(row)] = row
    inputs = {key[0] for key in lines}
    heads = ["k", "n", "regime", "m", *names] if len(inputs) < 2 else ["inputs", "k", "n", "regime", "m", *names]
    made = [_pipes(heads), _pipes(["---:"] * len(heads))]
    for key, line in sorted(lines.items()):
        cells = [_summary_cell(line.get(name), over) for name in names]
        made.append(_pipes([*map(str, key if len(inputs) > 1 else key[1:]), *cells]))
    return "\n".join(made) + "\n"


def mismatches(rows: Iterable[Row]) -> str:
    """A markdown table with a line for each problem, kernel and arithmetic: M1 and M2, from rows that are ok; and what
    each ran on, where that is not a GPU for all."""
    lines: dict[tuple, Row] = {}
    for row in rows:
        if row.status == "ok" and row.m1_gt0 is not None and row.rung in (None, "rest"):  # no model's
            lines.setdefault((row.inputs or "", row.k, row.m, row.kernel, row.arithmetic or ""), row)
    wanted = ["arithmetic"] if all(row.is_result for row in lines.values()) else ["arithmetic", "ran on"]
    shown = [
        Column("inputs", lambda row: row.inputs or "", numeric=False),
        Column("k", lambda row: str(row.k)),
        Column("m", lambda row: str(row.m)),
        Column("kernel", lambda row: row.kernel, numeric=False),
        *(c for c in columns(lines.values()) if c.header in wanted or c.header.startswith("M")),
        Column("outputs", lambda row: "" if row.outputs is None else str(row.outputs)),
    ]
    made = [
        _pipes(column.header.replace("\n", " ") for column in shown),
        _pipes("---:" if column.numeric else "---" for column in shown),
    ]
    made += [_pipes(column.cell(row) for column in shown) for _, row in sorted(lines.items(), key=lambda item: item[0])]
    return "\n".join(made) + "\n"


def conformance(rows: Iterable[Row]) -> str:
    """A markdown table of `check`'s rows: for each kernel, arithmetic and problem how many configs and outputs were
    compared with the model, the share that differs (M0), and what changed over repeats and in batches, at worst."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.status == "ok" and row.run_to_run is not None:
            groups.setdefault((row.kernel, row.arithmetic or "", row.k, row.m, row.inputs or ""), []).append(row)
    made = [
        "| kernel | arithmetic | k | m | inputs | configs | outputs | M0 | run to run | in a batch |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (kernel, arithmetic, k, m, inputs), group in sorted(groups.items()):
        modelled = [row for row in group if row.m0 is not None]
        outputs = sum(row.outputs or 0 for row in modelled)
        shares = [max((getattr(row, name) or 0.0 for row in group), default=0.0) for name in ("run_to_run", "batch")]
        m0 = percent(max((row.m0 or 0.0 for row in modelled), default=None))
        cells = (
            kernel,
            short_arithmetic(arithmetic),
            k,
            m,
            inputs,
            len(group),
            outputs or "",
            m0,
            *map(percent, shares),
        )
        made.append(_pipes(map(str, cells)))
    return "\n".join(made) + "\n"


def relations(rows: Iterable[Row]) -> str:
    """A markdown table of the property suite's rows: for each relation, kernel and arithmetic how many cases and
    outputs there were, and the share of outputs that contradict the relation."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.relation is not None:
            groups.setdefault((row.relation, row.kernel, row.arithmetic or "", row.ran_on or ""), []).append(row)
    heads = ("relation", "kernel", "arithmetic", "ran on", "cases", "outputs", "contradict it", "failed")
    made = [_pipes(heads), _pipes(["---"] * 4 + ["---:"] * 4)]
    for (relation, kernel, arithmetic, ran_on), group in sorted(groups.items()):
        outputs = sum(row.outputs or 0 for row in group)
        contradict = sum((row.outputs or 0) * (row.contradicted or 0.0) for row in group) / max(1, outputs)
        failed = sum(row.status == "failed" for row in group)
        cells = (
            relation,
            kernel,
            short_arithmetic(arithmetic),
            ran_on,
            len(group),
            outputs,
            percent(contradict),
            failed,
        )
        made.append(_pipes(map(str, cells)))
    return "\n".join(made) + "\n"


def _variant(row: Row) -> str:
    _, _, rest = (row.arithmetic or "").partition(":")
    recipe = rest.partition(":")[0]
    return row.kernel if recipe in ("undeclared", "none", "") else f"{row.kernel} {recipe}"


def _preference(row: Row) -> tuple[bool, float]:
    return row.launch != "graph", row.time_us or 0.0


def _summary_cell(row: Row | None, over: str) -> str:
    if row is None or row.time_us is None:
        return ""
    ratio = (row.ratios or {}).get(over)
    return duration(row.time_us) + ("" if ratio is None or row.kernel == over else f" ({digits(ratio[0])})")
