"""claims: each reading of planted rows is what a hand makes of them, and what is missing is left out, not guessed."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch

from fused_swiglu import MODELS, claims, claims_plots, claims_tables
from fused_swiglu.bandwidth import Elsewhere
from fused_swiglu.claims import CLAIMS, Evidence, Reading, evidence
from fused_swiglu.claims_run import spaces
from fused_swiglu.cli import main
from fused_swiglu.intervals import paired_ratio
from fused_swiglu.problem import Problem
from fused_swiglu.results import Environment, Row, RowFile
from fused_swiglu.standings import Standing, standings

MODEL = "qwen2.5-7b"
K, N = MODELS[MODEL]
RECIPES = {"torch.eager": "undeclared:undeclared:gate+up+act+out", "cublas.gemm": "undeclared:none:out"}
HERE = Environment(run="1", gpu="NVIDIA H200", peak_tflops=800.0, peak_gbs=4600.0)


def rows_of(
    times: dict[str, float], run: str = "1", m: int = 4096, k: int = K, n: int = N, **more: object
) -> list[Row]:
    """Rows of kernels that were timed together, in 24 rounds that drift together. times: kernel -> microseconds."""
    generator = np.random.default_rng(0)
    rounds = generator.normal(1, 0.05, 24)
    taken = {kernel: time * rounds / np.median(rounds) for kernel, time in times.items()}
    eager = taken.get("torch.eager")
    usual = dict(
        m=m, n=n, k=k, status="ok", ran_on="NVIDIA H200", regime="burst", launch="stream", run=run, host_us=5.0
    )
    usual |= dict(dtype="bf16", layout="stacked", inputs="normal", activation="silu", bias=False) | more
    return [
        Row(
            kernel=kernel,
            config=f"band={run}" if kernel.startswith("cutlass.") else "default",
            arithmetic=RECIPES.get(kernel, "sm90:ieee:out"),
            role={"torch.eager": "unfused", "torch.compile": "unfused", "cublas.gemm": "control"}.get(kernel, "fused"),
            time_us=float(np.median(samples)),
            tflops=4 * m * n * k / float(np.median(samples)) / 1e6,
            peak=4 * m * n * k / float(np.median(samples)) / 1e6 / 800,
            rounds=tuple(samples),
            ratios={"torch.eager": paired_ratio(list(samples), list(eager))} if eager is not None else None,
            **usual,  # type: ignore[arg-type]
        )
        for kernel, samples in taken.items()
    ]


TIMES = {"torch.eager": 2000.0, "cublas.gemm": 1600.0, "torch.compile": 1800.0, "cutlass.evt": 1500.0}


def found_in(rows: list[Row], *environments: Environment) -> Evidence:
    return evidence(rows, environments or (HERE,))


def reading(rows: list[Row], claim: str, index: int = 0) -> Reading:
    made = next(c for c in CLAIMS if c.name == claim).readings(found_in(rows))
    return made[index]


def only(made: Reading) -> float:
    (value,) = made.values
    return value.value


def standing_of(rows: list[Row]) -> Standing:
    (standing,) = standings(rows)
    return standing


def test_a_speedup_is_eagers_time_over_the_best_of_the_two_kernels():
    rows = rows_of({**TIMES, "cutlass.pingpong": 1600.0, "cutlass.interleaved": 1400.0})
    paper, library = (reading(rows, "speedup", i) for i in (0, 1))
    assert only(paper) == pytest.approx(2000 / 1500)
    assert only(library) == pytest.approx(2000 / 1400)
    assert [row.kernel for row in library.values[0].rows] == ["torch.eager", "cutlass.interleaved"]
    assert library.values[0].line == "qwen2.5-7b burst"
    assert not library.inside
    assert reading(rows_of({**TIMES, "cutlass.evt": 800.0}), "speedup").inside


def test_by_calls_the_hosts_part_counts_where_it_is_longer():
    rows = rows_of({"torch.eager": 14.0, "torch.compile": 12.0, "cutlass.decode": 7.0}, m=1)
    host = {"torch.eager": 56.0, "torch.compile": 112.0, "cutlass.decode": 5.0}
    rows = [replace(row, host_us=host[row.kernel]) for row in rows]
    assert only(reading(rows, "speedup", 2)) == pytest.approx(56 / 7)
    assert only(reading(rows, "speedup", 1)) == pytest.approx(14 / 7)
    assert only(reading(rows, "compile", 1)) == pytest.approx(112 / 7)
    assert reading(rows, "compile", 1).values[0].range is None  # of two medians no interval is known
    unknown = [replace(row, host_us=None) for row in rows]
    assert not reading(unknown, "speedup", 2).values


def test_an_mlp_has_its_down_projection_measured_or_as_half_the_bare_gemm():
    beside = reading(rows_of(TIMES), "intermediates")
    assert only(beside) == pytest.approx(400 / 2800)
    saved = reading(rows_of(TIMES), "intermediates", 1)
    assert only(saved) == pytest.approx(500 / 2800)
    low, high = saved.values[0].range or (inf, -inf)
    assert low <= saved.values[0].value <= high
    down = rows_of({"cublas.gemm": 1000.0, "torch.eager": 1400.0}, run="2", k=N, n=K // 2)
    measured = reading([*rows_of(TIMES), *down], "intermediates")
    assert only(measured) == pytest.approx(400 / 3000)
    assert Problem(4096, K // 2, N).flops == Problem(4096, N, K).flops // 2  # the down projection's share
    assert down[0] in measured.values[0].rows


def test_shares_of_peak():
    tflops = 4 * 4096 * N * K / 1500 / 1e6
    assert only(reading(rows_of(TIMES), "peak")) == pytest.approx(tflops / 989.4)
    assert only(reading(rows_of(TIMES), "peak", 1)) == pytest.approx(tflops / 800)


def test_kernels_of_different_runs_are_compared_through_eager():
    slow_card = {kernel: 1.3 * time for kernel, time in TIMES.items() if kernel != "cutlass.evt"}
    rows = [*rows_of({"torch.eager": 2000.0, "cutlass.evt": 1500.0}), *rows_of(slow_card, run="2")]
    made = reading(rows, "compile")
    assert only(made) == pytest.approx(1800 / 1500)
    standing = standing_of(rows)
    compiled, evt = standing.best("torch.compile"), standing.best("cutlass.evt")
    assert compiled
    assert evt
    compared = standing.compare(compiled, evt)
    assert compared
    assert compared.through == "torch.eager"
    assert not reading(rows_of({"cutlass.evt": 1500.0, "cublas.gemm": 1600.0}), "speedup", 1).values


def test_of_several_runs_the_one_in_the_middle_counts_and_of_launches_the_graphs():
    times = [1500.0, 1300.0, 1520.0]  # the second is luck
    rows = [r for i, t in enumerate(times) for r in rows_of({"torch.eager": 2000.0, "cutlass.evt": t}, run=str(i))]
    same = [replace(row, config="default") for row in rows]
    best = standing_of(same).best("cutlass.evt")
    assert best
    assert best.time_us == pytest.approx(1500.0)
    graphs = rows_of({"torch.eager": 1900.0, "cutlass.evt": 1450.0}, run="9", launch="graph")
    best = standing_of([*rows, *graphs]).best("cutlass.evt")
    assert best
    assert best.launch == "graph"


def test_the_model_of_another_bandwidth_scales_what_moves_and_not_what_computes():
    rows = rows_of(TIMES)
    standing = standing_of(rows)
    value = Elsewhere("x", gbs=2300.0).speedup(standing, standing.best("cutlass.evt"), {"1": HERE})
    assert value
    assert value[0] == pytest.approx((1600 + 2 * 400) / 1500)  # compute-bound GEMMs, twice the time beside them
    small = standing_of(rows_of({"torch.eager": 100.0, "cublas.gemm": 90.0, "cutlass.decode": 80.0}, m=1))
    value = Elsewhere("x", gbs=2300.0).speedup(small, small.best("cutlass.decode"), {"1": HERE})
    assert value
    assert value[0] == pytest.approx(100 / 80)  # all of it moves: the ratio stays
    assert Elsewhere().slower(HERE) == pytest.approx(4.8 / 3.35)
    assert Elsewhere().slower(Environment(run="1")) is None
    assert Elsewhere().speedup(standing, standing.best("cutlass.evt"), {}) is None


def test_mismatches_are_the_worst_of_each_kernel_and_k():
    shares = [(0.0, 0.0), (0.002, 0.05)]
    rows = [
        replace(row, m0=0.0 if row.role == "fused" else None, m1_gt0=0.1, m2=((5e-3, 1e-4, share),), outputs=10)
        for worse, better in shares
        for row, share in zip(
            rows_of({"torch.eager": 9.0, "triton.fused": 9.0, "cublas.gemm": 9.0}), (better, worse, 0.5), strict=True
        )
    ]
    m0, fused, torchs = (reading(rows, "mismatches", i) for i in range(3))
    assert (only(m0), only(fused), only(torchs)) == (0.0, 0.002, 0.05)  # the bare GEMM is no SwiGLU
    assert m0.inside
    assert not fused.inside
    assert torchs.inside
    assert len(torchs.values[0].rows) == 2


def test_only_normal_operands_of_the_papers_models_count():
    rows = rows_of(TIMES) + rows_of(TIMES, inputs="wide", m=16) + rows_of(TIMES, k=100, n=100)
    assert len(reading(rows, "speedup", 1).values) == 1
    assert not reading([replace(row, ran_on="cpu") for row in rows_of(TIMES)], "speedup").values


def test_every_cell_of_the_stored_rows_names_the_rows_behind_it(stored_claims: Evidence):
    frame = claims.to_frame(CLAIMS, stored_claims)
    assert set(frame.claim) == {claim.name for claim in CLAIMS}
    assert (frame.run.str.len() > 0).all()
    ranged = frame[frame.low.notna()]
    assert (ranged.low <= ranged.value + 1e-9).all()
    assert (ranged.value <= ranged.high + 1e-9).all()
    held = frame[(frame.claim == "speedup") & frame.holds.astype(bool)]
    assert (held.value >= 2.47).all()


@pytest.fixture(scope="module")
def stored_claims() -> Evidence:
    from pathlib import Path

    from fused_swiglu.results import load

    folder = Path(__file__).parent.parent / "notebooks" / "data"
    names = ("h200-prefill", "h200-decode", "h200-qwen2.5-0.5b", "h200-ablate", "h200-check-cutlass", "h200-roundings")
    return evidence(*load(*(folder / f"{name}.jsonl" for name in names)))


def test_the_report_has_a_table_and_the_runs_and_files_of_each_reading(tmp_path, capsys):
    with RowFile(tmp_path / "mine.jsonl") as file:
        file.write(HERE)
        for row in rows_of(TIMES):
            file.write(row)
    assert main(["claims", "--from", str(tmp_path / "mine.jsonl"), "--report", str(tmp_path / "out")]) == 0
    summary = capsys.readouterr().out
    assert "| up to 2.47x over PyTorch |" in summary
    assert "0 of 1 cells" in summary
    assert "no rows" in summary  # there is no ablation in them
    text = (tmp_path / "out" / "claims.md").read_text()
    assert "NVIDIA H200" in text
    assert "| qwen2.5-7b burst | 1.333x" in text
    assert "mine.jsonl: 2 of run 1" in text
    assert "![up to 2.47x over PyTorch](speedup.png)" in text
    assert (tmp_path / "out" / "speedup.png").stat().st_size > 5000
    assert not (tmp_path / "out" / "overlap.png").exists()


def test_cells_that_reach_the_claim_stand_out():
    made = reading(rows_of({**TIMES, "cutlass.evt": 800.0}) + rows_of(TIMES, m=8192), "speedup")
    table = claims_tables.table(made)
    assert "**2.500x" in table
    assert "**1.333x" not in table


def test_a_figure_has_a_panel_for_each_reading_that_has_values():
    claim = next(c for c in CLAIMS if c.name == "speedup")
    figure = claims_plots.draw(claim, found_in(rows_of(TIMES) + rows_of(TIMES, m=1)))
    assert figure
    assert len(figure.axes) == 4
    assert all(ax.get_xlabel() and ax.get_ylabel() for ax in figure.axes)
    assert claims_plots.draw(next(c for c in CLAIMS if c.name == "overlap"), found_in(rows_of(TIMES))) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "{rows}", "--out", "x.jsonl"], "argument --out"),
        (["--from", "{cpu}"], "argument --from: no row has a time that a GPU took"),
        (["--from", "nowhere.jsonl"], "cannot read 'nowhere.jsonl'"),
        (["--from", "{rows}", "--claims", "speed"], "unknown 'speed'"),
        (["--from", "{rows}", "--bandwidth", "-3"], "cannot take '-3'"),
        (["--from", "{rows}", "--report", "{rows}"], "argument --report: cannot make"),
        (["--from", "{rows}", "--report", ""], "argument --report: is empty"),
    ],
)
def test_bad_input_is_one_line(options, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, ran_on in (("rows", "NVIDIA H200"), ("cpu", "cpu")):
        with RowFile(f"{name}.jsonl") as file:
            for row in rows_of(TIMES, ran_on=ran_on):
                file.write(row)
    options = [option.format(rows="rows.jsonl", cpu="cpu.jsonl") for option in options]
    assert main(["claims", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_it_asks_for_rows(capsys):
    assert main(["claims"]) == 2
    assert "--from notebooks/data" in capsys.readouterr().err


def test_what_is_measured_is_one_group_for_each_model_and_tokens():
    asked = list(spaces(["qwen2.5-0.5b"], [16, 64], device=torch.device("cpu"), autotuned=[64]))
    gated = [space for space in asked if space.case.problem.k == 896]
    down = [space for space in asked if space.case.problem.k == 4864]
    assert [space.case.problem.m for space in gated] == [space.case.problem.m for space in down] == [16, 64]
    assert down[0].case.problem.n == 896 // 2
    assert [c.name for c in down[0].groups[0]] == ["cublas.gemm", "torch.eager"]
    for space in gated:
        (group,) = space.groups
        places = {c.config.swish for c in group if c.name == "cutlass.pingpong" and "ieee" in str(c.arithmetic)}
        assert {"overlap", "held", "epilogue"} <= places


def test_autotuned_modes_run_where_they_are_asked_for():
    asked = list(spaces(["qwen2.5-0.5b"], [16, 64], device=torch.device("cuda"), autotuned=[64]))
    for space in (space for space in asked if space.case.problem.k == 896):
        candidates = [c for c in (*(c for group in space.groups for c in group), *space.unsupported)]
        assert len({c.key for c in candidates}) == len(candidates)
        modes = {c.config.mode for c in candidates if c.name == "torch.compile"}
        assert ("max-autotune" in modes) == (space.case.problem.m == 64)
        assert "default" in modes
