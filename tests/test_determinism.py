"""determinism: bits that change with m and from run to run are counted, kept ones cost what their times say; the second
process, stored rows, tables and figure."""

from dataclasses import replace

import pytest
import torch
from fakes import FakeKernel, good, interrupted
from safetensors.torch import save_file

from fused_swiglu import UNDECLARED, ArgumentError, Arithmetic, Problem, determinism_command, registry, second_process
from fused_swiglu.check import broken
from fused_swiglu.cli import main
from fused_swiglu.determinism import determinism
from fused_swiglu.determinism_lines import ranges
from fused_swiglu.determinism_plots import draw
from fused_swiglu.determinism_tables import NO_CUBLAS, markdown, missing, tables
from fused_swiglu.inputs import make_inputs
from fused_swiglu.plan import plan
from fused_swiglu.results import Environment, Row, load
from fused_swiglu.tables import CPU_NOTE

CPU = torch.device("cpu")
OPEN = Arithmetic(UNDECLARED, UNDECLARED)
N, K = 24, 64


def splits(operands):
    """In two halves over k, each rounded, for more than 2 rows; else in one."""
    x, weights = operands.x.double(), operands.weights
    parts = x.split(K // 2 if len(x) > 2 else K, 1)
    halves = [w.double().split(parts[0].shape[1], 1) for w in (weights.gate, weights.up)]
    gate, up = (
        sum((p @ h.T).bfloat16().double() for p, h in zip(parts, half, strict=True)).bfloat16().double()
        for half in halves
    )
    return operands.out.copy_(torch.nn.functional.silu(gate) * up)


_count = iter(range(10**6))


def drifts(operands):
    """The last word is another at each run."""
    out = good(operands)
    out[-1, -1] = next(_count)
    return out


def alone_fails(operands):
    if len(operands.x) == 1:
        raise RuntimeError("not for one row")
    return good(operands)


@pytest.fixture
def studied(kernels):
    """Kernels whose bits stay, split over k by m, and drift; split alone does not declare that they stay."""
    registry.register(FakeKernel("bits.stay", good))
    registry.register(FakeKernel("bits.split", splits, arithmetics=lambda problem: (OPEN,)))
    registry.register(FakeKernel("bits.drift", drifts))
    registry.register(FakeKernel("bits.most", alone_fails))
    registry.register(FakeKernel("stop.late", interrupted))


def rows_of(*names, tokens=(1, 2, 4, 8), **options):
    work = plan([Problem(m, N, K) for m in tokens], names, device=CPU)
    return list(determinism(work, device=CPU, environment=Environment(run="r"), **options))


def by_m(rows, kernel):
    return {row.m: row for row in rows if row.kernel == kernel}


# The study


def test_what_changes_with_m_and_what_from_run_to_run(studied):
    rows = rows_of("bits.stay", "bits.split", "bits.drift", repeats=4)
    stay, split, drift = (by_m(rows, f"bits.{name}") for name in ("stay", "split", "drift"))
    assert [(row.batch, row.run_to_run, row.first_m) for row in stay.values()] == [(0.0, 0.0, 1)] * 4
    assert [m for m, row in split.items() if row.batch] == [4, 8]
    assert split[4].batch == split[8].batch  # of the same row of x, by the same split
    assert 0.1 < split[4].batch < 1
    assert {row.run_to_run for row in split.values()} == {0.0}
    assert {m: row.run_to_run for m, row in drift.items()} == pytest.approx({m: 1 / (m * N) for m in (1, 2, 4, 8)})
    assert drift[1].batch == 0  # its own reference
    assert drift[2].batch == 1 / N  # the word that is the last at m = 1
    assert all(row.time_us and row.rounds and row.status == "ok" and row.m1_max is not None for row in rows)
    assert {row.kernel for row in rows if broken(row)} == {"bits.drift"}  # the split is not declared


def test_each_x_is_the_first_rows_of_the_largest_ones_and_the_weights_are_the_same(studied, monkeypatch):
    seen = {}

    def record(operands):
        x, weights = operands.x, operands.weights
        seen[len(x)] = x.clone(), weights.gate.clone(), weights.up.clone()
        return good(operands)

    def drawn(problem, *rest):
        inputs = make_inputs(problem, *rest)
        inputs.x.mul_(problem.m)  # what is drawn may depend on m
        inputs.weights.gate.mul_(problem.m)
        return inputs

    registry.register(FakeKernel("bits.seen", record))
    for module in ("determinism", "bench"):
        monkeypatch.setattr(f"fused_swiglu.{module}.make_inputs", drawn)
    rows_of("bits.seen", tokens=(2, 8, 4))
    x, gate, up = seen[8]
    assert all(torch.equal(part, x[:m]) for m, (part, _, _) in seen.items())
    assert all(torch.equal(a, gate) and torch.equal(b, up) for _, a, b in seen.values())
    assert sorted(seen) == [2, 4, 8]


def test_the_first_m_is_the_reference(studied):
    split = by_m(rows_of("bits.split", tokens=(8, 1, 4)), "bits.split")
    assert list(split) == [8, 1, 4]
    assert [bool(row.batch) for row in split.values()] == [False, True, False]
    assert {row.first_m for row in split.values()} == {8}


def test_where_the_first_m_does_not_run_the_next_is_the_reference(studied):
    most = by_m(rows_of("bits.most", tokens=(1, 2, 4)), "bits.most")
    assert [(row.status, row.first_m, row.batch) for row in most.values()] == [
        ("failed", 1, None),
        ("ok", 2, 0.0),
        ("ok", 2, 0.0),
    ]


def test_several_configs_of_a_kernel_are_compared_each_with_itself(studied):
    configs = ["tile=64,fast=no", "tile=128,fast=no"]
    work = plan([Problem(m, N, K) for m in (1, 2)], ["tiled.good"], configs, device=CPU)
    rows = list(determinism(work, device=CPU, environment=Environment(run="r")))
    assert [(row.config, row.m, row.first_m) for row in rows] == [(c, m, 1) for m in (1, 2) for c in configs]
    assert [line.config for line in ranges(rows, [])[0].lines] == configs


def test_problems_that_differ_in_more_than_m_are_apart(studied):
    work = plan([Problem(m, n, K) for n in (8, 16) for m in (1, 3)], ["bits.split"], device=CPU)
    rows = list(determinism(work, device=CPU, environment=Environment(run="r")))
    assert [bool(row.batch) for row in rows] == [False, True, False, True]
    assert len(ranges(rows, [])) == 2


@pytest.mark.parametrize("tokens", [(4,), (0, 4)])
def test_what_shows_no_change_is_refused(tokens):
    with pytest.raises(ArgumentError, match=r"^tokens: .*give two numbers or more"):
        rows_of("torch.eager", tokens=tokens)


# What rows say together


def row(kernel, m, us, batch=0.0, run="a", **changes):
    known = {
        "config": f"tile={m}", "arithmetic": "sm90:ieee:out", "n": N, "k": K, "status": "ok", "role": "fused",
        "ran_on": "GPU", "launch": "graph", "dtype": "bf16", "inputs": "normal", "run_to_run": 0.0, "first_m": 1,
    }  # fmt: skip
    rounds = tuple(us * wobble for wobble in (0.9, 1.0, 1.0, 1.2))
    return Row(kernel=kernel, m=m, batch=batch, time_us=us, rounds=rounds, run=run, **(known | changes))


OPENLY = {"arithmetic": str(OPEN), "config": "default"}


def two_processes():
    """`lib` is the fastest and changes its bits at 128, but not with the setting; `few` and `many` have one arithmetic,
    each the best at one end. The second process has a clock of half the speed."""
    first = [
        row("lib", 1, 10.0, **OPENLY), row("few", 1, 12.0), row("many", 1, 30.0), row("bare", 1, 5.0, role="control"),
        row("lib", 128, 100.0, 0.25, **OPENLY), row("few", 128, 400.0), row("many", 128, 110.0),
    ]  # fmt: skip
    second = [
        row("lib", 1, 28.0, run="b", **OPENLY), row("few", 1, 24.0, run="b"), row("many", 1, 60.0, run="b"),
        row("lib", 128, 260.0, run="b", **OPENLY), row("few", 128, 800.0, run="b"), row("many", 128, 220.0, run="b"),
    ]  # fmt: skip
    return [*first, *second], [Environment(run="a"), Environment(run="b", settings={"LIB": "small"})]


def test_times_of_two_processes_are_linked_by_a_kernel_of_both():
    (found,) = ranges(*two_processes())
    over = {(line.kernel, line.setting): found.over_fastest(line) for line in found.lines}
    assert over == {
        ("lib", ""): pytest.approx({1: 1.0, 128: 1.0}),
        ("few", ""): pytest.approx({1: 1.2, 128: 4.0}),
        ("many", ""): pytest.approx({1: 3.0, 128: 1.1}),
        ("bare", ""): pytest.approx({1: 0.5}),
        ("lib", "LIB=small"): pytest.approx({1: 1.4, 128: 1.3}),  # few and many link, and are not shown again
    }
    assert {m: line.kernel for m, line in found.fastest.items()} == {1: "lib", 128: "lib"}  # no control


def test_what_kept_bits_cost():
    (found,) = ranges(*two_processes())
    declared, seen = found.kept
    assert (declared.name, declared.declared) == ("sm90:ieee:out", True)
    assert [(c.m, c.fastest.kernel, c.keeps.kernel) for c in declared.choices] == [
        (1, "lib", "few"),
        (128, "lib", "many"),
    ]
    assert declared.costs == pytest.approx({1: 1.2, 128: 1.1})
    assert (seen.name, seen.declared) == (f"lib {OPEN} LIB=small", False)
    assert [choice.cost for choice in seen.choices] == [pytest.approx((cost,) * 3) for cost in (1.4, 1.3)]  # no width


def test_kernels_that_leave_bits_open_do_not_stand_in_for_one_another():
    open_ = {"arithmetic": "sm90:undeclared:out"}
    times = {"a": (1.0, 4.0), "b": (4.0, 1.0)}
    (found,) = ranges(
        [row(name, m, us, **open_) for name, both in times.items() for m, us in zip((1, 2), both, strict=True)], []
    )
    assert [bits.costs for bits in found.kept] == [pytest.approx({1: 1, 2: 4}), pytest.approx({1: 4, 2: 1})]


def test_bits_at_more_m_come_first():
    (found,) = ranges(
        [*(row("a", m, 9.0) for m in (1, 2, 3)), *(row("b", m, 1.0, arithmetic="sm90:ex2:out") for m in (1, 2))], []
    )
    assert [bits.name for bits in found.kept] == ["sm90:ieee:out", "sm90:ex2:out"]


def test_one_m_is_no_proof_of_kept_bits_and_no_kept_bits_cost_nothing():
    (found,) = ranges([row("once", 1, 1.0), row("lib", 1, 2.0, **OPENLY), row("lib", 2, 2.0, 0.5, **OPENLY)], [])
    assert [line.kept for line in found.lines] == [False, False]
    assert found.kept == []
    assert len(tables([found])) == 1


def test_stream_launches_are_not_compared_with_replays():
    both = [row(kernel, 1, us, launch="stream") for kernel, us in (("a", 50.0), ("b", 9.0))]
    (found,) = ranges([row("a", 1, 10.0), *both, row("b", 2, 9.0, launch="stream")], [])
    a, b = found.lines
    assert (found.over_fastest(a), found.over_fastest(b)) == ({1: 1.0}, {2: 1.0})
    assert sorted(b.rows) == [1, 2]


def test_of_what_was_run_twice_the_last_counts():
    (found,) = ranges(
        [row("a", 1, 1.0), row("a", 2, 1.0, 0.5), row("a", 1, 1.0, run="b"), row("a", 2, 1.0, run="b")], []
    )
    assert [line.kept for line in found.lines] == [True]


# Tables and figures


def test_the_tables():
    text = markdown(*two_processes())
    lines = text.splitlines()
    assert lines[0] == f"k={K}, n={N}, bf16, inputs normal, GPU:"
    heads = (
        "kernel | arithmetic | setting | words changed | at | run to run | time / fastest, m <= 64 | m > 64 | at most"
    )
    assert lines[2] == f"| {heads} |"
    assert lines[4] == "| lib | ?:?:out |  | 25% | 1 of 1 m | 0% | 1.000 | 1.000 | 1.000 (m=1) |"
    assert lines[8] == "| lib | ?:?:out | LIB=small | 0% | 0 of 1 m | 0% | 1.400 | 1.300 | 1.400 (m=1) |"
    assert "| sm90:ieee:out | declared | few, many | 1.200 | 1.100 | 1.200 (m=1) |" in lines
    assert "| lib ?:?:out LIB=small | seen | lib | 1.400 | 1.300 | 1.400 (m=1) |" in lines
    assert "| m | fastest | time | declared bits | declared / fastest |" in lines
    assert "| 128 | lib ?:?:out | 100 us | many sm90:ieee:out | 1.100 |" in lines
    assert CPU_NOTE not in text


def test_bits_that_were_only_seen_to_be_kept_are_shown_beside_declared_ones():
    rows = [row("a", m, us, **kind) for m in (1, 2) for us, kind in ((1.0, OPENLY), (2.0, {}))]
    lines = markdown(rows, []).splitlines()
    assert "| m | fastest | time | declared bits | declared / fastest | kept bits | kept / fastest |" in lines
    assert "| 2 | a ?:?:out | 1.00 us | a sm90:ieee:out | 2.000 | a ?:?:out | 1.000 |" in lines


def test_without_repeats_nothing_is_said_of_them(studied):
    rows = rows_of("bits.drift", repeats=0)
    assert {row.run_to_run for row in rows} == {None}
    assert "run to run |" not in markdown(rows, [])


def test_times_on_a_cpu_are_labelled(studied):
    text = markdown(rows_of("bits.stay", "bits.split"), [])
    assert "| CPU time / fastest, m <= 64 |" in text
    assert "| m | fastest | CPU time |" in text
    assert text.count(CPU_NOTE) == text.count(NO_CUBLAS) == 1


def test_why_kernels_are_missing_is_said_once(studied):
    rows = rows_of("fake.elsewhere", "bits.most", "bits.stay", tokens=(1, 2, 4))
    assert missing(rows) == [
        "fake.elsewhere: unsupported: needs a machine that nobody has",
        "bits.most: failed: RuntimeError: not for one row (m = 1)",
    ]


def test_the_figure_draws_what_changed_and_every_time():
    figure = draw(*two_processes())
    shares, times = figure.axes
    assert [list(map(list, zip(*line.get_data(), strict=True))) for line in shares.lines] == [[[128, 0.25]]]
    assert "3 of 5 kept all words" in shares.get_title()  # a control that ran at one m counts as none
    assert len(times.lines) == 5
    assert len({(line.get_marker(), line.get_linestyle()) for line in times.lines}) == 5
    assert {line.get_color() for line in times.lines} == {"black"}
    assert all("(" in ax.get_xlabel() for ax in figure.axes)
    with pytest.raises(ArgumentError, match="plot"):
        draw([], [])


# The command

TINY = ["determinism", "--shape", "4,64,24", "--device", "cpu", "--quiet"]


def test_the_command_and_its_stored_rows(studied, tmp_path, capsys):
    out, figure = str(tmp_path / "rows.jsonl"), tmp_path / "figure.svg"
    assert main([*TINY, "--kernels", "bits.stay", "bits.split", "--out", out, "--plot", str(figure)]) == 0
    assert figure.stat().st_size > 1000
    shown = capsys.readouterr()
    assert "1 of 2 m" in shown.out
    assert shown.err == ""
    rows, environments = load(out)
    assert [row.m for row in rows] == [1, 1, 2, 2, 4, 4]
    assert [environment.settings for environment in environments] == [None]
    assert main(["determinism", "--from", out, "--markdown"]) == 0
    assert capsys.readouterr().out == markdown(rows, environments)
    assert main(["determinism", "--from", out, "--kernels", "bits.stay"]) == 0
    assert "bits.split" not in capsys.readouterr().out


def test_captured_states_are_taken_up_to_the_last(studied, tmp_path, capsys):
    hidden, out = tmp_path / "hidden.safetensors", tmp_path / "rows.jsonl"
    save_file({"layers.0.mlp_input": torch.randn(5, 576).bfloat16()}, hidden)
    options = ["--hidden", str(hidden), "--model", "smollm2-135m", "--kernels", "bits.stay", "--out", str(out)]
    assert main(["determinism", *options, "--device", "cpu", "--quiet"]) == 0
    rows = load(out)[0]
    assert [row.m for row in rows] == [1, 2, 4, 5]
    assert rows[0].inputs == "normal+hidden:hidden.safetensors:layer0"


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("bits.drift", "fused-swiglu: bits.drift contradicts sm90:ieee:out: bits change at m = 1, 2, 4\n"),
        ("bits.most", ""),
    ],
)
def test_a_broken_declaration_and_a_failed_kernel_exit_with_1(studied, capsys, kernel, said):
    assert main([*TINY, "--kernels", kernel, "bits.stay"]) == 1
    assert capsys.readouterr().err == said


def test_interrupted_rows_are_kept_and_no_second_process_is_begun(studied, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(determinism_command, "has_cublas", lambda device: True)
    monkeypatch.setattr(second_process, "records", None)
    out = str(tmp_path / "rows.jsonl")
    assert main([*TINY, "--kernels", "bits.split", "stop.late", "--out", out]) == 130
    assert capsys.readouterr().err == f"fused-swiglu: interrupted; 1 rows kept in {out}\n"
    assert [(row.kernel, row.first_m) for row in load(out)[0]] == [("bits.split", 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model smollm2-135m --tokens 4", "argument --tokens: 4 rows: no row's change could be seen; give two"),
        ("--shape 1,32,16", "argument --tokens: 1 rows: no row's change"),
        ("--shape 4,32,16 --tokens 1 2", "argument --tokens: given with --shape"),
        ("--tokens 0 4", "argument --tokens: 0 is too small"),
        ("--plot x.gif", "argument --plot: cannot draw"),
        ("--from {stored} --out x", "argument --out: given with --from"),
        ("--from {stored}", "argument --from: holds no row of this study"),
        ("--from {stored}.none", "argument FILE: cannot read"),
    ],
)
def test_bad_options_are_one_line_before_any_work(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fused_swiglu.determinism.determinism", None)
    stored, out = tmp_path / "stored.jsonl", tmp_path / "out.jsonl"
    stored.write_text(replace(row("a", 1, 1.0), first_m=None).to_json() + "\n")
    more = [] if "--from" in options else ["--out", str(out), "--device", "cpu"]
    assert main(["determinism", *options.format(stored=stored).split(), *more]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"fused-swiglu: {message}")
    assert err.count("\n") == 1
    assert not out.exists()


# The second process


@pytest.fixture
def cublas(monkeypatch):
    """As if this machine's kernels called cuBLAS."""
    monkeypatch.setattr(determinism_command, "has_cublas", lambda device: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def test_a_real_second_process_adds_its_rows_and_environment(cublas, tmp_path, capsys):
    out = str(tmp_path / "rows.jsonl")
    assert main([*TINY, "--kernels", "torch.eager", "cutlass.decode", "--repeats", "1", "--out", out]) == 0
    rows, environments = load(out)
    first, second = environments
    assert (first.settings, second.settings) == (None, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert first.command == second.command  # as typed: no other path
    assert [(row.kernel, row.m) for row in rows if row.run == second.run] == [("torch.eager", m) for m in (1, 2, 4)]
    assert [row.kernel for row in rows if row.run == first.run] == ["cutlass.decode", "torch.eager"] * 3
    shown = capsys.readouterr()
    assert shown.out.count("CUBLAS_WORKSPACE_CONFIG=:16:8") >= 1
    assert shown.err == ""


def test_what_it_runs_are_the_kernels_of_a_library_and_the_links(studied, cublas, monkeypatch):
    calls = []
    monkeypatch.setattr(second_process, "records", lambda *call: calls.append(call) or iter(()))
    assert main([*TINY, "--kernels", "bits.stay", "bits.split"]) == 0
    assert calls == [
        ([*TINY, "--kernels", "bits.stay", "bits.split", "--part", "bits.split", "bits.stay"],
         {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
    ]  # fmt: skip
    assert main([*TINY, "--kernels", "bits.stay"]) == 0
    assert len(calls) == 1  # no library is asked


def test_a_part_runs_only_what_is_named(studied, tmp_path, capsys):
    out = str(tmp_path / "rows.jsonl")
    assert main([*TINY, "--kernels", "bits.*", "--plot", "none.gif", "--part", "bits.stay", "--out", out]) == 0
    assert {row.kernel for row in load(out)[0]} == {"bits.stay"}
    assert capsys.readouterr().out == ""


def test_a_setting_of_the_user_is_said_and_recorded(studied, cublas, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(second_process, "records", None)
    out = str(tmp_path / "rows.jsonl")
    assert main([*TINY, "--kernels", "bits.split", "--out", out]) == 0
    shown = capsys.readouterr()
    assert "CUBLAS_WORKSPACE_CONFIG is set to :4096:8: all rows are of that, in one process" in shown.err
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in shown.out
    assert [environment.settings for environment in load(out)[1]] == [{"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}]


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("out of memory"), 1), (KeyboardInterrupt(), 130)])
def test_rows_of_a_second_process_that_ends_early_are_kept(studied, cublas, monkeypatch, tmp_path, capsys, error, code):
    def records(arguments, settings):
        yield Environment(run="b", settings=settings, command="other")
        yield row("bits.split", 1, 5.0, run="b", ran_on="cpu", **OPENLY)
        raise error

    monkeypatch.setattr(second_process, "records", records)
    out = str(tmp_path / "rows.jsonl")
    assert main([*TINY, "--kernels", "bits.split", "--out", out]) == code
    rows, environments = load(out)
    assert [row.run for row in rows][3:] == ["b"]
    assert environments[1].settings == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ("failed: out of memory; 1 of its rows are kept" if code == 1 else f"4 rows kept in {out}") in err


def test_a_second_process_that_cannot_run_says_why():
    with pytest.raises(RuntimeError, match=r"argument --shape: .*give three"):
        list(second_process.records(["determinism", "--shape", "1,2"], {}))


def test_an_interrupt_ends_the_second_process_and_what_it_wrote_comes_first(monkeypatch):
    started, looks = [], [KeyboardInterrupt]
    popen = second_process.subprocess.Popen

    def look(path):
        if looks:
            raise looks.pop()
        return [Environment(run="b")]

    monkeypatch.setattr(
        second_process.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    monkeypatch.setattr(second_process, "_records", look)
    records = second_process.records(["determinism", "--shape", "4096,512,512", "--device", "cpu"], {})
    assert next(records).run == "b"
    with pytest.raises(KeyboardInterrupt):
        next(records)
    assert started[0].returncode not in (None, 0)


def test_settings_are_absent_where_they_are_unset(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "settings" not in Environment.collect(CPU).to_json()
