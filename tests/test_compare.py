"""compare: every kernel gets its row, whatever it does, and the rest go on."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Problem, Weights, registry, timing
from fused_swiglu.bench import sampled_rows
from fused_swiglu.compare import Case, compare, once, plan
from fused_swiglu.results import Environment, Row

MODULE = importlib.import_module("fused_swiglu.bench")
CPU = torch.device("cpu")
SMALL = Problem(5, 24, 32)
pytestmark = pytest.mark.usefixtures("kernels")


def rows_of(*names: str, problem: Problem = SMALL, **options: object) -> dict[str, Row]:
    return {row.kernel: row for row in compare(problem, names, device=CPU, **options)}  # type: ignore[arg-type]


def test_a_good_kernel_is_checked_and_timed() -> None:
    row = rows_of("fake.good", seed=3)["fake.good"]
    assert (row.status, row.reason, row.role, row.ran_on) == ("ok", None, "fused", "cpu")
    assert (row.config, row.arithmetic) == ("default", "sm90:ieee:out")
    assert (row.m, row.n, row.k, row.dtype, row.layout, row.inputs, row.seed) == (
        5,
        24,
        32,
        "bf16",
        "stacked",
        "normal",
        3,
    )
    assert (row.m1_gt1, row.m1_max, row.outputs) == (0, 0, 5 * 24)
    assert row.m2 is not None
    assert all(share == 0 for _, _, share in row.m2)
    assert row.time_us is not None
    assert row.time_us_q1 is not None
    assert row.time_us_q3 is not None
    assert 0 < row.time_us_q1 <= row.time_us <= row.time_us_q3


def test_rates_are_for_gpus_only() -> None:
    row = rows_of("fake.good")["fake.good"]
    assert (row.tflops, row.gbs, row.peak, row.regime) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("fake.build", "failed", "ValueError: no such tile"),
        ("fake.raises", "failed", "RuntimeError: illegal memory access"),
        ("fake.unwritten", "failed", "RuntimeError: left 5 of 120 outputs unwritten"),
        (
            "fake.shape",
            "failed",
            "RuntimeError: returned torch.bfloat16 of shape (5, 23), not torch.bfloat16 of shape (5, 24)",
        ),
        ("fake.elsewhere", "unsupported", "needs a machine that nobody has"),
    ],
)
def test_what_goes_wrong_is_a_row_with_its_reason_and_the_rest_go_on(name: str, status: str, reason: str) -> None:
    rows = rows_of(name, "fake.own")
    assert (rows[name].status, rows[name].reason) == (status, reason)
    assert rows[name].time_us is None
    assert rows["fake.own"].status == "ok"


def test_a_wrong_kernel_is_ok_with_its_mismatch() -> None:
    row = rows_of("fake.wrong")["fake.wrong"]
    assert row.status == "ok"
    assert row.m1_gt1 is not None
    assert row.m2 is not None
    assert row.m1_gt1 > 0.9
    assert all(share > 0.9 for _, _, share in row.m2)


def test_a_kernel_that_returns_its_own_tensor_is_read_there() -> None:
    assert rows_of("fake.own")["fake.own"].m1_gt1 == 0


def test_a_control_is_compared_with_the_products() -> None:
    row = rows_of("fake.products")["fake.products"]
    assert (row.role, row.status, row.m1_gt1, row.outputs) == ("control", "ok", 0, 2 * 5 * 24)


def test_a_package_that_cannot_be_imported_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registry.get_kernel

    def get_kernel(name: str) -> object:
        if name == "fake.own":
            raise ImportError("no module named 'peer'")
        return real(name)

    monkeypatch.setattr(registry, "get_kernel", get_kernel)
    rows = rows_of("fake.own", "fake.good")
    assert rows["fake.good"].status == "ok"
    broken = rows["fake.own"]
    assert (broken.status, broken.reason) == ("failed", "ImportError: no module named 'peer'")
    assert (broken.config, broken.arithmetic, broken.role, broken.ran_on) == (None, None, None, None)


def test_ratios_are_to_the_baselines_that_ran() -> None:
    rows = rows_of("torch.eager", "fake.good", "fake.raises")
    assert rows["torch.eager"].ratios == {"torch.eager": (1.0, 1.0, 1.0)}
    ratios = rows["fake.good"].ratios
    assert ratios is not None
    assert list(ratios) == ["torch.eager"]
    middle, low, high = ratios["torch.eager"]
    assert 0 < low <= middle <= high


def test_every_case_is_run(kernels: None) -> None:
    cases = [Problem(m, 8, 16) for m in (1, 3)]
    assert [(row.m, row.kernel) for row in compare(cases, ["fake.good", "fake.own"], device=CPU)] == [
        (m, name) for m in (1, 3) for name in ("fake.good", "fake.own")
    ]


def test_no_tokens_give_rows_without_times() -> None:
    row = rows_of("fake.good", problem=Problem(0, 8, 16))["fake.good"]
    assert (row.status, row.outputs, row.time_us, row.m1_gt0) == ("ok", 0, None, None)


def test_the_exact_result_is_computed_once_for_each_kind_of_output(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = MODULE.exact
    monkeypatch.setattr(MODULE, "exact", lambda *a, **k: calls.append(k["computes"]) or real(*a, **k))
    rows_of("fake.good", "fake.own", "fake.wrong", "fake.products")
    assert sorted(calls) == ["gate_up", "swiglu"]


def test_an_unwritten_output_outside_the_compared_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULE.CHECKED_OUTPUTS, "cpu", 1)
    problem = Problem(50, 8, 16)
    assert rows_of("fake.good", problem=problem)["fake.good"].outputs == 2 * 8
    assert rows_of("fake.unwritten", problem=problem)["fake.unwritten"].reason is not None


@given(m=st.integers(0, 400), n=st.integers(1, 50), limit=st.integers(1, 4000), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_sampled_rows_keep_both_ends_and_the_limit(m: int, n: int, limit: int, seed: int) -> None:
    rows = sampled_rows(problem := Problem(m, n, 1), limit, seed)
    if rows is None:
        assert m <= max(2, limit // n)
        return
    found = rows.tolist()
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, m - 1)
    assert len(found) == max(2, limit // n) < m
    assert torch.equal(rows, sampled_rows(problem, limit, seed))  # type: ignore[arg-type]


def test_an_interrupt_keeps_the_rows_so_far() -> None:
    rows = compare([SMALL, SMALL], ["fake.build", "fake.good", "stop.here"], device=CPU)
    kept: list[Row] = []
    with pytest.raises(KeyboardInterrupt):
        kept.extend(rows)
    assert [(row.kernel, row.status) for row in kept] == [("fake.build", "failed"), ("fake.good", "ok")]
    assert kept[1].reason == "interrupted before it was timed"
    assert kept[1].outputs == 120


def test_a_failure_while_timing_is_a_failed_row_that_keeps_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    real = timing.measure

    def measure(variants: list[timing.Variant], *rest: object) -> list:
        first, *others = variants
        return [(first.key, RuntimeError("capture failed")), *real(others, *rest)]  # type: ignore[arg-type]

    monkeypatch.setattr(timing, "measure", measure)
    rows = rows_of("fake.good", "fake.own")
    assert (rows["fake.good"].status, rows["fake.good"].reason) == ("failed", "timing: RuntimeError: capture failed")
    assert rows["fake.good"].outputs == 120
    assert rows["fake.own"].status == "ok"


def test_if_timing_fails_altogether_every_variant_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> list:
        raise MemoryError

    monkeypatch.setattr(timing, "measure", measure)
    rows = rows_of("fake.good", "fake.own")
    assert {row.reason for row in rows.values()} == {"timing: MemoryError"}


def test_a_time_of_each_launch_is_a_row_with_the_rates_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:

    def measure(variants: list[timing.Variant], *_: object) -> list:
        return [
            (variants[0].key, timing.Timing(us, us, us, 9, launch, "burst", ratios={"torch.eager": (0.5, 0.4, 0.6)}))
            for us, launch in ((2.0, "graph"), (4.0, "stream"))
        ]

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(MODULE, "_device_name", lambda device: "a GPU")
    problem = Problem(100, 100, 100)
    graph, stream = compare(problem, ["fake.good"], device=CPU, environment=Environment(peak_tflops=4.0))
    assert (graph.launch, stream.launch, graph.samples) == ("graph", "stream", 9)
    assert graph.tflops == pytest.approx(4e6 / 2e-6 / 1e12)
    assert graph.peak == pytest.approx(0.5)
    assert stream.gbs == pytest.approx((2 * 3 * 10_000 + 2 * 10_000) / 4e-6 / 1e9)
    assert graph.ratios == {"torch.eager": (0.5, 0.4, 0.6)}


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([], ["tile=64,fast=no"]),
        (["tile=128*"], ["tile=128,fast=no", "tile=128,fast=yes"]),
        (["*fast=yes", "*"], ["tile=128,fast=yes", "tile=64,fast=no", "tile=128,fast=no"]),
        (["tile=64,fast=no", "tile=64"], ["tile=64,fast=no"]),
        (["tile=32"], ["tile=32,fast=no"]),
    ],
)
def test_configs_are_chosen_by_glob_or_written_out(configs: list[str], expected: list[str]) -> None:
    [(_, candidates)] = plan(SMALL, ["tiled.good", "fake.good"], configs, device=CPU)
    chosen = {name: [str(c.config) for c in candidates if c.name == name] for name in ("tiled.good", "fake.good")}
    assert chosen == {"tiled.good": expected, "fake.good": ["default"]}


def test_arithmetics_are_chosen_by_glob_and_a_kernel_without_them_keeps_its_own() -> None:
    [(_, candidates)] = plan(SMALL, ["torch.eager", "fake.good"], (), ["*:ex2:*", "sm90:ieee:out"], device=CPU)
    assert [(c.name, str(c.arithmetic)) for c in candidates] == [
        ("torch.eager", "undeclared:undeclared:gate+up+act+out"),
        ("fake.good", "sm90:ieee:out"),
        ("fake.good", "sm90:ex2:out"),
    ]


@pytest.mark.parametrize(
    ("choice", "argument", "wrong"),
    [
        ({"kernels": ["fake.nothing*"]}, "kernels", "nothing matches"),
        ({"configs": ["stages=3"]}, "config", "no chosen kernel reads 'stages=3'"),
        ({"configs": ["*stages*"]}, "config", "no chosen kernel reads"),
        ({"configs": ["tile=big"]}, "config", "tile='big'"),
        ({"arithmetics": ["sm80:*"]}, "arithmetic", "no chosen kernel offers"),
        ({"inputs": "strange"}, "inputs", "unknown 'strange'"),
        ({"regime": "steady"}, "regime", "unknown 'steady'"),
    ],
)
def test_a_choice_that_nothing_reads_is_refused_before_any_work(choice: dict, argument: str, wrong: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        compare(SMALL, **({"kernels": ["tiled.good", "stop.here"], "device": CPU} | choice))
    assert caught.value.argument == argument
    assert wrong in caught.value.wrong


@pytest.mark.parametrize("layout", ["stacked", "separate"])
def test_given_operands_are_the_ones_computed_with(layout: str) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    weights = Weights(torch.ones(3, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16))
    seen = []
    problem = Problem(2, 3, 4, layout=layout)
    kernel = registry.get_kernel("fake.good")
    real = kernel.body  # type: ignore[attr-defined]

    def body(operands: object) -> torch.Tensor:
        seen.append(operands)
        return real(operands)

    kernel.body = body  # type: ignore[attr-defined]
    case = Case(problem, x=x, weights=weights, source="mine")
    [row] = compare(case, ["fake.good"], device=CPU)
    assert (row.status, row.inputs, row.m1_max) == ("ok", "mine", 0)
    assert torch.equal(seen[0].x, x)
    assert torch.equal(seen[0].weights.up, weights.up)
    assert (seen[0].weights.stacked is not None) == (layout == "stacked")
    assert seen[0].x.data_ptr() != x.data_ptr()
    assert seen[0].weights.gate.data_ptr() != weights.gate.data_ptr()


def test_operands_that_do_not_fit_the_problem_are_refused() -> None:
    half = torch.zeros(5, 32, dtype=torch.float16)
    for x in (half, torch.zeros(4, 32, dtype=torch.bfloat16)):
        with pytest.raises(ArgumentError, match="x: is"):
            Case(SMALL, x=x)
    with pytest.raises(ArgumentError, match="w_up: is"):
        Case(
            replace(SMALL, dtype="fp16", weight_dtype="fp16", out_dtype="fp16"),
            weights=Weights(half.new_zeros(24, 32), half),
        )


def test_progress_counts_up_to_the_whole() -> None:
    told = []
    list(compare([SMALL, SMALL], ["fake.good", "fake.raises"], device=CPU, progress=lambda *step: told.append(step)))
    assert [done for done, _, _ in told] == list(range(6))
    assert {total for _, total, _ in told} == {6}


def test_once_launches_one_variant_of_each_kernel_after_a_warm_up() -> None:
    launches = []
    kernel = registry.get_kernel("tiled.good")
    real = kernel.body  # type: ignore[attr-defined]
    kernel.body = lambda operands: launches.append(operands.out.shape) or real(operands)  # type: ignore[attr-defined]
    work = plan(SMALL, ["tiled.good", "fake.raises", "fake.elsewhere"], ["*"], device=CPU)
    rows = list(once(work, device=CPU, environment=Environment()))
    assert [(row.kernel, row.status) for row in rows] == [
        ("fake.raises", "failed"),
        ("fake.elsewhere", "unsupported"),
        ("tiled.good", "ok"),
    ]
    assert rows[2].config == "tile=64,fast=no"
    assert (rows[2].time_us, rows[2].outputs) == (None, None)
    assert launches == [(5, 24)] * 2


def test_a_kernel_that_fails_while_it_is_timed_fails_alone(kernels: None) -> None:
    rows = rows_of("odd.flaky", "fake.good", "torch.eager")
    assert rows["odd.flaky"].status == "failed"
    assert "the fourth call" in (rows["odd.flaky"].reason or "")
    assert rows["fake.good"].status == rows["torch.eager"].status == "ok"
    assert rows["fake.good"].time_us is not None


def test_a_kernel_that_overwrites_its_operands_fails_and_spoils_nothing(kernels: None) -> None:
    rows = rows_of("aaa.overwrites", "fake.good")
    assert (rows["aaa.overwrites"].status, rows["fake.good"].status) == ("failed", "ok")
    assert "overwrote" in (rows["aaa.overwrites"].reason or "")
    assert rows["fake.good"].m1_gt0 == 0


def test_a_nan_that_rounding_made_is_no_unwritten_output() -> None:
    """fp16: eager rounds the gate to -inf, and silu of that is NaN, as it declares."""
    problem = Problem(4, 24, 16, dtype="fp16")
    weights = Weights(torch.full((24, 16), -3e4).half(), torch.ones(24, 16).half())
    case = Case(problem, x=torch.ones(4, 16).half(), weights=weights)
    (row,) = compare(case, ["torch.eager"], device=CPU)
    assert row.status == "ok"
    assert row.m1_gt0 == 1
