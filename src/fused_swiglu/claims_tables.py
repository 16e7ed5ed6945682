"""Claims as Markdown: a summary, and a report with every cell and the rows behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from .claims import Claim, Evidence, Reading, Value
from .tables import percent

NOTES = (
    "A cell is one problem of one model under one regime: `burst` at boost clock, `sustained` at the power limit.",
    "Where the claim has a figure, cells in bold reach it. Ratios stand with their 95% interval, where rounds were",
    "paired; of several pairs, with the least and the greatest. Of an MLP the down projection is timed where rows",
    "have it, and is half of the bare GEMM of [gate; up] elsewhere.",
)


def summary(claims: Iterable[Claim], found: Evidence) -> str:
    """A Markdown table with a line for each reading: what was found, and in how many and which cells it holds."""
    made = [_pipes(("the paper", "read as", "found", "holds in", "where")), _pipes(("---",) * 5)]
    for claim in claims:
        says = claim.says
        for reading in claim.readings(found):
            if reading.headline:
                made.append(_pipes((says, reading.title, _span(reading), *_holds(reading))))
                says = ""
    return "\n".join(made) + "\n"


def _span(reading: Reading) -> str:
    if not reading.values:
        return "no rows"
    texts = [number(f(value.value for value in reading.values), reading.unit) for f in (min, max)]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _holds(reading: Reading) -> tuple[str, str]:
    if reading.wanted is None or not reading.values:
        return "", ""
    inside = reading.inside
    where = _where(inside, reading.column) if 0 < len(inside) < len(reading.values) else ""
    return f"{len(inside)} of {len(reading.values)} cells", where


def _where(values: Iterable[Value], column: str) -> str:
    """The columns of each line: "qwen2.5-7b burst m=1, 16"."""
    lines: dict[str, list[str]] = {}
    for value in values:
        lines.setdefault(value.line, []).append(str(value.column))
    return "; ".join(f"{line} {column}={', '.join(columns)}" for line, columns in lines.items())


def number(value: float, unit: str) -> str:
    """A share in 0..1 in per cent, three digits; a ratio with three places, above 10 with one, and `x`."""
    return percent(value) if unit == "%" else f"{value:.{3 if value < 10 else 1}f}x"


def report(
    claims: Iterable[Claim], found: Evidence, sources: Mapping[str, str], figures: Mapping[str, Path] | None = None
) -> str:
    """The whole report in Markdown. sources: which file a run's rows are of. figures: of each claim, relative paths."""
    parts = [
        "# The paper's claims, measured again",
        f"On {', '.join(_gpus(found)) or 'no GPU'}. {' '.join(NOTES)}",
        summary(claims, found).strip(),
    ]
    for claim in claims:
        parts.append(f"## {claim.says}")
        if figures and claim.name in figures:
            parts.append(f"![{claim.says}]({figures[claim.name].as_posix()})")
        for reading in claim.readings(found):
            parts += [f"### {reading.title}", _reading(reading, sources)]
    return "\n\n".join(parts) + "\n"


def _gpus(found: Evidence) -> list[str]:
    runs = {row.run for _, standing in found.models for row in standing.rows}
    taken = [e for run, e in found.environments.items() if run in runs and e.gpu]
    return sorted({f"{e.gpu} (driver {e.driver}, torch {e.torch})" for e in taken})


def _reading(reading: Reading, sources: Mapping[str, str]) -> str:
    if not reading.values:
        return "No rows to read it from."
    held, where = _holds(reading)
    said = f"Found: {_span(reading)}."
    if held:
        claimed = " to ".join(number(end, reading.unit) for end in reading.wanted or () if abs(end) != float("inf"))
        said += f" Claimed: {claimed}; that holds in {held}{f': {where}' if where else ''}."
    return "\n\n".join((said, table(reading), f"Rows: {_behind(reading, sources)}."))


def table(reading: Reading) -> str:
    """A Markdown table with a line for each model and regime (or kernel) and a column for each m (or k)."""
    columns = sorted({value.column for value in reading.values})
    lines: dict[str, dict[int, str]] = {}
    held = set(map(id, reading.inside)) if reading.wanted else set()
    for value in reading.values:
        text = _cell(value, reading.unit)
        lines.setdefault(value.line, {})[value.column] = f"**{text}**" if id(value) in held else text
    made = [_pipes(("", *(f"{reading.column}={column}" for column in columns)))]
    made.append(_pipes(("---", *("---:" for _ in columns))))
    made += [_pipes((line, *(cells.get(column, "") for column in columns))) for line, cells in lines.items()]
    return "\n".join(made)


def _cell(value: Value, unit: str) -> str:
    text = number(value.value, unit)
    if value.range is None:
        return text
    return f"{text} [{', '.join(number(end, unit).rstrip('x%') for end in value.range)}]"


def _behind(reading: Reading, sources: Mapping[str, str]) -> str:
    """How many rows of which files and runs."""
    rows = {id(row): row for value in reading.values for row in value.rows}
    counts = Counter((sources.get(row.run or "", "this run"), row.run or "") for row in rows.values())
    files: dict[str, list[str]] = {}
    for (file, run), count in sorted(counts.items()):
        files.setdefault(file, []).append(f"{count} of run {run}")
    return "; ".join(f"{file}: {', '.join(runs)}" for file, runs in files.items())


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
