"""Every kernel that runs on a CPU, at the shapes, strides and values where kernels fail."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Arithmetic, Operands, Problem, Weights, get_kernel, problem_of
from fused_swiglu.bounds import error_bound, within_bound
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.reference import exact, twin
from fused_swiglu.testing import assert_bits_equal, families, problems, seeds

CPU = torch.device("cpu")
KERNELS = ("torch.eager", "torch.concat", "triton.fused", "triton.unfused")


def run(name: str, problem: Problem, inputs, config=None, arithmetic: Arithmetic | None = None):
    """The kernel's output, poisoned beforehand, and what it declared."""
    kernel = get_kernel(name)
    default = next(iter(kernel.defaults(problem, CPU)))
    config, arithmetic = config or default[0], arithmetic or default[1]
    assert kernel.why_not(problem, config, arithmetic, CPU) is None
    out = make_out(problem, kernel.output_shape(problem))
    compiled = kernel.compile(problem, config, arithmetic, CPU)
    operands = Operands(inputs.x, kernel.prepare(inputs.weights, problem, config), out)
    return compiled.bind(operands).run(), compiled


@pytest.mark.parametrize("name", KERNELS)
@given(data=st.data(), problem=problems(max_m=129, max_n=129, max_k=160), family=families(), seed=seeds())
def test_every_output_is_within_the_rounding_that_the_kernel_declares(name, data, problem, family, seed):
    inputs = make_inputs(problem, family, seed)
    arithmetic = data.draw(st.sampled_from(list(get_kernel(name).arithmetics(problem))))
    check_bound(*run(name, problem, inputs, arithmetic=arithmetic), problem, inputs)


def check_bound(out, compiled, problem, inputs):
    wanted = exact(inputs.x, inputs.weights, problem.activation, out_dtype=out.dtype)
    bound = error_bound(
        inputs.x,
        inputs.weights,
        problem.activation,
        rounds=compiled.arithmetic.rounds,
        recipe=compiled.arithmetic.recipe,
    )
    assert bool(within_bound(out, wanted.value, bound).all())


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
@given(
    data=st.data(),
    problem=problems(max_m=40, max_n=40, max_k=70, activations=("gelu_tanh", "relu", "sigmoid")),
    family=families(),
    seed=seeds(),
)
def test_the_other_activations(name, data, problem, family, seed):
    inputs = make_inputs(problem, family, seed)
    arithmetic = data.draw(st.sampled_from(list(get_kernel(name).arithmetics(problem))))
    check_bound(*run(name, problem, inputs, arithmetic=arithmetic), problem, inputs)


@given(problem=problems(max_m=70, max_n=70, max_k=160), seed=seeds())
def test_the_bare_gemm_of_small_integers_is_exact(problem, seed):
    inputs = make_inputs(problem, "integers", seed)
    out, _ = run("cublas.gemm", problem, inputs)
    wanted = exact(inputs.x, inputs.weights, out_dtype=out.dtype, computes="gate_up")
    assert torch.equal(out, wanted.rounded)  # but for the sign of zero: one product of -1 and 0 is -0, a sum is 0


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
@given(data=st.data(), problem=problems(max_m=129, max_n=129, max_k=70), seed=seeds())
def test_every_config_agrees_with_the_twin_on_small_integers(name, data, problem, seed):
    """All sums are exact, so that only the activation is left to differ: by less than an ulp of the output."""
    kernel = get_kernel(name)
    config = data.draw(st.sampled_from(list(kernel.configs(problem))))
    arithmetic = data.draw(st.sampled_from([a for a in kernel.arithmetics(problem) if a.recipe in ("ieee", "ex2")]))
    inputs = make_inputs(problem, "integers", seed)
    out, compiled = run(name, problem, inputs, config, arithmetic)
    wanted = twin(inputs.x, inputs.weights, problem.activation, rounds=compiled.arithmetic.rounds)
    torch.testing.assert_close(out, wanted, rtol=torch.finfo(out.dtype).eps, atol=1e-30)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_outputs_are_the_twins_but_for_ties(name, dtype):
    """A truncating store, or a rounding that is not declared, would change a third of them or more."""
    problem = Problem(64, 96, 128, dtype=dtype)
    inputs = make_inputs(problem, "normal", 4)
    out, compiled = run(name, problem, inputs)
    wanted = twin(inputs.x, inputs.weights, problem.activation, rounds=compiled.arithmetic.rounds)
    assert float((out != wanted).float().mean()) < 0.01


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default):
    problem = Problem(20, 24, 32)
    wanted = make_inputs(problem, "normal", 4)
    out, _ = run("triton.fused", problem, wanted)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        inputs = make_inputs(problem, "normal", 4)
        again, _ = run("triton.fused", problem, inputs)
    finally:
        torch.set_default_dtype(before)
    assert_bits_equal(inputs.x, wanted.x)
    assert_bits_equal(again, out)


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
def test_single_rows_of_stacked_weights_with_padding(name):
    padded = torch.full((2, 24), torch.nan, dtype=torch.bfloat16)[:, :16]
    padded.copy_(torch.randn(2, 16, generator=torch.Generator().manual_seed(0)))
    x = torch.ones(3, 16).bfloat16()
    weights = Weights.from_stacked(padded)
    problem = problem_of(x, weights)
    assert problem.gate_stride == 24
    out, compiled = run(name, problem, type(make_inputs(problem, "normal", 0))(x, weights))
    check_bound(out, compiled, problem, type(make_inputs(problem, "normal", 0))(x, weights))


@pytest.mark.parametrize("change", ["memory=disk", "group=0", "warps=3", "stages=0", "bm=100", "bm=512"])
def test_configs_that_no_gpu_could_run_are_refused(change):
    kernel, problem = get_kernel("triton.fused"), Problem(8, 16, 16)
    config, arithmetic = next(iter(kernel.defaults(problem, CPU)))
    pairs = dict(pair.split("=") for pair in str(config).split(",")) | dict([change.split("=")])
    wrong = kernel.config_type.parse(",".join(f"{name}={value}" for name, value in pairs.items()))
    assert "takes" in (kernel.why_not(problem, wrong, arithmetic, CPU) or "")


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
def test_an_output_that_encodes_its_column_comes_out_in_its_column(name):
    """up = column + 1, gate large enough that silu is the identity: gate/up swaps and shifted stores show."""
    problem = Problem(70, 200, 16, layout="separate")
    inputs = make_inputs(problem, "integers", 0)
    inputs.x.zero_()
    inputs.x[:, 0] = 1
    inputs.weights.gate.zero_()
    inputs.weights.gate[:, 0] = 64
    inputs.weights.up.zero_()
    inputs.weights.up[:, 0] = torch.arange(1, 201)
    out, _ = run(name, problem, inputs)
    assert_bits_equal(out, (64 * torch.arange(1, 201)).bfloat16().expand(70, 200).contiguous())


@pytest.mark.parametrize("name", KERNELS)
def test_gate_and_up_are_not_swapped(name):
    problem = Problem(1, 1, 1)
    inputs = make_inputs(problem, "integers", 0)
    inputs.x.fill_(1)
    inputs.weights.gate.fill_(1)
    inputs.weights.up.fill_(-1)
    out, _ = run(name, problem, inputs)
    assert float(out) == pytest.approx(-0.7310585786, rel=4e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_nan_and_infinity_reach_their_own_rows_and_columns_only(name):
    problem = Problem(67, 66, 64)
    inputs = make_inputs(problem, "normal", 3)
    inputs.x[5, 7] = torch.nan
    inputs.weights.gate[3, 11] = torch.inf
    inputs.weights.up[64, 2] = torch.nan
    out, _ = run(name, problem, inputs)
    wanted = exact(inputs.x, inputs.weights, out_dtype=out.dtype).rounded
    assert bool((out.isnan() == wanted.isnan()).all())
    assert bool((out.isfinite() == wanted.isfinite()).all())
    assert bool(wanted[5].isnan().all())
    assert bool(wanted[0].isfinite().sum() == 64)


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
@pytest.mark.parametrize("recipe", ["ieee", "ex2"])
@pytest.mark.parametrize("gate", [-87.5, -88.0, -88.5, 89.0, -8.0, -120.0, -0.0])
def test_the_tails_of_silu(name, recipe, gate):
    """A fast division loses -87.5, exp/(1+exp) loses 89, 1 - sigmoid in bf16 loses -8."""
    problem = Problem(1, 1, 2)
    inputs = make_inputs(problem, "integers", 0)
    inputs.x.copy_(torch.tensor([[gate, 2.0**50]]))
    inputs.weights.gate.copy_(torch.tensor([[1.0, 0.0]]))
    inputs.weights.up.copy_(torch.tensor([[0.0, 2.0**50]]))
    kernel = get_kernel(name)
    arithmetic = next(a for a in kernel.arithmetics(problem) if a.recipe == recipe)
    out, _ = run(name, problem, inputs, arithmetic=arithmetic)
    wanted = exact(inputs.x, inputs.weights, out_dtype=out.dtype).rounded
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=2.0**-50)


@pytest.mark.parametrize("name", [*KERNELS, "cublas.gemm"])
def test_no_rows(name):
    problem = Problem(0, 24, 16)
    out, _ = run(name, problem, make_inputs(problem, "normal", 0))
    assert out.shape[0] == 0


def test_torch_compile_rounds_where_it_says():
    """Inductor keeps the activated gate in fp32, and rounds it when told to emulate eager's casts."""
    problem = Problem(33, 40, 48)
    inputs = make_inputs(problem, "integers", 1)
    kernel = get_kernel("torch.compile")
    config = next(iter(kernel.configs(problem)))
    outputs = []
    for arithmetic in kernel.arithmetics(problem):
        if reason := kernel.why_not(problem, config, arithmetic, CPU):
            pytest.skip(reason)
        out, compiled = run("torch.compile", problem, inputs, config, arithmetic)
        wanted = twin(inputs.x, inputs.weights, rounds=compiled.arithmetic.rounds)
        assert float((out != wanted).float().mean()) < 0.01
        outputs.append(out)
    assert float((outputs[0] != outputs[1]).float().mean()) > 0.05


def test_reasons_name_what_is_missing(monkeypatch):
    problem = Problem(8, 16, 16)
    kernel = get_kernel("torch.compile")
    reasons = [kernel.why_not(problem, config, arithmetic, CPU) for config, arithmetic in kernel.defaults(problem, CPU)]
    assert [r for r in reasons if r and "only mode=default" in r] == ["on a CPU only mode=default runs"] * 3
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    config, arithmetic = next(iter(kernel.defaults(problem, CPU)))
    assert "C++ compiler" in (kernel.why_not(problem, config, arithmetic, CPU) or "")

    fused = get_kernel("triton.fused")
    odd = Problem(8, 15, 17)
    config, arithmetic = next(iter(fused.defaults(odd, CPU)))
    assert fused.why_not(odd, config, arithmetic, CPU) is None
    wrong = fused.config_type.parse(str(config).replace("memory=pointer", "memory=tma"))
    assert "aligned to 16 bytes" in (fused.why_not(odd, wrong, arithmetic, CPU) or "")
    for field, value in (
        ("bias", True),
        ("dtype", "fp32"),
        ("outputs", ("out", "preactivations")),
    ):
        other = Problem(8, 16, 16, **{field: value})
        assert fused.why_not(other, config, arithmetic, CPU)


@pytest.mark.parametrize("name", ["triton.fused", "triton.unfused"])
@pytest.mark.parametrize(
    ("operand", "change"),
    [
        ("x", lambda t: t.float()),
        ("x", lambda t: t[:, :-1]),
        ("x", lambda t: t.T.contiguous().T),
        ("w_gate", lambda t: torch.cat((t, t))[::2]),
        ("w_up", lambda t: t[1:]),
        ("out", lambda t: torch.empty(8, 48, dtype=t.dtype)[:, :24]),
        ("operands", lambda t: torch.empty(8 * 24 + 1, dtype=t.dtype)[1:].view(8, 24)),
    ],
)
def test_operands_that_do_not_fit_are_named_before_any_launch(name, operand, change):
    problem = Problem(8, 24, 16)
    inputs, out = make_inputs(problem, "normal", 0), make_out(problem)
    tensors = {"x": inputs.x, "w_gate": inputs.weights.gate, "w_up": inputs.weights.up, "out": out}
    changed = "out" if operand == "operands" else operand
    tensors[changed] = change(tensors[changed])
    kernel = get_kernel(name)
    config, arithmetic = next(iter(kernel.defaults(problem, CPU)))
    compiled = kernel.compile(problem, config, arithmetic, CPU)
    with pytest.raises(ArgumentError, match=f"^{operand}: "):
        compiled.bind(Operands(tensors["x"], Weights(tensors["w_gate"], tensors["w_up"]), tensors["out"]))
