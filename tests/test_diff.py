"""diff: a change beyond the spread is found, none is not, and a drift of everything is no change of a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fused_swiglu import cli
from fused_swiglu.diff import FASTER, SAME, SLOWER, diff, environments
from fused_swiglu.results import Environment, Row, RowFile
from fused_swiglu.timing import paired_ratio

TIMES = {"cutlass.evt": 100.0, "cublas.gemm": 110.0, "torch.eager": 150.0}
SPREAD = 0.002


@cache
def timed(seed: int, drift: float = 1.0, **changes: float) -> list[Row]:
    """A run: 24 rounds that all kernels share, by the same summaries as a measurement's. changes: a factor on the time
    of the kernel of that variant name; drift: on all."""
    generator = np.random.default_rng(seed)
    rounds = drift * generator.normal(1, SPREAD, 24)
    samples = {
        name: time * changes.get(name.partition(".")[2], 1.0) * rounds * generator.normal(1, SPREAD / 4, 24)
        for name, time in TIMES.items()
    }
    rows = []
    for name, times in samples.items():
        q1, mid, q3 = np.quantile(times, (0.25, 0.5, 0.75))
        ratios = {other: paired_ratio(list(times), list(samples[other])) for other in ("cublas.gemm", "torch.eager")}
        rows.append(a_row(kernel=name, time_us=mid, time_us_q1=q1, time_us_q3=q3, ratios=ratios, run=str(seed)))
    return rows


def a_row(**more: object) -> Row:
    usual = dict(kernel="cutlass.evt", config="default", arithmetic="sm90:ieee:out", m=64, n=32, k=16, status="ok")
    usual |= dict(ran_on="NVIDIA H200", regime="burst", launch="graph")
    return Row(**usual | more)  # type: ignore[arg-type]


def verdicts(a: list[Row], b: list[Row]) -> dict[str, str | None]:
    return {change.row.kernel: change.verdict for change in diff(a, b)}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "wanted"), [(0.99, FASTER), (1.01, SLOWER), (1.0, SAME)])
def test_a_change_of_1_percent_is_found_and_none_is_not(seed: int, factor: float, wanted: str) -> None:
    found = verdicts(timed(seed), timed(seed + 100, evt=factor))
    assert found == {"cutlass.evt": wanted, "cublas.gemm": SAME, "torch.eager": SAME}


@pytest.mark.parametrize("drift", [0.97, 1.03])
def test_a_drift_that_moves_the_reference_too_is_no_change_of_a_kernel(drift: float) -> None:
    assert set(verdicts(timed(1), timed(2, drift)).values()) == {SAME}
    without = [[replace(row, ratios=None) for row in run] for run in (timed(1), timed(2, drift))]
    assert set(verdicts(*without).values()) == {FASTER if drift < 1 else SLOWER}


def test_a_change_of_the_reference_is_none_of_the_kernel() -> None:
    assert verdicts(timed(1), timed(2, gemm=0.95)) == {
        "cutlass.evt": SAME,
        "cublas.gemm": FASTER,
        "torch.eager": SAME,
    }


def test_the_figures_are_b_over_a() -> None:
    change = diff(timed(1), timed(2, evt=1.05))[0]
    assert change.ratio is not None
    assert change.relative is not None
    assert change.reference == "cublas.gemm"
    for middle, low, high in (change.ratio, change.relative):
        assert low < middle < high
        assert middle == pytest.approx(1.05, abs=0.004)


def test_runs_the_other_way_round_give_the_opposite() -> None:
    a, b = timed(1), timed(2, evt=1.05, gemm=0.9)
    opposite = {FASTER: SLOWER, SLOWER: FASTER, SAME: SAME}
    assert verdicts(b, a) == {name: opposite[verdict or ""] for name, verdict in verdicts(a, b).items()}


def test_a_run_is_not_distinguished_from_itself() -> None:
    changes = diff(timed(1), timed(1))
    assert {change.verdict for change in changes} == {SAME}
    assert not any(change.changed or change.worse for change in changes)


@pytest.mark.parametrize("known", [{"ran_on": "cpu"}, {"ran_on": "model"}, {"time_us_q1": None}, {"time_us": None}])
def test_without_two_times_of_a_gpu_there_is_no_verdict(known: dict) -> None:
    a, b = timed(1)[:1], timed(2, evt=2.0)[:1]
    assert diff(a, [replace(b[0], **known)])[0].verdict is None
    assert diff([replace(a[0], **known)], b)[0].verdict is None


def test_a_failure_is_compared_with_what_was_timed_before() -> None:
    failed = a_row(status="failed", reason="no such tile", regime=None, launch=None, ran_on=None)
    (change,) = diff(timed(1)[:1], [failed])
    assert change.status == ("ok", "failed")
    assert change.verdict is None
    assert change.worse
    (back,) = diff([failed], timed(1)[:1])
    assert back.status == ("failed", "ok")
    assert back.changed
    assert not back.worse


@pytest.mark.parametrize(
    "other", [{"config": "bm=64"}, {"arithmetic": "sm90:ex2:out"}, {"m": 1}, {"inputs": "wide"}, {"launch": "stream"}]
)
def test_another_cell_is_not_compared(other: dict) -> None:
    a, b = timed(1)[:1], [replace(timed(2)[0], **other)]
    assert [change.status for change in diff(a, b)] == [("ok", None), (None, "ok")]
    assert not any(change.worse for change in diff(a, b))


def test_the_last_row_of_a_cell_counts() -> None:
    assert verdicts(timed(1), [*timed(2, evt=2.0), *timed(3)])["cutlass.evt"] == SAME


def test_m0_that_changed_is_named() -> None:
    a, b, none = a_row(m0=0.0), a_row(m0=0.25), a_row()
    assert diff([a], [b])[0].m0 == (0.0, 0.25)
    assert [diff([a], [b])[0].worse, diff([b], [a])[0].worse] == [True, False]
    assert diff([a], [a])[0].m0 is diff([a], [none])[0].m0 is None


def test_a_verdict_that_is_another_in_b_is_a_change() -> None:
    """Though the time itself did not move by more than its quartiles allow."""
    pair = [a_row(time_us=us, time_us_q1=us - 3, time_us_q3=us + 3, ratios={"cublas.gemm": ratio})
            for us, ratio in ((100.0, (0.985, 0.97, 0.999)), (101.0, (0.995, 0.98, 1.01)))]  # fmt: skip
    (change,) = diff(pair[:1], pair[1:])
    assert change.verdict == SAME
    assert change.verdicts == {"cublas.gemm": (FASTER, SAME)}
    assert change.changed
    assert not change.worse
    assert diff(pair[:1], pair[:1])[0].verdicts == {"cublas.gemm": (FASTER, FASTER)}


def test_environment_fields_that_differ_are_named() -> None:
    a, b = Environment(driver="580", torch="2.11", gpu="H200"), Environment(driver="590", torch="2.11", nvcc="13.0")
    assert environments([a], [b]) == {"driver": ("580", "590"), "gpu": ("H200", ""), "nvcc": ("", "13.0")}
    assert environments([a, b], [a, b]) == {}


def test_the_command_shows_what_changed_and_its_exit_code_says_whether_it_is_worse(tmp_path, capsys) -> None:
    files = {}
    runs = {"a": timed(1), "same": timed(2), "worse": [*timed(3, evt=1.05), a_row(kernel="new", inputs="[b]")]}
    for name, rows in runs.items():
        files[name] = str(tmp_path / f"{name}.jsonl")
        with RowFile(files[name]) as file:
            file.write(Environment(driver=name, torch="2.11"))
            for row in rows:
                file.write(row)
    assert cli.main(["diff", files["a"], files["same"]]) == 0
    said = capsys.readouterr().out
    assert "driver" in said
    assert "torch " not in said
    assert "cutlass.evt" not in said
    assert "3 cells: 0 faster, 0 slower, 3 not distinguished" in said
    assert "4 of 4 verdicts against a reference are the same" in said
    assert cli.main(["diff", files["a"], files["worse"]]) == 1
    said = capsys.readouterr().out
    assert "1.05" in said
    assert "slower" in said
    assert "only in B (ok)" in said
    assert "inputs [b]" in said
    assert cli.main(["diff", files["a"], files["a"], "--all"]) == 0
    assert "cutlass.evt" in capsys.readouterr().out


def test_bad_files_are_one_line(tmp_path, capsys) -> None:
    assert cli.main(["diff", str(tmp_path / "none"), str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.touch()
    assert cli.main(["diff", str(empty), str(empty)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
