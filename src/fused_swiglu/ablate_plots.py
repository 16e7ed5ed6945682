"""Figures of answers and effects from rows alone, readable in grey."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .ablate_tables import HEADLINE, factors_of, geometry, problem_of
from .effects import Answer, Effect, Pair, answers, cells, effects
from .errors import ArgumentError
from .factors import TILE, Variant
from .intervals import FASTER, SAME, SLOWER
from .plots import folder, save
from .results import Row
from .tables import CPU_NOTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FILLS = {FASTER: "black", SLOWER: "lightgrey", SAME: "white", None: "white"}
_MARKERS = {FASTER: "<", SLOWER: ">", SAME: "o", None: "x"}
Entry = tuple[str, Pair]
"""What a line of a figure is called, and its ratio."""


def plot(rows: Iterable[Row], path: str | PathLike[str], factors: Iterable[str] = ()) -> list[Path]:
    """Saves headline.png and a figure for each factor, FACTOR.png: of those given, or of all. Returns what was saved.

    Raises ArgumentError where there is nothing to draw or a file cannot be written.
    """
    rows, wanted = list(rows), list(factors)
    figures = {name: draw(rows, name) for name in wanted or (HEADLINE, *factors_of(rows))}
    saved = []
    for name, figure in figures.items():
        if figure is not None:
            saved.append(folder(path) / f"{name}.png")
            save(figure, saved[-1])
    if not saved:
        raise ArgumentError("plot", "no two variants can be compared", "time variants that differ in one factor")
    return saved


def draw(rows: Iterable[Row], factor: str) -> Figure | None:
    """A panel for each problem: for each pair the ratio and its interval, a filled mark where it is told from 1.
    factor: or `headline`. None where there is no pair."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Entry]] = {}
    results = True
    for cell in cells(rows):
        if factor == HEADLINE:
            entries = [(_question(answer), answer.pair) for answer in answers(cell)]
        else:
            chosen = (effect for effect in effects(cell) if effect.factor == factor)
            entries = [entry for effect in chosen for entry in _entries(effect)]
        if entries:
            panels[", ".join(_titled(cell.row))] = entries
            results = results and cell.row.is_result
    if not panels:
        return None
    heights = [len(entries) + 2 for entries in panels.values()]
    figure = Figure(figsize=(9, 1.2 + 0.22 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for ax, (title, entries) in zip(axes, panels.items(), strict=True):
        _draw(ax, title, entries)
    what = "time of cutlass.pingpong, overlap, over cutlass.evt" if factor == HEADLINE else f"time ratio, by {factor}"
    axes[-1].set_xlabel(f"{what} (dimensionless; below 1 the first is faster)")
    figure.suptitle("" if results else CPU_NOTE, fontsize=8)
    return figure


def _titled(row: Row) -> list[str]:
    values = problem_of(row)
    sizes = [f"{name}={values.pop(name)}" for name in ("m", "k", "n")]
    return [*sizes, *filter(None, values.values())]


def _question(answer: Answer) -> str:
    return f"{answer.context}, {answer.question}: {geometry(answer.variant)} / {geometry(answer.other)}"


def _entries(effect: Effect) -> list[Entry]:
    """Each pair, by the effect's levels and the first variant's config."""
    heading = ", ".join(filter(None, (effect.kernel, effect.context, f"{effect.level} / {effect.base}")))
    return [(f"{heading}  [{_place(pair.row)}]", pair) for pair in effect.pairs]


def _place(row: Row) -> str:
    variant = Variant.of_row(row)
    return geometry(variant) if TILE in variant.levels else row.config or ""


def _draw(ax: Axes, title: str, entries: list[Entry]) -> None:
    for verdict in (FASTER, SLOWER, SAME, None):
        mine = [(y, pair.ratio) for y, (_, pair) in enumerate(entries) if pair.verdict == verdict]
        if mine:
            ax.errorbar(
                [ratio[0] for _, ratio in mine],
                [y for y, _ in mine],
                xerr=[[max(0.0, r[0] - r[1]) for _, r in mine], [max(0.0, r[2] - r[0]) for _, r in mine]],
                label=verdict or "no result",
                linestyle="none",
                marker=_MARKERS[verdict],
                markerfacecolor=_FILLS[verdict],
                color="black",
                capsize=2,
                markersize=5,
            )
    ax.axvline(1, color="grey", linewidth=0.8)
    ax.set_title(title, fontsize=9)
    ax.set_yticks(range(len(entries)), [name for name, _ in entries], fontsize=6)
    ax.set_ylim(len(entries) - 0.5, -0.5)
    ax.grid(axis="x", color="0.9", linewidth=0.5)
    ax.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1))
