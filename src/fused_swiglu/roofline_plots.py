"""Figures of roofline and of the fastest kernel, readable in grey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .plots import MARKERS
from .results import Environment
from .roofline import fastest, point
from .roofline_tables import FUSED
from .standings import Standing
from .tables import EAGER

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_roofline(found: Iterable[Standing], environments: Mapping[str, Environment]) -> Figure | None:
    """TFLOP/s against 4mnk operations per byte that a fused kernel moves at least, on the ceilings of their runs: the
    fastest fused kernel filled, torch.eager empty, a marker for each model. None where no run measured its ceilings."""
    from matplotlib.figure import Figure

    taken = []
    for standing in found:
        for globs, filled in ((FUSED, True), ((EAGER,), False)):
            row = standing.best(*globs)
            if row and row.role != "control" and point(standing, row, environments).compute is not None:
                taken.append((standing, row, filled))
    if not taken:
        return None
    figure = Figure(figsize=(9, 5), layout="constrained")
    ax = figure.subplots()
    peaks = {
        (here.peak_tflops or 0, here.peak_gbs or 0) for _, row, _ in taken for here in [environments[row.run or ""]]
    }
    low, high = min(s.intensity for s, _, _ in taken), max(s.intensity for s, _, _ in taken)
    tflops, gbs = max(peaks)
    corner = tflops * 1e3 / gbs
    ends = [low / 1.5, *([corner] if low / 1.5 < corner < high * 1.5 else []), high * 1.5]
    ax.plot(ends, [min(tflops, gbs * i / 1e3) for i in ends], color="black", linewidth=1,
            label=f"ceilings: {tflops:.0f} TFLOP/s, {gbs:.0f} GB/s")  # fmt: skip
    models = list(dict.fromkeys(standing.model for standing, _, _ in taken))
    for i, model in enumerate(models):
        for filled in (True, False):
            mine = [(s, row) for s, row, fill in taken if s.model == model and fill == filled]
            if mine:
                ax.plot(
                    [s.intensity for s, _ in mine],
                    [row.tflops or 0 for _, row in mine],
                    linestyle="none",
                    marker=MARKERS[i % len(MARKERS)],
                    color="black" if filled else "grey",
                    markerfacecolor=None if filled else "white",
                    markersize=5,
                    label=f"{model}, {'fused' if filled else EAGER}",
                )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("4mnk operations per byte that a fused kernel moves at least (FLOP/B)")
    ax.set_ylabel("rate (TFLOP/s)")
    ax.grid(which="both", color="0.93", linewidth=0.5)
    ax.legend(fontsize=6)
    return figure


def draw_map(found: Iterable[Standing]) -> Figure | None:
    """A cell for each model and number of tokens, hatched by the kernel that takes the least GPU time there; its name
    stands in it, and those that are not distinguished below. None where nothing can be compared."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    best = [found_best for standing in found if (found_best := fastest(standing))]
    if not best:
        return None
    lines = list(dict.fromkeys((b.standing.model, b.standing.regime) for b in best))
    tokens = sorted({b.standing.m for b in best})
    kernels = sorted({b.row.kernel for b in best})
    hatches = dict(zip(kernels, ("", "//", "..", "xx", "\\\\", "--", "++", "oo", "**"), strict=False))
    figure = Figure(figsize=(1.5 + 1.15 * len(tokens), 1.2 + 0.5 * len(lines)), layout="constrained")
    ax = figure.subplots()
    for b in best:
        x, y = tokens.index(b.standing.m), lines.index((b.standing.model, b.standing.regime))
        hatch = hatches.get(b.row.kernel, "")
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch=hatch, edgecolor="0.75"))
        text = "\n".join((b.row.kernel, *(f"= {name}" for name in b.ties)))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        ax.text(x, y, text, ha="center", va="center", fontsize=5.5, bbox=box)
    ax.set_xlim(-0.5, len(tokens) - 0.5)
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set_xticks(range(len(tokens)), list(map(str, tokens)), fontsize=7)
    ax.set_yticks(range(len(lines)), [f"{model} {regime}" for model, regime in lines], fontsize=7)
    ax.set_xlabel("tokens m (rows of x)", fontsize=8)
    ax.set_ylabel("model and regime", fontsize=8)
    ax.set_title("least GPU time (us) by", fontsize=8)
    return figure
