"""Timelines: what the warpgroups of a thread block did when, from the stamps of a time-stamp build."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, permutations
from os import PathLike
from pathlib import Path
from typing import Any, Self

from fused_swiglu.errors import ArgumentError

CONSUMERS = ("consumer 0", "consumer 1")
LANES = ("producer", *CONSUMERS)
LOAD, WAIT, GATE, UP, BOTH = "loads", "wait for turn", "gate MMA", "up MMA", "gate and up MMA"
SWISH, SLICED, STORE, FINISH = "Swish", "up MMA with Swish", "store", "Swish and store"
KINDS = (LOAD, WAIT, GATE, BOTH, SWISH, UP, SLICED, FINISH, STORE)
TENSOR_WORK = (GATE, UP, BOTH, SLICED)
BETWEEN = ("overlap", "held")  # places of Swish that have a stamp of their own
TIMED = (*BETWEEN, "epilogue")

Stamp = tuple[int, str]  # cycles of the SM's clock since the thread block's first stamp, and what ended then
Stamps = dict[int, dict[str, list[Stamp]]]  # of each thread block and role


@dataclass(frozen=True, slots=True)
class Interval:
    kind: str
    start: int
    end: int

    @property
    def cycles(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Hidden:
    """cycles: of `intervals` Swish intervals; hidden: how many of them were under the other warpgroup's tensor work."""

    intervals: int
    cycles: int
    hidden: int

    @property
    def share(self) -> float | None:
        return self.hidden / self.cycles if self.cycles else None


@dataclass(frozen=True)
class Timeline:
    """One launch of a time-stamp build.

    swish: where the activation is: `overlap`, `held`, `epilogue` or `sliced`, as in PingpongConfig; `none` for a kernel
    without one. room: how many stamps a role could have; one that has so many may have been cut. sm_mhz: the SM clock
    that NVML read around the launch. hidden: by `swish_hidden`, over all thread blocks of the launch; stamps: those of
    all, or of some (`first`).
    """

    kernel: str
    config: str
    arithmetic: str
    m: int
    n: int
    k: int
    dtype: str
    ran_on: str
    swish: str
    room: int
    stamps: Stamps
    hidden: Hidden | None = None
    sm_mhz: float | None = None
    run: str | None = None

    def first(self, blocks: int, room: int) -> Self:
        """The first `room` stamps of each role of so many thread blocks, evenly spaced."""
        step = max(1, len(self.stamps) // blocks)
        chosen = list(self.stamps.items())[::step][:blocks]
        kept = {block: {role: stamps[:room] for role, stamps in roles.items()} for block, roles in chosen}
        return type(self)(**(vars(self) | {"room": min(room, self.room), "stamps": kept}))

    def to_json(self) -> str:
        """One line of JSON: an object whose only key is `timeline`."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps({"timeline": values | ({"hidden": asdict(self.hidden)} if self.hidden else {})})

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        """What `to_json` wrote under its key. Raises TypeError, ValueError, KeyError or AttributeError for anything
        else."""
        stamps = {
            int(block): {role: [(int(cycles), str(event)) for cycles, event in roles[role]] for role in roles}
            for block, roles in values["stamps"].items()
        }
        hidden = Hidden(**values["hidden"]) if "hidden" in values else None
        return cls(**(values | {"stamps": stamps, "hidden": hidden}))


def load(path: str | PathLike[str]) -> list[Timeline]:
    """The timelines of a JSONL file, in order. Raises ArgumentError where it cannot be read or holds none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        objects = [json.loads(line) for line in lines]
        found = [Timeline.from_values(values["timeline"]) for values in objects if "timeline" in values]
    except OSError as error:
        raise ArgumentError("from", f"cannot read {str(path)!r}: {error.strerror}", "check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        found = []
    if not found:
        raise ArgumentError("from", f"{str(path)!r} holds no timelines", "give what `timeline --out` wrote")
    return found


def intervals(stamps: Sequence[Stamp], swish: str) -> list[Interval]:
    """What one role did, in order. Each interval lasts from one stamp to the next that ends something; what the first
    stamp ended began at an unknown time, and is left out.

    MMA: from the turn until the last wgmma of the pass is done; it includes waits for loads that are late. Swish: from
    `gate_done` to `swished` where it is between the passes; elsewhere it has no stamps of its own, and is part of
    `Swish and store` (activation, product, rounding and store) or of `up MMA with Swish`. Wait for turn: all else
    before a pass.
    """
    two_passes = any(event == "gate_done" for _, event in stamps)
    kinds = {
        "turn_taken": WAIT,
        "gate_done": GATE,
        "up_done": (SLICED if swish == "sliced" else UP) if two_passes else BOTH,
        "stored": FINISH if swish == "epilogue" else STORE,
        "loading": None,  # the producer between two passes
        "loaded": LOAD,
    }
    if swish in BETWEEN:
        kinds["swished"] = SWISH
    ends = [(cycles, kinds[event]) for cycles, event in stamps if event in kinds]
    return [Interval(kind, start, end) for (start, _), (end, kind) in pairwise(ends) if kind]


def swish_hidden(stamps: Stamps, swish: str, room: int) -> Hidden | None:
    """How much of Swish ran while the other consumer warpgroup of its thread block did tensor work.

    Of each Swish interval (`gate_done` to `swished`; with swish=epilogue `up_done` to `stored`, which includes the
    stores) those cycles count as hidden that lie within a tensor interval of the other consumer: from its `turn_taken`
    to its `gate_done` or `up_done`, so from when it may issue the first wgmma of a pass until the last one is done. A
    wait for a late load within a pass counts as tensor work: the share is an upper bound.

    A consumer without a tile, or past its last one, has no tensor work. Where its stamps were cut (it has `room` of
    them) what it did afterwards is unknown, and Swish intervals that end after its last stamp are left out.
    None where Swish has no stamps: swish=sliced or none.
    """
    if swish not in TIMED:
        return None
    spans: list[tuple[int, int]] = []
    for roles in stamps.values():
        for mine, other in permutations(CONSUMERS):
            others = roles.get(other, [])
            known = others[-1][0] if len(others) >= room else math.inf
            work = [i for i in intervals(others, swish) if i.kind in TENSOR_WORK]
            for i in intervals(roles.get(mine, []), swish):
                if i.kind in (SWISH, FINISH) and i.end <= known:
                    under = sum(max(0, min(i.end, w.end) - max(i.start, w.start)) for w in work)
                    spans.append((i.cycles, under))
    return Hidden(len(spans), sum(cycles for cycles, _ in spans), sum(under for _, under in spans))


def lengths(timelines: Iterable[Timeline]) -> dict[str, list[int]]:
    """Cycles of every interval of each kind, over all stamps, sorted."""
    found: dict[str, list[int]] = {}
    for timeline in timelines:
        for roles in timeline.stamps.values():
            for role in LANES:
                for interval in intervals(roles.get(role, []), timeline.swish):
                    found.setdefault(interval.kind, []).append(interval.cycles)
    return {kind: sorted(found[kind]) for kind in KINDS if kind in found}


def window(roles: dict[str, list[Stamp]], tiles: int = 2) -> tuple[int, int]:
    """From the end of consumer 0's first tile to the end of so many more, past the fill of the ring; where it has
    fewer, all that is recorded."""
    ends = [cycles for cycles, event in roles.get(CONSUMERS[0], []) if event == "stored"]
    if len(ends) > tiles:
        return ends[0], ends[tiles]
    return 0, max((stamps[-1][0] for stamps in roles.values() if stamps), default=0)
