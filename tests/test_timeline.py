"""Timelines from synthetic stamps: intervals, the hidden share with known answers, the stored form, the figure."""

from __future__ import annotations

import json

import pytest
import torch
from matplotlib.patches import Rectangle

from cutlass_kernels.evt import Evt
from cutlass_kernels.launching import EVENTS, ROLES, STAMPS_OF_A_ROLE, CutlassKernel
from cutlass_kernels.timeline import (
    BOTH,
    FINISH,
    GATE,
    LANES,
    LOAD,
    SLICED,
    STORE,
    SWISH,
    UP,
    WAIT,
    Hidden,
    Interval,
    Timeline,
    intervals,
    lengths,
    load,
    swish_hidden,
    window,
)
from cutlass_kernels.timeline_command import record
from cutlass_kernels.timeline_figure import STYLES, draw
from fused_swiglu import ArgumentError, Arithmetic, Problem, get_kernel
from fused_swiglu.cli import main
from fused_swiglu.results import Environment

ROOM = STAMPS_OF_A_ROLE - 1
TWO_PASSES = ("turn_taken", "gate_issued", "gate_done", "swished", "turn_taken", "up_issued", "up_done", "stored")
ONE_PASS = ("turn_taken", "up_issued", "up_done", "stored")


def tile(start: int, *cycles: int) -> list[tuple[int, str]]:
    """The stamps of a tile: its first turn is taken at `start`, the others so many cycles after the one before."""
    events = TWO_PASSES if len(cycles) == 7 else ONE_PASS
    at, stamps = start, [(start, events[0])]
    for event, step in zip(events[1:], cycles, strict=True):
        at += step
        stamps.append((at, event))
    return stamps


def loads(*edges: int) -> list[tuple[int, str]]:
    return [(cycles, ("loading", "loaded")[i % 2]) for i, cycles in enumerate(edges)]


# Turns of 100 cycles each; Swish of a gate pass lasts 50, under the other's pass.
PINGPONG = {
    "consumer 0": tile(0, 90, 20, 50, 40, 90, 20, 30) + tile(400, 90, 20, 50, 40, 90, 20, 30),
    "consumer 1": tile(100, 90, 20, 50, 40, 90, 20, 30) + tile(500, 90, 20, 50, 40, 90, 20, 30),
    "producer": loads(0, 80, 85, 180, 190, 280, 285, 380),
}


def timeline(**changes) -> Timeline:
    values = {
        "kernel": "cutlass.pingpong", "config": "bm=64,bn=192", "arithmetic": "sm90:ieee:out", "m": 4096, "n": 4864,
        "k": 896, "dtype": "bf16", "ran_on": "NVIDIA H200", "swish": "overlap", "room": ROOM, "stamps": {0: PINGPONG},
        "hidden": Hidden(4, 200, 200), "sm_mhz": 1755.0, "run": "r",
    }  # fmt: skip
    return Timeline(**(values | changes))


def test_the_names_are_those_of_the_stamps():
    assert set(LANES) == set(ROLES)
    known = {event for stamps in PINGPONG.values() for _, event in stamps}
    assert known == set(EVENTS) - {None}


def test_a_consumer_of_two_passes():
    found = intervals(tile(7, 90, 20, 50, 40, 90, 20, 30) + tile(400, 1, 1, 1, 1, 1, 1, 1)[:1], "overlap")
    assert found == [
        Interval(GATE, 7, 117),
        Interval(SWISH, 117, 167),
        Interval(WAIT, 167, 207),
        Interval(UP, 207, 317),
        Interval(STORE, 317, 347),
        Interval(WAIT, 347, 400),
    ]


def test_swish_without_a_stamp_of_its_own():
    stamps = tile(0, 90, 20, 3, 40, 90, 20, 30)
    assert [i.kind for i in intervals(stamps, "epilogue")] == [GATE, WAIT, UP, FINISH]
    assert [i.kind for i in intervals(stamps, "sliced")] == [GATE, WAIT, SLICED, STORE]
    assert [i.kind for i in intervals(stamps, "none")] == [GATE, WAIT, UP, STORE]
    assert intervals(stamps, "epilogue")[1] == Interval(WAIT, 110, 153)
    assert intervals(tile(0, 90, 20, 30), "epilogue") == [Interval(BOTH, 0, 110), Interval(FINISH, 110, 140)]


def test_the_producers_gaps_are_no_loads():
    assert intervals(PINGPONG["producer"][:4], "overlap") == [Interval(LOAD, 0, 80), Interval(LOAD, 85, 180)]


def test_all_hidden():
    """Consumer 0's Swish, 110-160, is under consumer 1's gate pass, 100-210; that one's, 210-260, under an up pass."""
    assert swish_hidden({0: PINGPONG}, "overlap", ROOM) == Hidden(4, 200, 200)


def test_hidden_in_part_and_over_all_blocks():
    """The other's passes are 130-150 and 155-300: of Swish 110-160, 20 + 5 cycles are under them. The other's own
    Swish, 150-154, is under nothing but the pass that ends at 110."""
    other = tile(130, 10, 10, 4, 1, 100, 45, 30)
    roles = {"consumer 0": tile(0, 90, 20, 50, 240, 1, 1, 1), "consumer 1": other}
    assert swish_hidden({3: roles}, "overlap", ROOM) == Hidden(2, 54, 25)
    assert swish_hidden({3: roles, 9: PINGPONG}, "overlap", ROOM) == Hidden(6, 254, 225)


def test_nothing_hidden():
    roles = {"consumer 0": tile(0, 90, 10, 50, 0, 90, 10, 30), "consumer 1": tile(300, 90, 10, 50, 0, 90, 10, 30)}
    found = swish_hidden({0: roles}, "overlap", ROOM)
    assert found == Hidden(2, 100, 0)
    assert found is not None
    assert found.share == 0


@pytest.mark.parametrize("other", [{}, {"consumer 1": []}])
def test_a_single_warpgroup_hides_nothing(other):
    roles = {"consumer 0": PINGPONG["consumer 0"]} | other
    assert swish_hidden({0: roles}, "overlap", ROOM) == Hidden(2, 100, 0)


def test_one_pass_has_swish_with_the_store():
    """Swish and store last 60; the other's pass begins 30 after the first and covers half of it, and all of its own."""
    roles = {"consumer 0": tile(0, 90, 10, 60) + tile(160, 90, 10, 60), "consumer 1": tile(130, 20, 10, 60)}
    assert swish_hidden({0: roles}, "epilogue", ROOM) == Hidden(3, 180, 30 + 60)


def test_what_a_cut_role_did_afterwards_is_unknown():
    cut = PINGPONG["consumer 1"][:9]  # the last stamp, at 500, takes a turn: how long that pass was is not known
    roles = {"consumer 0": PINGPONG["consumer 0"], "consumer 1": cut}
    assert swish_hidden({0: roles}, "overlap", 9) == Hidden(2, 100, 100)  # and consumer 0 had 16 > 9: cut as well
    assert swish_hidden({0: roles}, "overlap", ROOM) == Hidden(3, 150, 100)  # not cut: past 500 it did nothing


def test_no_share_without_stamps_of_swish():
    assert swish_hidden({0: PINGPONG}, "sliced", ROOM) is None
    assert swish_hidden({0: PINGPONG}, "none", ROOM) is None
    nothing = swish_hidden({0: {"producer": loads(0, 5)}}, "overlap", ROOM)
    assert nothing == Hidden(0, 0, 0)
    assert nothing is not None
    assert nothing.share is None


def test_a_timeline_survives_its_json(tmp_path):
    whole = timeline()
    bare = timeline(hidden=None, sm_mhz=None, run=None, swish="sliced")
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"environment": {{"gpu": "NVIDIA H200"}}}}\n{whole.to_json()}\n{bare.to_json()}\n')
    assert load(path) == [whole, bare]
    assert "sm_mhz" not in json.loads(bare.to_json())["timeline"]


def test_the_first_stamps_of_blocks_that_are_spread():
    whole = timeline(stamps=dict.fromkeys(range(132), PINGPONG))
    kept = whole.first(4, 9)
    assert list(kept.stamps) == [0, 33, 66, 99]
    assert {len(stamps) for roles in kept.stamps.values() for stamps in roles.values()} == {8, 9}
    assert (kept.room, kept.hidden) == (9, whole.hidden)
    assert len(whole.first(500, 9).stamps) == 132


def test_lengths_are_of_all_roles():
    found = lengths([timeline()])
    assert found[LOAD] == [80, 90, 95, 95]
    assert found[SWISH] == [50] * 4
    assert list(found) == [LOAD, WAIT, GATE, SWISH, UP, STORE]


def test_the_window_skips_the_fill():
    three = {"consumer 0": tile(0, 9, 1, 5) + tile(20, 9, 1, 5) + tile(40, 9, 1, 5)}
    assert window(three) == (15, 55)
    assert window(PINGPONG) == (0, 840)
    assert window({}) == (0, 0)


def bars(ax):
    """(lane, left, right) of every bar."""
    boxes = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    return [(round((box.y0 + box.y1) / 2), box.x0, box.x1) for box in boxes]


def test_the_figure_has_every_interval_in_its_lane():
    figure = draw([timeline(), timeline(kernel="cutlass.evt", sm_mhz=None)])
    first, second = figure.axes[:2]
    assert [label.get_text() for label in first.get_yticklabels()] == ["warpgroup 1", "warpgroup 0", "producer"]
    wanted = {
        (lane, i.start, i.end)
        for lane, role in enumerate(("consumer 1", "consumer 0", "producer"))
        for i in intervals(PINGPONG[role], "overlap")
    }
    assert set(bars(first)) == wanted
    assert first.get_xlabel() == "cycles of the SM clock"
    assert [axis.get_xlabel() for axis in first.child_axes] == ["us at 1755 MHz"]
    assert not second.child_axes
    assert "100% of Swish under tensor work" in first.get_title(loc="left")
    legend = first.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [LOAD, WAIT, GATE, SWISH, UP, STORE]
    assert all(isinstance(handle, Rectangle) for handle in legend.get_patches())


def test_kinds_that_meet_differ_in_grey():
    assert len({STYLES[kind] for kind in (LOAD, WAIT, GATE, SWISH, UP, STORE)}) == 6
    assert len({STYLES[kind] for kind in (LOAD, WAIT, BOTH, FINISH)}) == 4
    assert len({STYLES[kind] for kind in (LOAD, WAIT, GATE, SLICED, STORE)}) == 5


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "t.jsonl"
    evt = timeline(
        kernel="cutlass.evt",
        swish="epilogue",
        stamps={5: {"consumer 0": tile(0, 90, 10, 60)}},
        hidden=Hidden(8, 80, 20),
    )
    path.write_text(f"{timeline().to_json()}\n{evt.to_json()}\n")
    return path


def test_the_command_reads_what_was_stored(stored, tmp_path, capsys):
    plot = tmp_path / "p.svg"
    assert main(["timeline", "--from", str(stored), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    pingpong, evt = (next(row for row in out.splitlines() if name in row) for name in ("pingpong", "evt"))
    assert "100.0% of 200 cycles in 4" in pingpong
    assert "25.0% of 80 cycles in 8, with store" in evt
    assert plot.read_text().count("cycles of the SM clock") >= 1
    assert main(["timeline", "--from", str(stored), "--kernels", "*.evt"]) == 0
    assert "pingpong" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "{stored}", "--kernels", "nothing"], "no timeline of FILE matches"),
        (["--from", "{stored}", "--plot", "p.xyz"], "argument --plot: cannot draw"),
        (["--from", "nowhere.jsonl"], "argument --from: cannot read"),
        (["--from", "{other}"], "holds no timelines"),
    ],
)
def test_bad_input_is_one_line(options, said, stored, tmp_path, capsys):
    other = tmp_path / "rows.jsonl"
    other.write_text('{"kernel": "torch.eager"}\n')
    assert main(["timeline", *(option.format(stored=stored, other=other) for option in options)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_recording_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["timeline"]) == 2
    assert "no SM90 GPU" in capsys.readouterr().err


def test_a_file_of_something_else_names_the_argument(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("[1, 2]\n")
    with pytest.raises(ArgumentError, match="from"):
        load(path)


def test_a_recording_is_of_one_launch_and_all_its_blocks(monkeypatch):
    kernel, problem, arithmetic = get_kernel("cutlass.pingpong"), Problem(64, 192, 64), Arithmetic("sm90", "ieee")
    found = [
        (block, role, *stamp) for block in (0, 1) for role, stamps in PINGPONG.items() for stamp in stamps
    ]  # as CutlassKernel.timeline gives them
    monkeypatch.setattr(CutlassKernel, "timeline", lambda *_: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    for config in kernel.table():
        made = record(kernel, problem, config, arithmetic, torch.device("cpu"), "r")
        assert made.stamps == {0: PINGPONG, 1: PINGPONG}
        assert (made.config, made.swish, made.room, made.ran_on) == (str(config), config.swish, ROOM, "NVIDIA H200")
        assert made.hidden == swish_hidden(made.stamps, config.swish, ROOM)
    evt = get_kernel("cutlass.evt")
    assert record(evt, problem, evt.table()[0], arithmetic, torch.device("cpu")).swish == "epilogue"
    product = get_kernel("cutlass.pingpong.product")
    of_product = next(iter(product.arithmetics(problem)))
    assert record(product, problem, product.table()[0], of_product, torch.device("cpu")).hidden is None


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What asks for a GPU finds one; recording gives synthetic stamps."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("fused_swiglu.results.Environment.collect", lambda *_: Environment(gpu="NVIDIA H200"))

    def why_not(self, *_):
        return "no nvcc" if self.name == "cutlass.evt" else None

    def recorded(kernel, problem, config, arithmetic, where, run):
        stamps = dict.fromkeys(range(132), PINGPONG)
        return timeline(kernel=kernel.name, config=str(config), m=problem.m, stamps=stamps, run=run)

    monkeypatch.setattr(CutlassKernel, "why_not", why_not)
    monkeypatch.setattr(Evt, "why_not", why_not)
    monkeypatch.setattr("cutlass_kernels.timeline_command.record", recorded)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_recorded_is_stored_and_the_rest_said(tmp_path, capsys):
    out, plot = tmp_path / "t.jsonl", tmp_path / "t.png"
    assert main(["timeline", "--tokens", "64", "4096", "--out", str(out), "--plot", str(plot)]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("cutlass.evt bm=") == shown.err.count("no nvcc") == 2
    kept = load(out)
    assert [(t.kernel, t.m) for t in kept] == [
        (name, m) for m in (64, 4096) for name in ("cutlass.interleaved", "cutlass.pingpong")
    ]
    assert {tuple(t.stamps) for t in kept} == {(0, 33, 66, 99)}
    environment = json.loads(out.read_text().splitlines()[0])["environment"]
    assert {t.run for t in kept} == {environment["run"]}
    assert plot.stat().st_size > 10_000


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_kernel_without_time_stamps_is_refused(capsys):
    assert main(["timeline", "--kernels", "torch.eager"]) == 2
    assert "argument --kernels: torch.eager has no time stamps" in capsys.readouterr().err
    assert main(["timeline", "--kernels", "cutlass.pingpong", "--config", "swish=never"]) == 2
    assert main(["timeline", "--kernels", "cutlass.pingpong", "--config", "*swish=held"]) == 0
