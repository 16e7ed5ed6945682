"""A figure for each claim from its readings, readable in grey."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .claims import Claim, Evidence, Reading
from .plots import MARKERS, folder, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = list(product(("-", "--", ":", "-."), MARKERS))
_SIZES = {"m": "tokens m (rows of x)", "k": "hidden size k (terms of a dot product)"}


def plot(claims: Iterable[Claim], found: Evidence, path: str | PathLike[str]) -> dict[str, Path]:
    """Saves NAME.png in the folder for each claim that has something to draw, and returns where each is.

    Raises ArgumentError where the folder or a file cannot be written.
    """
    into, saved = folder(path), {}
    for claim in claims:
        figure = draw(claim, found)
        if figure is not None:
            saved[claim.name] = into / f"{claim.name}.png"
            save(figure, saved[claim.name])
    return saved


def draw(claim: Claim, found: Evidence) -> Figure | None:
    """A panel for each reading that has values; None without any. The claimed range is a grey band."""
    from matplotlib.figure import Figure

    readings = [reading for reading in claim.readings(found) if reading.values]
    if not readings:
        return None
    figure = Figure(figsize=(9, 3.4 * len(readings)), layout="constrained")
    for ax, reading in zip(figure.subplots(len(readings), squeeze=False)[:, 0], readings, strict=True):
        _draw(ax, reading)
    figure.suptitle(f'"{claim.says}"', fontsize=10)
    return figure


def _draw(ax: Axes, reading: Reading) -> None:
    scale = 100 if reading.unit == "%" else 1
    lines: dict[str, list] = {}
    for value in reading.values:
        lines.setdefault(value.line, []).append(value)
    for i, (line, values) in enumerate(lines.items()):
        style, marker = _STYLES[i % len(_STYLES)]
        values = sorted(values, key=lambda value: value.column)
        ax.plot(
            [value.column for value in values],
            [scale * value.value for value in values],
            linestyle=style,
            marker=marker,
            markersize=4,
            linewidth=1,
            color=str(0.6 * (i % 3) / 2),
            markerfacecolor="white" if i % 2 else None,
            label=line,
        )
    if reading.unit == "x" and max(v.value for v in reading.values) > 5 * min(v.value for v in reading.values):
        ax.set_yscale("log")
    elif reading.unit == "%":
        ax.set_ylim(min(0, ax.get_ylim()[0]), max(ax.get_ylim()[1], 0.1))
    least, most = reading.wanted or (None, None)
    if least is not None and most is not None:
        low, high = ax.get_ylim()
        top = max(high, scale * least * 1.05) if most == float("inf") else max(high, scale * most * 1.05)
        ax.set_ylim(min(low, scale * least), top)
        ax.axhspan(scale * least, min(scale * most, top), color="0.9", zorder=0, label="claimed")
    ax.set_xscale("log", base=2)
    columns = sorted({value.column for value in reading.values})
    ax.set_xticks(columns, list(map(str, columns)), fontsize=7)
    ax.minorticks_off()
    ax.set_xlabel(_SIZES[reading.column], fontsize=8)
    ax.set_ylabel("share (%)" if reading.unit == "%" else "ratio of times (1)", fontsize=8)
    ax.set_title(reading.title, fontsize=8, wrap=True)
    ax.grid(color="0.92", linewidth=0.5)
    ax.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1), ncols=1 + len(lines) // 20)
