"""swiglu: what it picks, what it keeps between calls, what it refuses; on fake kernels that a CPU can launch."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from addressed import Addressed, packing
from fakes import Elsewhere, FakeKernel, good
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fused_swiglu import ArgumentError, Arithmetic, Kernel, Problem, Weights, choice, registry, select, swiglu, tuned
from fused_swiglu.fallback import fallback
from fused_swiglu.inputs import make_inputs
from fused_swiglu.numerics import mismatch
from fused_swiglu.problem import ACTIVATIONS
from fused_swiglu.recent import Recent
from fused_swiglu.reference import exact
from fused_swiglu.sm90 import execute
from fused_swiglu.testing import assert_bits_equal, problems

CPU = torch.device("cpu")
IEEE = Arithmetic()
Registered = Callable[..., None]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuning.json"))
    monkeypatch.setattr(tuned, "_session", {})
    select.forget()
    tuned.machine_key.cache_clear()
    yield
    select.forget()
    tuned.machine_key.cache_clear()


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device with kernels."""
    for module in (choice, select):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, sm90: None) -> Registered:
    """Leaves only these kernels."""

    def register(*kernels: Kernel) -> None:
        monkeypatch.setattr(registry, "_installed", dict)
        monkeypatch.setattr(registry, "_registered", {kernel.name: kernel for kernel in kernels})

    return register


def operands(
    m: int = 5, n: int = 24, k: int = 32, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = make_inputs(Problem(m, n, k, dtype="bf16" if dtype == torch.bfloat16 else "fp16"), "normal", 0)
    return inputs.x, inputs.weights.gate.clone(), inputs.weights.up.clone()


def wanted(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    x, gate, up = x.double(), gate.double(), up.double()
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)).to(torch.float32)


def assert_right(out: Tensor, x: Tensor, gate: Tensor, up: Tensor) -> None:
    torch.testing.assert_close(out.float(), wanted(x, gate, up), rtol=1e-2, atol=1e-5)


# What is picked.


def kernels_of(problem: Problem) -> str:
    return choice.choose(problem, IEEE, CPU)[0].name


@given(problems(max_m=300, max_n=5000, max_k=5000, activations=ACTIVATIONS, bias=True, min_m=0))
def test_every_pick_takes_its_problem_to_the_bit_as_declared(problem: Problem) -> None:
    arithmetic = choice.declared(choice.DEFAULT, problem.activation)
    if problem.bias and problem.no_tma:  # triton.fused takes all others
        with pytest.raises(ArgumentError, match=f"{problem.no_tma}.*adds no bias"):
            choice.choose(problem, arithmetic, CPU)
        return
    kernel, config = choice.choose(problem, arithmetic, CPU)
    assert kernel.why_not(problem, config, arithmetic, CPU) is None
    assert arithmetic in kernel.arithmetics(problem)
    assert arithmetic.complete
    assert kernel.role == "fused"
    assert kernel.name == (
        "triton.fused" if problem.no_tma else "cutlass.decode" if problem.m <= 64 else "cutlass.interleaved"
    )


@given(problems(max_m=200, max_n=300, max_k=300), st.sampled_from(("ieee", "ex2", "tanh", "poly3")))
def test_all_candidates_are_of_one_arithmetic(problem: Problem, recipe: str) -> None:
    arithmetic = Arithmetic(recipe=recipe)
    found = list(choice.candidates(problem, arithmetic, CPU))
    assert found[0] == choice.choose(problem, arithmetic, CPU)
    names = list(dict.fromkeys(kernel.name for kernel, _ in found))
    assert names[-1] == "triton.fused" if problem.m <= 64 else names[-1] in ("triton.fused", "cutlass.decode")
    assert len(set(found)) == len(found)
    for kernel, config in found:
        assert kernel.why_not(problem, config, arithmetic, CPU) is None


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("m", [0, 1, 9, 64, 65, 130])
def test_the_pick_of_any_size_gives_the_bits_of_the_model(m: int) -> None:
    x, gate, up = operands(m, 40, 72)
    assert_bits_equal(swiglu(x, gate, up), execute(IEEE, x, Weights(gate, up)))
    assert_bits_equal(
        swiglu(x, gate, up, arithmetic="sm90:ex2:out"), execute(Arithmetic(recipe="ex2"), x, Weights(gate, up))
    )


def test_preferences(only: Registered) -> None:
    few, many = Problem(64, 64, 64), Problem(65, 64, 64)
    names = ("triton.fused", "cutlass.evt", "own.fused", "cutlass.decode", "cutlass.interleaved")
    only(*(FakeKernel(name, good) for name in names))
    assert (kernels_of(few), kernels_of(many)) == ("cutlass.decode", "cutlass.interleaved")
    only(*((Elsewhere if "cutlass" in name else FakeKernel)(name, good) for name in names))
    assert (kernels_of(few), kernels_of(many)) == ("triton.fused", "triton.fused")
    only(FakeKernel("own.fused", good))
    assert kernels_of(few) == "own.fused"


@pytest.mark.parametrize(
    "kernel",
    [
        FakeKernel("own.a", good, role="unfused"),
        FakeKernel("own.a", good, computes="product"),
        FakeKernel("own.a", good, allocates=True),
        FakeKernel("own.a", good, capturable=lambda config: False),
        FakeKernel("own.a", good, arithmetics=lambda problem: (Arithmetic("undeclared"),)),
        packing(FakeKernel("own.a", good)),
    ],
    ids=["unfused", "product", "allocates", "owns a graph", "undeclared", "packs"],
)
def test_what_is_never_picked(only: Registered, kernel: Kernel) -> None:
    other = FakeKernel("own.b", good)
    only(kernel, other)
    assert [k for k, _ in choice.candidates(Problem(4, 8, 8), IEEE, CPU)] == [other]


def test_a_kernel_that_does_something_else_here_is_passed_over(only: Registered) -> None:
    first, second = Addressed("cutlass.interleaved", declares=Arithmetic("undeclared")), Addressed("own.second")
    only(first, second)
    swiglu(*operands())
    assert (first.counts.launched, second.counts.launched) == (0, 1)


def test_no_kernel(only: Registered) -> None:
    only(Elsewhere("own.a", good), Elsewhere("own.b", good))
    with pytest.raises(ArgumentError, match=r"^w_gate: .*own\.a, own\.b: needs a machine that nobody has\); pad"):
        swiglu(*operands())
    with pytest.raises(ArgumentError, match=r"^arithmetic: no kernel offers sm90:tanh:out; choose from sm90:ieee:out"):
        swiglu(*operands(), arithmetic="sm90:tanh:out")


# What is kept between calls.


def test_a_second_call_finds_its_launch(only: Registered) -> None:
    kernel = Addressed()
    only(kernel)
    x, gate, up = operands()
    out = torch.empty(5, 24, dtype=x.dtype)
    for _ in range(3):
        assert swiglu(x, gate, up, out=out) is out
    assert_right(out, x, gate, up)
    assert (kernel.counts.compiled, kernel.counts.bound, kernel.counts.launched) == (1, 1, 3)
    other = x.clone()
    swiglu(other, gate, up, out=out)
    assert (kernel.counts.compiled, kernel.counts.bound) == (1, 2)


def test_what_is_kept_keeps_no_tensor_alive(only: Registered) -> None:
    only(Addressed())
    x, gate, up = operands()
    out = swiglu(x, gate, up)
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in (x, gate, up, out)]
    alive += [weakref.ref(tensor) for tensor in (x, gate, up, out)]
    del x, gate, up, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * 8
    assert len(select._launches) == 1


def test_another_tensor_at_the_same_address_is_computed_right(only: Registered) -> None:
    kernel = Addressed()
    only(kernel)
    memory = torch.empty(3, 5, 64, dtype=torch.bfloat16)
    _, gate, up = operands()
    out = torch.empty(5, 24, dtype=torch.bfloat16)
    for seed in range(3):
        x = memory[0, :, :32]
        x.copy_(torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)))
        assert_right(swiglu(x, gate, up, out=out), x, gate, up)
    assert kernel.counts.bound == 1


def _halves(t: Tensor) -> Tensor:
    return t.view(torch.float16).copy_(t.float().half())


DIFFERENT = {
    "rows": lambda x, g, u, o: (x[:4], g, u, o[:4]),
    "leading dimensions": lambda x, g, u, o: (x.view(1, 5, 32), g, u, o.view(1, 5, 24)),
    "stride of x": lambda x, g, u, o: (x.as_strided((5, 32), (40, 1)), g, u, o),
    "stride of out": lambda x, g, u, o: (x, g, u, o.as_strided((5, 24), (32, 1))),
    "stride of gate": lambda x, g, u, o: (x, g.as_strided((24, 32), (40, 1)), u, o),
    "dtype": lambda x, g, u, o: (_halves(x), _halves(g), _halves(u), o.view(torch.float16)),
    "columns": lambda x, g, u, o: (x, g[:16], u[:16], o.as_strided((5, 16), (16, 1))),
    "up elsewhere": lambda x, g, u, o: (x, g, u.clone(), o),
    "gate and up swapped": lambda x, g, u, o: (x, u, g, o),
    "k": lambda x, g, u, o: (x[:, :16], g[:, :16], u[:, :16], o),
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_anything_else_at_the_same_address_is_bound_anew(only: Registered, change: Callable[..., tuple]) -> None:
    kernel = Addressed()
    only(kernel)
    # Room behind each, so that wider strides stay inside.
    x, gate, up, out = (torch.randn(3000).mul(0.3).bfloat16()[: a * b].view(a, b) for a, b in
                        ((5, 32), (24, 32), (24, 32), (5, 24)))  # fmt: skip
    swiglu(x, gate, up, out=out)
    x, gate, up, out = change(x, gate, up, out)
    assert_right(swiglu(x, gate, up, out=out), x, gate, up)
    assert kernel.counts.bound == 2


def test_one_stacked_tensor_is_not_taken_for_gate_alone(only: Registered) -> None:
    kernel = Addressed()
    only(kernel)
    x, gate, up = operands()
    stacked = torch.cat((gate, up))
    assert_right(swiglu(x, stacked), x, gate, up)
    both = torch.cat((stacked, stacked.flip(0)))
    assert_right(swiglu(x, both[:48], both[48:]), x, both[:48], both[48:])
    assert_right(swiglu(x, stacked[:24], stacked[24:]), x, gate, up)
    assert kernel.counts.bound == 3


def test_evicted_handles_are_released(only: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Addressed()
    only(kernel)
    monkeypatch.setattr(select, "_launches", Recent(4))
    _, gate, up = operands()
    xs = [torch.randn(5, 32).bfloat16() for _ in range(20)]
    out = torch.empty(5, 24, dtype=torch.bfloat16)
    for _ in range(2):
        for x in xs:
            assert_right(swiglu(x, gate, up, out=out), x, gate, up)
    gc.collect()
    assert kernel.counts.bound == 40
    assert 36 <= kernel.counts.released < 40
    select.forget()
    gc.collect()
    assert kernel.counts.released == 40


def test_a_kernel_without_handles_is_bound_at_each_call(only: Registered) -> None:
    only(FakeKernel("own.plain", good))
    x, gate, up = operands()
    for _ in range(2):
        assert_right(swiglu(x, gate, up), x, gate, up)
    assert len(select._launches) == 0
    assert len(select._sites) == 1


def test_threads(only: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at once compile once, and each gets its own result while handles come and go."""
    kernel = Addressed(takes_s=0.05)
    only(kernel)
    monkeypatch.setattr(select, "_launches", Recent(4))
    _, gate, up = operands()
    start, faults = threading.Barrier(8), []

    def work(seed: int) -> None:
        try:
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
            start.wait()
            for _ in range(20):
                assert_right(swiglu(x, gate, up), x, gate, up)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert kernel.counts.compiled == 1
    assert kernel.counts.launched == 160


def test_within_a_capture_nothing_is_chosen(only: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Addressed()
    only(kernel)
    x, gate, up = operands()
    monkeypatch.setattr(select, "_capturing", lambda device: True)
    for tune in (False, True):
        with pytest.raises(
            ArgumentError, match=r"^x: of shape \[5, 32\] comes for the first time .*; call swiglu once"
        ):
            swiglu(x, gate, up, tune=tune)
    assert kernel.counts.compiled == 0


def test_after_a_first_call_a_capture_may_bind_and_does_not_tune(
    only: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Addressed()
    only(kernel)
    x, gate, up = operands()
    swiglu(x, gate, up)
    monkeypatch.setattr(select, "_capturing", lambda device: True)
    monkeypatch.setattr("fused_swiglu.tune.search", lambda *_, **__: pytest.fail("tuned within a capture"))
    other = x.clone()
    assert_right(swiglu(other, gate, up, tune=True), x, gate, up)
    assert kernel.counts.compiled == 1


def test_recent_keeps_what_is_used() -> None:
    kept: Recent[int] = Recent(8)
    for i in range(1, 100):
        kept.put(i, i)
        assert kept.get(1) == 1
        assert kept.get(i) == i
        assert len(kept) <= 8
    assert [kept.get(i) for i in (98, 97, 50)] == [98, 97, None]
    kept.clear()
    assert kept.get(1) is None
    assert len(kept) == 0


# Shapes, and what is refused.


def test_leading_dimensions(only: Registered) -> None:
    only(Addressed())
    x, gate, up = operands(12)
    flat = swiglu(x, gate, up)
    assert_bits_equal(swiglu(x.view(3, 4, 32), gate, up), flat.view(3, 4, 24))
    assert_bits_equal(swiglu(x[0], gate, up), flat[0])
    assert swiglu(x.view(3, 4, 32)[:, :0], gate, up).shape == (3, 0, 24)
    padded = torch.full((3, 4, 40), torch.nan).bfloat16()
    out = padded[..., :24]
    assert swiglu(x.view(3, 4, 32), gate, up, out=out) is out
    assert_bits_equal(out, flat.view(3, 4, 24))
    assert padded[..., 24:].isnan().all()
    wide = torch.cat((x, x), 1)[:, :32]  # rows apart
    assert_bits_equal(swiglu(wide.view(3, 4, 32), gate, up), flat.view(3, 4, 24))


def bad_arguments(x: Tensor, gate: Tensor, up: Tensor) -> dict[str, dict[str, object]]:
    """How a message must start, and the arguments that it is about."""
    zeros = x.new_zeros(99)
    crossed = torch.cat((x, x))[:4].view(2, 2, 32).transpose(0, 1)
    return {
        "x: is of type list; give a dense": {"x": [1.0]},
        "w_up: is of type float; give a dense": {"w_up": 1.0},
        "x: has dtype torch.float32; convert it to bf16 or fp16": {"x": x.float()},
        "w_gate: has dtype torch.float16; convert it to x's": {"w_gate": gate.half()},
        "bias_up: has dtype torch.float32; convert": {"bias_up": gate[:, 0].float()},
        "w_up: is on meta, x on cpu; move": {"w_up": up.to("meta")},
        "w_gate: has column stride 32; call .contiguous()": {"w_gate": gate.T},
        "w_gate: has shape (24, 16); with these": {"w_gate": gate[:, :16].contiguous()},
        "w_up: has shape (8, 32); with these": {"w_up": up[:8]},
        "w_gate: has shape (32,); give a matrix": {"w_gate": gate[0]},
        "w_gate: has 5 rows and there is no w_up": {"w_gate": gate[:5], "w_up": None},
        "w_gate: has rows of 32 elements, 0 apart": {"w_gate": gate[:1].expand(24, 32)},
        "x: has column stride 2; call .contiguous()": {"x": x.repeat(1, 2)[:, ::2]},
        "x: of strides (32, 64, 1) does not flatten": {"x": crossed},
        "x: has no dimension": {"x": x[0, 0]},
        "out: has shape (5, 25); with these": {"out": x.new_empty(5, 25)},
        "out: has rows of 24 elements, 8 apart": {"out": zeros.as_strided((5, 24), (8, 1))},
        "preactivations: has shape (5, 24); with": {"preactivations": x.new_empty(5, 24)},
        "bias_up: is missing, and the other": {"bias_gate": zeros[:24]},
        "bias_gate: has shape (23,); with": {"bias_gate": zeros[:23], "bias_up": zeros[:24]},
        "bias_gate: has stride 2; call": {"bias_gate": zeros[:48:2], "bias_up": zeros[:24]},
        "bias_gate: starts at an address": {"bias_gate": zeros[1:25], "bias_up": zeros[:24]},
        "activation: unknown 'tanh'; choose from silu": {"activation": "tanh"},
        "arithmetic: cannot read 'ieee'; write": {"arithmetic": "ieee"},
        "arithmetic: undeclared:ieee:out leaves bits open": {"arithmetic": "undeclared:ieee:out"},
        "arithmetic: is of type NoneType; give": {"arithmetic": None},
    }


@pytest.mark.parametrize("message", bad_arguments(*operands()))
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "fallback"])
def test_what_does_not_fit_is_named_before_any_launch(
    only: Registered, monkeypatch: pytest.MonkeyPatch, message: str, kernels: bool
) -> None:
    kernel = Addressed(adds_bias=True, writes_preactivations=True)
    only(kernel)
    monkeypatch.setattr(select, "has_kernels", lambda device: kernels)
    x, gate, up = operands()
    with pytest.raises(ArgumentError) as caught:
        swiglu(**({"x": x, "w_gate": gate, "w_up": up} | bad_arguments(x, gate, up)[message]))  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
    assert (kernel.counts.compiled, kernel.counts.launched) == (0, 0)


# Where there are no kernels.


@pytest.mark.filterwarnings("ignore:swiglu runs by torch")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fallback_is_as_accurate_as_the_kernels(activation: str, dtype: str) -> None:
    problem = Problem(33, 40, 200, dtype=dtype, activation=activation, bias=True)
    inputs = make_inputs(problem, "normal", 3)
    x, weights = inputs.x, inputs.weights
    kept = torch.full((33, 80), torch.nan, dtype=x.dtype)
    out = swiglu(
        x, weights.gate, weights.up, activation=activation,
        bias_gate=weights.bias_gate, bias_up=weights.bias_up, preactivations=kept,
    )  # fmt: skip
    found = mismatch(out, exact(x, weights, activation, out_dtype=x.dtype))
    assert found.m1_max is not None
    assert found.m1_max <= 1
    assert found.m1_gt0 is not None
    assert found.m1_gt0 < 0.01
    for half, weight, bias in (
        (kept[:, :40], weights.gate, weights.bias_gate),
        (kept[:, 40:], weights.up, weights.bias_up),
    ):
        assert bias is not None
        torch.testing.assert_close(half.double(), x.double() @ weight.double().T + bias.double(), rtol=1e-2, atol=1e-5)


def test_what_is_written_may_not_overlap_what_is_read() -> None:
    """Tiles are written while others are still read; side by side in one matrix is apart."""
    together = torch.randn(4, 64 + 16 + 32).bfloat16()
    x, beside, kept, w = together[:, :64], together[:, 64:80], together[:, 80:], torch.randn(32, 64).bfloat16()
    apart = swiglu(x, w)
    assert_bits_equal(swiglu(x, w, out=beside, preactivations=kept), apart)
    for out in (x[:, :16], together[:, 56:72], w[:4, :16], together.view(-1)[8:72].view(4, 16)):
        with pytest.raises(ArgumentError, match=r"out: overlaps (x|w_gate) in memory"):
            swiglu(x, w, out=out)
    with pytest.raises(ArgumentError, match="preactivations: overlaps out in memory"):
        swiglu(x, w, out=beside, preactivations=together[:, 70:102])


def test_autocast_does_not_reach_into_the_fallback() -> None:
    x, gate, up = (torch.randn(rows, 64, dtype=torch.bfloat16) for rows in (3, 8, 8))
    plain = fallback(x, Weights(gate, up))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bits_equal(fallback(x, Weights(gate, up)), plain)


def test_fallback_in_fp64_keeps_fp64() -> None:
    x, gate, up = (t.double() for t in operands())
    torch.testing.assert_close(
        fallback(x, Weights(gate, up)), torch.nn.functional.silu(x @ gate.T) * (x @ up.T), rtol=1e-14, atol=1e-15
    )


def test_the_notice_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_said", set())
    with pytest.warns(UserWarning, match="by torch on a cpu: accurate, but its bits are those of no declared") as seen:
        swiglu(*operands())
    assert [Path(w.filename).name for w in seen] == ["test_select.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swiglu(*operands(6))


@pytest.mark.filterwarnings("ignore:swiglu runs by torch")
def test_no_gradient_flows() -> None:
    x, gate, up = operands()
    out = swiglu(x.requires_grad_(), gate.requires_grad_(), up)
    assert not out.requires_grad
