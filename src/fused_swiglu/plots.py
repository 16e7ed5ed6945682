"""Figures from rows, readable in grey."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ArgumentError
from .results import Row
from .tables import short_arithmetic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
MARKERS = "osD^v<>PXph*"


def check_plot(path: str | PathLike[str]) -> None:
    """Raises ArgumentError, naming `plot`, where no figure can be written: asked before the work, not after."""
    from .checkpoints import check_output

    if Path(path).suffix not in FORMATS:
        raise ArgumentError("plot", f"cannot draw {str(path)!r}", f"give a name that ends in {', '.join(FORMATS)}")
    check_output(Path(path), "plot")


def folder(path: str | PathLike[str], argument: str = "plot") -> Path:
    """The folder, made if it is not there. Raises ArgumentError, naming the argument, where it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(argument, f"cannot make {str(path)!r}: {error.strerror}", "give a folder") from None
    return Path(path)


def plot_compare(rows: Iterable[Row], path: str | PathLike[str]) -> None:
    """Saves `draw`'s figure. Raises ArgumentError where no row has a time or the path cannot be written."""
    check_plot(path)
    save(draw(rows), path)


def save(figure: Figure, path: str | PathLike[str]) -> None:
    """Writes the figure, whole or not at all. Raises ArgumentError, naming `plot`, where it cannot be written."""
    aside = Path(f"{path}.part")
    try:
        figure.savefig(aside, dpi=150, format=Path(path).suffix[1:])
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ArgumentError(
            "plot", f"cannot write {str(path)!r}: {error.strerror}", "give a file that can be"
        ) from None


def draw(rows: Iterable[Row]) -> Figure:
    """The median time of each variant by tokens, with quartiles: a panel for each problem, operands and launch.

    Only rows that are ok and have a time are drawn. Raises ArgumentError where there is none.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.status == "ok" and row.time_us is not None:
            panels.setdefault(_panel(row), []).append(row)
    if not panels:
        raise ArgumentError("plot", "no row has a time", "run kernels that can run here")
    figure = Figure(figsize=(9, 4.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for ax, (title, members) in zip(axes, panels.items(), strict=True):
        _draw(ax, title, members)
    return figure


def _panel(row: Row) -> str:
    where = row.ran_on if row.is_result else "CPU"
    parts = (f"k={row.k}, n={row.n}", row.dtype, row.layout, row.inputs, row.regime, row.launch, where)
    return ", ".join(part for part in parts if part)


def _labels(rows: list[Row]) -> list[str]:
    """What each row's points are called: the kernel, with its config and arithmetic where some m has several."""
    several: dict[str, set[str]] = {"config": set(), "arithmetic": set()}
    for field, kernels in several.items():
        for kernel, m in {(row.kernel, row.m) for row in rows}:
            if len({getattr(row, field) for row in rows if (row.kernel, row.m) == (kernel, m)}) > 1:
                kernels.add(kernel)
    return [_label(row, row.kernel in several["config"], row.kernel in several["arithmetic"]) for row in rows]


def _label(row: Row, config: bool, arithmetic: bool) -> str:
    words = [row.kernel]
    if config:
        words.append(row.config or "")
    if arithmetic:
        words.append(short_arithmetic(row.arithmetic))
    if row.ran_on in ("interpreter", "model"):
        words.append(f"({row.ran_on})")
    return " ".join(words)


def _draw(ax: Axes, title: str, rows: list[Row]) -> None:
    tokens = sorted({row.m for row in rows})
    labels = _labels(rows)
    names = list(dict.fromkeys(labels))
    for i, name in enumerate(names):
        mine = [row for row, label in zip(rows, labels, strict=True) if label == name]
        ax.errorbar(
            [tokens.index(row.m) + (i + 0.5) * 0.8 / len(names) - 0.4 for row in mine],
            [row.time_us or 0.0 for row in mine],
            yerr=_quartiles(mine),
            label=name,
            linestyle="none",
            marker=MARKERS[i % len(MARKERS)],
            markerfacecolor=("black", "white", "grey")[i % 3],
            color="black",
            capsize=3,
        )
    for edge in range(1, len(tokens)):
        ax.axvline(edge - 0.5, color="lightgrey", linewidth=0.8)
    ax.set_title(title, fontsize=9)
    ax.set_xticks(range(len(tokens)), [str(m) for m in tokens])
    ax.set_xlim(-0.5, len(tokens) - 0.5)
    ax.set_xlabel("tokens m (rows of x)")
    ax.set_ylabel("median time (us)" if rows[0].is_result else "CPU time, no result (us)")
    ax.set_yscale("log")
    ax.grid(axis="y", which="both", color="0.9", linewidth=0.5)
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))


def _quartiles(rows: list[Row]) -> tuple[list[float], list[float]]:
    """Distances from each median down to the first and up to the third quartile; 0 where they are not known."""
    below, above = [], []
    for row in rows:
        median = row.time_us or 0.0
        below.append(max(0.0, median - (median if row.time_us_q1 is None else row.time_us_q1)))
        above.append(max(0.0, (median if row.time_us_q3 is None else row.time_us_q3) - median))
    return below, above
