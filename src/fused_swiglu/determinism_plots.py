"""Figures of `determinism` from rows alone, readable in grey."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import TYPE_CHECKING

from .determinism_lines import Line, ranges
from .errors import ArgumentError
from .plots import MARKERS, check_plot, save
from .results import Environment, Row
from .tables import short_arithmetic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1e-4  # below it the share's axis is linear, so that 0 has a place
MOST = 4  # above it times are cut off: a kernel for few rows is no rival for many
_FILLS, _STROKES = ("black", "white", "grey"), ("-", "--", ":", "-.")


def plot_determinism(rows: Iterable[Row], environments: Iterable[Environment], path: str | PathLike[str]) -> None:
    """Saves `draw`'s figure. Raises ArgumentError where no row is of the study or the path cannot be written."""
    check_plot(path)
    save(draw(rows, environments), path)


def draw(rows: Iterable[Row], environments: Iterable[Environment]) -> Figure:
    """Two panels for each range of m: the share of the first row's words that differ from those at the first m, of the
    kernels that change any; and each kernel's time over the fastest one's. Raises ArgumentError where there is none."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    found = ranges(rows, environments)
    if not found:
        raise ArgumentError("plot", "no row is of this study", "give rows of `determinism`")
    figure = Figure(figsize=(10, 7 * len(found)), layout="constrained")
    axes = figure.subplots(2 * len(found), squeeze=False)[:, 0]
    for number, shown in enumerate(found):
        shares, times = axes[2 * number], axes[2 * number + 1]
        keep = sum(line.kept for line in shown.lines)
        shares.set_title(f"{shown.title}\n{keep} of {len(shown.lines)} kept all words, run to run too", fontsize=9)
        _draw(shares, shown.lines, lambda line: line.shares if any(line.shares.values()) else {})
        shares.set_ylabel("share of a row's words changed")
        shares.set_yscale("symlog", linthresh=LEAST, linscale=0.5)
        shares.set_ylim(-LEAST / 4, 1.5)
        _draw(times, shown.lines, shown.over_fastest)
        result = any(row.is_result for row in shown.rows)
        times.set_ylabel("time over the fastest (ratio)" if result else "CPU time over the fastest, no result (ratio)")
        times.set_yscale("log")
        if result and times.get_ylim()[1] > MOST:
            times.set_ylim(top=MOST)
            times.set_title(f"cut off above {MOST}", fontsize=9)
        times.yaxis.set_major_formatter(LogFormatter())
        times.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        for ax in (shares, times):
            ax.set_xscale("log", base=2)
            ax.set_xticks(shown.tokens, [str(m) for m in shown.tokens])
            ax.set_xlim(shown.tokens[0] / 1.2, shown.tokens[-1] * 1.2)
            ax.set_xlabel("tokens m (rows of x)")
            ax.grid(color="0.9", linewidth=0.5)
            if ax.lines:
                ax.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def _draw(ax: Axes, lines: list[Line], values: Callable[[Line], dict[int, float]]) -> None:
    """One look for each line, the same in both panels."""
    for i, line in enumerate(lines):
        turn = i // len(MARKERS)
        points = sorted(values(line).items())
        if points:
            ax.plot(
                *zip(*points, strict=True),
                label=" ".join(filter(None, (line.label, short_arithmetic(line.arithmetic), line.setting))),
                linestyle=_STROKES[(i + turn) % len(_STROKES)],
                marker=MARKERS[i % len(MARKERS)],
                markerfacecolor=_FILLS[(i + turn) % len(_FILLS)],
                color="black",
                linewidth=0.8,
                markersize=5,
            )
