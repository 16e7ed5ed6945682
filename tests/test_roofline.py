"""roofline: ceilings, crossover and the fastest kernel are what a hand makes of planted rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_claims import HERE, TIMES, K, N, rows_of, standing_of

from fused_swiglu import roofline_plots, roofline_tables
from fused_swiglu.cli import main
from fused_swiglu.problem import Problem
from fused_swiglu.results import RowFile
from fused_swiglu.roofline import MOVED, fastest, least, point, problems, ridge


def test_the_crossover_is_where_moving_takes_as_long_as_computing():
    tokens = ridge(K, N, MOVED["fused"], 800, 4600)
    assert tokens
    m = round(tokens)
    problem = Problem(m, N, K)
    assert problem.flops / 800e12 == pytest.approx(problem.bytes / 4600e9, rel=0.01)
    assert standing_bound(m - 5) == "memory"
    assert standing_bound(m + 5) == "computing"


def standing_bound(m: int) -> str:
    bound = least(standing_of(rows_of(TIMES, m=m)), HERE)
    assert bound
    return bound[1]


def test_fusion_moves_the_crossover_and_a_short_k_never_crosses_without():
    fused, compiled, eager = (ridge(896, 4864, moved, 800, 4600) for moved in MOVED.values())
    assert fused
    assert compiled
    assert eager
    assert fused < compiled < eager
    assert ridge(256, 4864, MOVED["torch.eager"], 800, 4600) is None
    assert ridge(256, 4864, MOVED["fused"], 800, 4600) is not None


def test_shares_are_of_the_ceilings_of_the_same_run():
    rows = [replace(row, gbs=460.0) for row in rows_of(TIMES)]
    standing = standing_of(rows)
    at = point(standing, rows[-1], {"1": HERE})
    assert rows[-1].tflops
    assert at.compute == pytest.approx(rows[-1].tflops / 800)
    assert at.memory == pytest.approx(0.1)
    assert point(standing, rows[-1], {"2": HERE}).compute is None


def test_the_fastest_may_be_a_baseline_and_is_never_a_control():
    best = fastest(standing_of(rows_of({**TIMES, "torch.eager": 1000.0, "cublas.gemm": 900.0})))
    assert best
    assert best.row.kernel == "torch.eager"
    tied = fastest(standing_of(rows_of({**TIMES, "cutlass.interleaved": 1502.0})))
    assert tied
    assert (tied.row.kernel, tied.ties) == ("cutlass.evt", ("cutlass.interleaved",))
    assert fastest(standing_of(rows_of({"torch.eager": 1000.0, "cublas.gemm": 900.0}))) is None


def test_tables_and_figures_from_rows(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    with RowFile(path) as file:
        file.write(HERE)
        for row in (*rows_of(TIMES), *rows_of(TIMES, m=1), *rows_of(TIMES, k=100, n=100)):
            file.write(replace(row, gbs=row.time_us))
    assert main(["roofline", str(path), "--plot", str(tmp_path / "figures")]) == 0
    out = capsys.readouterr().out
    assert "| qwen2.5-7b | burst | 1 | memory |" in out
    assert "| qwen2.5-7b | burst | 4096 | computing |" in out
    assert "| qwen2.5-7b | burst | cutlass.evt | cutlass.evt |" in out
    assert "At 800 TFLOP/s and 4600 GB/s" in out
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"roofline.png", "fastest.png"}
    assert main(["roofline", str(path), "--show", "fastest"]) == 0
    assert "computing" not in capsys.readouterr().out


def test_figures_have_units_and_a_mark_for_each_kernel():
    found = problems([*rows_of(TIMES), *rows_of(TIMES, m=1)])
    figure = roofline_plots.draw_roofline(found, {"1": HERE})
    assert figure
    assert "TFLOP/s" in figure.axes[0].get_ylabel()
    assert "FLOP/B" in figure.axes[0].get_xlabel()
    drawn = roofline_plots.draw_map(found)
    assert drawn
    assert [text.get_text() for text in drawn.axes[0].texts] == ["cutlass.evt"] * 2
    assert roofline_plots.draw_roofline(found, {}) is None
    assert "cutlass.evt" in roofline_tables.fastest_map(found)


def test_rows_of_no_use_are_one_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    with RowFile(path) as file:
        for row in rows_of(TIMES):
            file.write(row)  # without ceilings
    assert main(["roofline", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["roofline", str(path), "--show", "slowest"]) == 2
