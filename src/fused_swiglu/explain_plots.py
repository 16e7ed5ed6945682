"""Figures of ladders from rows alone, readable in grey."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING

from .errors import ArgumentError
from .explain_tables import Ladder, labels, ladders
from .ladder import RUNGS
from .plots import check_plot, save
from .results import Row
from .tables import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1e-7  # where bars start
_STYLES: dict[str, tuple[str, str]] = dict(
    zip(
        RUNGS,
        [("white", ""), ("white", "..."), ("0.85", ""), ("0.85", "///"), ("0.6", ""), ("0.6", "\\\\\\"), ("black", "")],
        strict=True,
    )
)


def plot_explain(rows: Iterable[Row], path: str | PathLike[str]) -> None:
    """Saves `draw`'s figure. Raises ArgumentError where no ladder is whole or the path cannot be written."""
    check_plot(path)
    save(draw(rows), path)


def draw(rows: Iterable[Row]) -> Figure:
    """A panel for each problem: for each kernel a bar for each step, as long as the share of outputs that flips there,
    on a log scale, with the share in figures; and one for the rest."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Ladder]] = {}
    for ladder in ladders(rows):
        rest = ladder["rest"]
        where = rest.ran_on if rest.is_result else "CPU"
        title = f"m={rest.m}, k={rest.k}, n={rest.n}, {rest.dtype}, {rest.inputs}, {where}"
        panels.setdefault(title, []).append(ladder)
    if not panels:
        raise ArgumentError("plot", "no row is of a ladder", "give rows of `explain`")
    heights = [sum(len(ladder) + 1 for ladder in shown) for shown in panels.values()]
    figure = Figure(figsize=(9, 0.17 * sum(heights) + 0.9 * len(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for ax, (title, shown) in zip(axes, panels.items(), strict=True):
        _draw(ax, title, shown)
    return figure


def _draw(ax: Axes, title: str, shown: list[Ladder]) -> None:
    places, names, y = [], [], 0
    for label, ladder in zip(labels(shown), shown, strict=True):
        places.append(y + (len(ladder) - 1) / 2)
        names.append(f"{label}\n{ladder['rest'].hypothesis}")
        for name, row in ladder.items():
            share, (color, hatch) = row.flipped or 0.0, _STYLES[name]
            ax.barh(
                y, max(share, LEAST) - LEAST, 0.9, LEAST, color=color, hatch=hatch, edgecolor="black", linewidth=0.5
            )
            ax.text(max(share, LEAST) * 1.2, y, f"{name} {percent(share)}", va="center", fontsize=6)
            y += 1
        y += 1
    ax.set_xscale("log")
    ax.set_xlim(LEAST, 20)
    ax.set_xticks([10.0**e for e in range(-7, 1)])
    ax.set_ylim(y - 0.5, -1)
    ax.set_yticks(places, names, fontsize=6)
    ax.set_title(title, fontsize=9)
    ax.set_xlabel("share of outputs that flip at the step", fontsize=8)
    ax.grid(axis="x", color="0.9", linewidth=0.5)
    ax.set_axisbelow(True)
