"""The figure of a timeline: a lane for each role, an axis in cycles; readable in grey."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fused_swiglu.errors import ArgumentError

from .timeline import (
    BOTH,
    FINISH,
    GATE,
    KINDS,
    LANES,
    LOAD,
    SLICED,
    STORE,
    SWISH,
    UP,
    WAIT,
    Timeline,
    intervals,
    window,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Grey level and hatch.
STYLES = {
    LOAD: ("0.9", "..."),
    WAIT: ("1.0", ""),
    GATE: ("0.45", ""),
    BOTH: ("0.45", ""),
    UP: ("0.65", "//"),
    SLICED: ("0.65", "xx"),
    SWISH: ("1.0", "xxx"),
    FINISH: ("1.0", "xxx"),
    STORE: ("0.9", "---"),
}


def save(timelines: Sequence[Timeline], path: str) -> None:
    """Saves `draw`'s figure. Raises ArgumentError, naming `plot`, where the path cannot be written."""
    from fused_swiglu.plots import check_plot

    check_plot(path)
    try:
        draw(timelines).savefig(path, dpi=150)
    except OSError as error:
        remedy = "give a file that can be"
        raise ArgumentError("plot", f"cannot write {path!r}: {error.strerror}", remedy) from None


def draw(timelines: Sequence[Timeline]) -> Figure:
    """A panel for each timeline: two tiles of its first thread block that is recorded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(timelines)), layout="constrained")
    axes = figure.subplots(len(timelines), squeeze=False)[:, 0]
    for ax, timeline in zip(axes, timelines, strict=True):
        _draw(ax, timeline)
    return figure


def _draw(ax: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    block, roles = next(iter(timeline.stamps.items()))
    start, end = window(roles)
    seen = set()
    for lane, role in enumerate(reversed(LANES)):
        for interval in intervals(roles.get(role, []), timeline.swish):
            left, right = max(interval.start, start), min(interval.end, end)
            if left < right:
                grey, hatch = STYLES[interval.kind]
                span = [(left - start, right - left)]
                ax.broken_barh(span, (lane - 0.4, 0.8), facecolor=grey, hatch=hatch, edgecolor="black", linewidth=0.7)
                seen.add(interval.kind)
    ax.set_yticks(range(len(LANES)), [role.replace("consumer", "warpgroup") for role in reversed(LANES)])
    ax.set_xlim(0, max(1, end - start))
    ax.set_xlabel("cycles of the SM clock")
    if timeline.sm_mhz is not None:
        functions = partial(np.multiply, 1 / timeline.sm_mhz), partial(np.multiply, timeline.sm_mhz)
        above = ax.secondary_xaxis("top", functions=functions)
        above.set_xlabel(f"us at {timeline.sm_mhz:.0f} MHz")
    ax.set_title(_title(timeline, block), fontsize="small", loc="left")
    patches = [
        Patch(facecolor=STYLES[k][0], hatch=STYLES[k][1], edgecolor="black", label=k) for k in KINDS if k in seen
    ]
    ax.legend(handles=patches, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, handleheight=1.6)


def _title(timeline: Timeline, block: int) -> str:
    t = timeline
    said = (
        f"{t.kernel} {t.config}\n{t.arithmetic}, m={t.m}, k={t.k}, n={t.n}, {t.dtype}, {t.ran_on}, thread block {block}"
    )
    if t.hidden and t.hidden.share is not None:
        said += f"; {t.hidden.share:.0%} of {FINISH if t.swish == 'epilogue' else SWISH} under tensor work, all blocks"
    return said
