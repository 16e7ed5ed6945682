"""Time stamps of each kernel on the GPU: monotone, the events of a tile in their order, every part of a tile there."""

from itertools import pairwise

import pytest
import torch

from fused_swiglu import Arithmetic, Problem, get_kernel

pytest.importorskip("tvm_ffi")
from prebuilt import prebuild

from cutlass_kernels import toolchain
from cutlass_kernels.timeline import BOTH, CONSUMERS, FINISH, GATE, LOAD, STORE, SWISH, UP, intervals, lengths
from cutlass_kernels.timeline_command import record

DEVICE = torch.device("cuda", 0)
PROBLEM = Problem(4096, 4864, 896)
IEEE = Arithmetic("sm90", "ieee")
TWO_PASSES = ["turn_taken", "gate_issued", "gate_done", "swished", "turn_taken", "up_issued", "up_done", "stored"]
ONE_PASS = ["turn_taken", "up_issued", "up_done", "stored"]
KERNELS = {"cutlass.pingpong": TWO_PASSES, "cutlass.interleaved": ONE_PASS, "cutlass.evt": ONE_PASS}


@pytest.fixture(scope="module")
def timelines():
    kernels = {name: get_kernel(name) for name in KERNELS}
    units = [kernel.unit(PROBLEM, kernel.table()[0], IEEE, debug="stamps") for kernel in kernels.values()]
    for unit in units:
        if reason := toolchain.why_not(unit):
            pytest.skip(reason)
    prebuild(units)
    return {name: record(kernel, PROBLEM, kernel.table()[0], IEEE, DEVICE) for name, kernel in kernels.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_stamps_of_a_role_are_monotone(name, timelines):
    stamps = timelines[name].stamps
    assert len(stamps) >= 120
    for block, roles in stamps.items():
        for role, found in roles.items():
            assert all(a <= b for (a, _), (b, _) in pairwise(found)), (block, role)


@pytest.mark.parametrize("name", KERNELS)
def test_the_events_of_a_tile_come_in_order(name, timelines):
    order, timeline = KERNELS[name], timelines[name]
    for block, roles in timeline.stamps.items():
        for role in CONSUMERS:
            events = [event for _, event in roles.get(role, [])]
            tiles = -(-len(events) // len(order))
            assert events == (order * tiles)[: len(events)], (block, role)
            assert len(events) % len(order) == 0 or len(events) == timeline.room, (block, role)
        events = [event for _, event in roles["producer"]]
        assert events == (["loading", "loaded"] * len(events))[: len(events)], block


@pytest.mark.parametrize("name", KERNELS)
def test_every_part_of_a_tile_takes_time(name, timelines):
    timeline = timelines[name]
    parts = (GATE, SWISH, UP, STORE) if KERNELS[name] is TWO_PASSES else (BOTH, FINISH)
    found = lengths([timeline])
    for part in (LOAD, *parts):
        assert found[part][0] > 0, part
    # The wgmmas of a pass over k, 64 x 192 at least, take 96 cycles for each 16 of k.
    least = PROBLEM.k // 16 * 96
    for roles in timeline.stamps.values():
        for role in CONSUMERS:
            for interval in intervals(roles.get(role, []), timeline.swish):
                if interval.kind in (GATE, UP, BOTH):
                    assert interval.cycles > least * 0.9


def test_swish_of_the_overlap_is_hidden_and_the_held_one_is_not(timelines):
    kernel, hidden = get_kernel("cutlass.pingpong"), timelines["cutlass.pingpong"].hidden
    assert hidden is not None
    assert hidden.share is not None
    assert hidden.share > 0.5
    config = next(config for config in kernel.table() if config.swish == "held")
    held = record(kernel, PROBLEM, config, IEEE, DEVICE).hidden
    assert held is not None
    assert held.share is not None
    assert held.share < 0.2
