"""Tables and figures: what a reader is told about rows, and what never passes for a result."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from fused_swiglu import ArgumentError, plots
from fused_swiglu.cli import main
from fused_swiglu.results import Row, RowFile
from fused_swiglu.tables import CPU_NOTE, duration, markdown_table, percent, show

EAGER = Row(
    kernel="torch.eager",
    config="default",
    arithmetic="undeclared:undeclared:gate+up+act+out",
    m=64,
    n=4864,
    k=896,
    status="ok",
    role="unfused",
    ran_on="NVIDIA H200",
    dtype="bf16",
    layout="stacked",
    inputs="normal",
    regime="burst",
    launch="graph",
    time_us=12.345,
    time_us_q1=12.0,
    time_us_q3=12.9,
    tflops=612.4,
    peak=0.787,
    ratios={"torch.eager": (1.0, 1.0, 1.0)},
    m1_gt0=0.415,
    m1_gt1=0.0145,
    m2=((0.016, 1e-5, 0.0), (0.005, 1e-4, 0.048)),
    outputs=311296,
)
FUSED = replace(
    EAGER,
    kernel="triton.fused",
    config="bm=128,bn=128,bk=64,stages=4,warps=8,group=8,memory=tma",
    arithmetic="sm90:ieee:out",
    time_us=9.5,
    ratios={"torch.eager": (0.77, 0.75, 0.79)},
    m1_gt0=0.001,
)
MISSING = Row(
    kernel="peer.gated",
    config=None,
    arithmetic=None,
    m=64,
    n=4864,
    k=896,
    status="failed",
    reason="ImportError: [peer]",
    dtype="bf16",
    layout="stacked",
    inputs="normal",
)
ON_CPU = replace(EAGER, ran_on="cpu", regime=None, launch="stream", tflops=None, peak=None, time_us=52_300.0)


def shown(rows: list[Row]) -> str:
    file = io.StringIO()
    show(rows, file)
    return file.getvalue()


def test_a_gpu_table_has_time_rate_ratio_and_mismatch() -> None:
    text = shown([MISSING, EAGER, FUSED])
    line = next(line for line in text.splitlines() if "triton.fused" in line)
    for cell in (FUSED.config, "sm90:ieee:out", "NVIDIA H200", "ok", "9.50 us", "612", "78.7", "0.770 [0.750, 0.790]"):
        assert str(cell) in line
    for cell in ("0.1%", "1.45%", "0%", "4.8%"):
        assert cell in line
    assert "rtol 0.005" in text
    assert "atol 1e-05" in text
    assert "?:?:gate+up+act+out" in text
    assert "peer.gated: failed: ImportError: [peer]" in text
    assert "no result" not in text


def test_rows_that_are_not_ok_come_last() -> None:
    text = shown([MISSING, EAGER, FUSED])
    assert text.index("torch.eager ") < text.index("triton.fused ") < text.index("peer.gated")


def test_a_time_on_a_cpu_is_called_no_result_and_has_no_rate() -> None:
    text = shown([ON_CPU, replace(ON_CPU, kernel="triton.fused", ran_on="interpreter")])
    assert CPU_NOTE in text
    assert "CPU time," in text
    assert "52.3 ms" in text
    assert "median" not in text.partition("M0: ")[0]
    assert "TFLOP/s" not in text
    assert "peak" not in text


def test_a_cpu_time_among_gpu_times_is_marked() -> None:
    text = shown([EAGER, replace(ON_CPU, kernel="cutlass.evt", ran_on="model", run=EAGER.run)])
    assert "52.3 ms (CPU)" in text


def test_cases_have_tables_of_their_own() -> None:
    text = shown([EAGER, replace(EAGER, m=128), replace(FUSED, m=128)])
    assert text.index("m=64, k=896, n=4864, bf16, stacked weights, inputs normal, burst") < text.index("m=128,")


@pytest.mark.parametrize("width", [100, 120, 160])
def test_a_table_is_readable_in_a_terminal(width: int) -> None:
    file = io.StringIO()
    show([EAGER, FUSED, MISSING], file, width)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in file.getvalue()
    fused = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith(" triton.fused")) :])
    for cell in ("sm90:ieee:out", "NVIDIA H200", "9.50 us", "612", "78.7", "0.770", "[0.750, 0.790]", "0.1%", "4.8%"):
        assert cell in fused
    assert str(FUSED.config) in "".join(re.split(r"\s{2,}", line.strip())[0] for line in fused.splitlines())


def test_a_markdown_table_names_what_varies_and_tells_what_does_not_before() -> None:
    text = markdown_table([MISSING, EAGER, FUSED, replace(FUSED, m=128)])
    first, _, header, rule, *rest = text.splitlines()
    assert first.startswith("k=896, n=4864, bf16, stacked weights, inputs normal, burst:")
    assert header.startswith("| tokens | ")
    assert header.count("|") == rule.count("|") == rest[0].count("|")
    assert [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in rest[:4]] == [
        ("64", "torch.eager"),
        ("64", "triton.fused"),
        ("64", "peer.gated"),
        ("128", "triton.fused"),
    ]
    assert "- peer.gated: failed: ImportError: [peer]" in text
    assert CPU_NOTE not in text
    assert CPU_NOTE in markdown_table([ON_CPU])


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.5, "0.500 us"),
        (12.345, "12.3 us"),
        (999.4, "999 us"),
        (999.9, "1.00 ms"),
        (52_300, "52.3 ms"),
        (2e6, "2.00 s"),
    ],
)
def test_durations(microseconds: float, text: str) -> None:
    assert duration(microseconds) == text


def test_shares() -> None:
    assert [percent(share) for share in (None, 0.0, 1.0, 0.415, 0.00065)] == ["", "0%", "100%", "41.5%", "0.065%"]


def test_nothing_to_show() -> None:
    assert "M1" in shown([])
    assert markdown_table([]).count("\n") > 1


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_figure_is_written_in_each_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"figure{suffix}"
    plots.plot_compare([EAGER, FUSED, replace(FUSED, m=128), MISSING, ON_CPU], path)
    assert path.stat().st_size > 5000


def test_a_figure_tells_units_and_what_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plots.plot_compare([EAGER, FUSED, replace(FUSED, m=128), MISSING, ON_CPU], path)
    text = path.read_text()
    for words in ("median time (us)", "tokens m (rows of x)", ">triton.fused<", ">128<", "CPU time, no result (us)"):
        assert words in text
    assert "peer.gated" not in text


def test_variants_of_a_kernel_are_told_apart_in_grey_only_where_they_compete() -> None:
    fast = replace(FUSED, config="fast", time_us=5.0)
    figure = plots.draw([EAGER, FUSED, replace(FUSED, m=128, config="other")])
    assert figure.axes[0].get_legend_handles_labels()[1] == ["torch.eager", "triton.fused"]
    figure = plots.draw([EAGER, FUSED, fast])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    assert labels == ["torch.eager", f"triton.fused {FUSED.config}", "triton.fused fast"]
    assert len({handle.lines[0].get_marker() for handle in handles}) == 3
    assert [float(handle.lines[0].get_ydata()[0]) for handle in handles] == [12.345, 9.5, 5.0]


def test_a_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no row has a time"):
        plots.plot_compare([MISSING], tmp_path / "figure.png")
    with pytest.raises(ArgumentError, match="does not exist"):
        plots.plot_compare([EAGER], tmp_path / "missing" / "figure.png")
    assert list(tmp_path.iterdir()) == []


def test_table_command_shows_stored_rows(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    stored = (
        replace(EAGER, time_us=20.0, launch="graph"),
        replace(EAGER, time_us=99.0, launch="stream"),
        replace(
            EAGER,
            kernel="triton.fused",
            arithmetic="sm90:ieee:out",
            time_us=15.0,
            launch="graph",
            ratios={"torch.eager": (0.75, 0.7, 0.8)},
            m1_gt0=0.001,
            m1_gt1=0.0,
            m2=((5e-3, 1e-4, 0.25),),
            outputs=6144,
        ),
    )
    with RowFile(path) as file:
        for row in stored:
            file.write(row)
    assert main(["table", str(path), "--summary"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "20.0 us" in line
    assert "99.0" not in line
    assert "15.0 us (0.750)" in line
    assert main(["table", str(path), "--summary", "--over", "triton.fused"]) == 2
    assert "no row has a ratio to 'triton.fused'; choose from torch.eager" in capsys.readouterr().err
    assert main(["table", str(path), "--mismatch", "--kernels", "triton.*"]) == 0
    out = capsys.readouterr().out
    assert "| triton.fused | sm90:ieee:out | 0.1% | 0% | 25% | 6144 |" in out
    assert "torch.eager" not in out
    assert main(["table", str(path), "--kernels", "nothing"]) == 2
    assert main(["table", str(tmp_path / "none.jsonl")]) == 2


def test_a_summary_is_over_the_kernel_that_is_asked_for(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    row = replace(
        EAGER, kernel="cutlass.evt", time_us=15.0, ratios={"torch.eager": (0.75,) * 3, "cublas.gemm": (0.9,) * 3}
    )
    with RowFile(path) as file:
        file.write(replace(EAGER, ratios={"cublas.gemm": (1.5,) * 3}))
        file.write(row)
    assert main(["table", str(path), "--summary", "--over", "cublas.gemm"]) == 0
    out = capsys.readouterr().out
    assert "15.0 us (0.900)" in out
    assert "(1.50)" in out
    assert "0.750" not in out


def test_conformance_adds_up_configs(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    row = replace(
        EAGER, kernel="triton.fused", arithmetic="sm90:ieee:out", m0=0.0, run_to_run=0.0, batch=0.0, outputs=10
    )
    with RowFile(path) as file:
        for other in (row, replace(row, config="b", m0=0.25, outputs=30), replace(EAGER, run_to_run=0.5, batch=0.0)):
            file.write(other)
    assert main(["table", str(path), "--conformance"]) == 0
    out = capsys.readouterr().out
    assert "| triton.fused | sm90:ieee:out | 896 | 64 | normal | 2 | 40 | 25% | 0% | 0% |" in out
    assert "| 1 |  |  | 50% | 0% |" in out
