"""Input families: what each promises, in every layout, stride and alignment; poison between rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Problem, inputs, problem_of
from fused_swiglu.inputs import FAMILIES, make_inputs, make_out
from fused_swiglu.reference import exact, twin
from fused_swiglu.testing import assert_bits_equal, families, problems, seeds


def parts(made):
    w = made.weights
    return {"x": made.x, "gate": w.gate, "up": w.up, "bias_gate": w.bias_gate, "bias_up": w.bias_up}


@settings(deadline=None, max_examples=80)
@given(problems(max_m=5, max_n=9, max_k=40, min_m=0, bias=True), families(), seeds())
def test_inputs_pose_the_problem_they_are_for(problem, family, seed):
    made = make_inputs(problem, family, seed)
    out = make_out(problem)
    assert_same_problem(problem, problem_of(made.x, made.weights, out))
    for tensor in (made.x, made.weights.gate, made.weights.up):
        assert tensor.isfinite().all()
    assert (made.weights.bias_gate is not None) == (made.weights.bias_up is not None) == problem.bias
    if problem.bias:
        assert made.weights.bias_gate.shape == (problem.n,)


def assert_same_problem(wanted, posed):
    for field in ("m", "n", "k", "dtype", "weight_dtype", "out_dtype", "layout", "bias"):
        assert getattr(posed, field) == getattr(wanted, field), field
    if wanted.m > 1 and wanted.n > 1:
        assert posed.row_alignment == wanted.row_alignment
    for field, rows in (("x_stride", "m"), ("gate_stride", "n"), ("up_stride", "n"), ("out_stride", "m")):
        if getattr(wanted, rows) > 1:  # the distance between rows is not seen in one row
            assert getattr(posed, field) == getattr(wanted, field), field


@settings(deadline=None, max_examples=40)
@given(problems(max_m=5, max_n=9, max_k=40, dtypes=("bf16",), bias=True), families(), seeds())
def test_values_depend_on_shape_family_and_seed_alone(problem, family, seed):
    made = parts(make_inputs(problem, family, seed))
    state = torch.get_rng_state()
    plain = parts(make_inputs(Problem(problem.m, problem.n, problem.k, bias=problem.bias), family, seed))
    assert torch.equal(torch.get_rng_state(), state)
    more = parts(make_inputs(Problem(problem.m + 7, problem.n, problem.k, bias=problem.bias), family, seed))
    for name, tensor in made.items():
        if tensor is not None:
            assert_bits_equal(tensor, plain[name])
            if name != "x":
                assert_bits_equal(tensor, more[name])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_seeds_and_tensors_differ(family):
    problem = Problem(20, 20, 64, bias=True)
    first, second = (parts(make_inputs(problem, family, seed)) for seed in (0, 1))
    drawn = [*first.values(), *second.values()]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert a.shape != b.shape or not torch.equal(a, b)


def test_padding_is_nan_and_stays_out_of_the_values():
    problem = Problem(3, 4, 5, layout="separate", x_stride=9, gate_stride=6, up_stride=13, out_stride=7)
    made, out = make_inputs(problem, "normal", 0), make_out(problem)
    for tensor, stride in ((made.x, 9), (made.weights.gate, 6), (made.weights.up, 13), (out, 7)):
        rows, columns = tensor.shape
        whole = tensor.as_strided((rows, stride), (stride, 1))
        assert whole[:, columns:].isnan().all()
        assert whole[:, columns:].numel() == rows * (stride - columns) > 0
    assert out.isnan().all()


def test_layouts():
    stacked = make_inputs(Problem(2, 3, 5, gate_stride=8, up_stride=8), "normal", 0).weights
    assert stacked.stacked is not None
    assert_bits_equal(stacked.stacked, torch.cat([stacked.gate, stacked.up]))
    separate = make_inputs(Problem(2, 3, 5, layout="separate"), "normal", 0).weights
    assert separate.stacked is None
    assert separate.gate.untyped_storage().data_ptr() != separate.up.untyped_storage().data_ptr()


@pytest.mark.parametrize("alignment", [16, 8, 4, 2])
def test_alignment_is_that_and_no_more(alignment):
    problem = Problem(4, 8, 8, layout="separate", alignment=alignment)
    made, out = make_inputs(problem, "normal", 0), make_out(problem)
    for tensor in (made.x, made.weights.gate, made.weights.up, out):
        assert tensor.data_ptr() % alignment == 0
        assert alignment == 16 or tensor.data_ptr() % (2 * alignment)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_normal(dtype):
    made = make_inputs(Problem(200, 300, 400, dtype=dtype), "normal", 0)
    for tensor, sigma in ((made.x, 1), (made.weights.gate, 0.02), (made.weights.up, 0.02)):
        values = tensor.double() / sigma
        assert abs(values.mean()) < 0.02
        assert abs(values.std() - 1) < 0.01
        assert abs(values.pow(4).mean() - 3) < 0.15
        assert values.abs().max() > 4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_outliers(dtype):
    made = make_inputs(Problem(2048, 64, 1536, dtype=dtype), "outliers", 0)
    x = made.x.double()
    size = x.abs().median(0).values / 0.6745  # of each channel, massive tokens aside
    assert ((size > 25) & (size < 120)).sum() == 3
    assert (size < 1.2).sum() == 1536 - 3
    channel = x[:, size.argmax()].abs() / size.max()
    assert 0 < (channel > 6).double().mean() < 1 / 40
    weights = torch.cat([made.weights.gate, made.weights.up]).double() / 0.02
    assert abs(weights.std() - 1) < 0.02
    assert 3.4 < weights.pow(4).mean() / weights.var() ** 2 < 4.4
    again = make_inputs(Problem(64, 64, 1536, dtype=dtype), "outliers", 0).x.double().abs().median(0).values
    assert again.argmax() == size.argmax()
    assert exact(made.x[:256], made.weights, out_dtype=made.x.dtype).rounded.isfinite().all()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 700) | st.just(8192), st.booleans(), seeds())
def test_integers_stay_exact_in_bf16(k, bias, seed):
    made = make_inputs(Problem(4, 16, k, bias=bias), "integers", seed)
    x, w = made.x.double(), made.weights
    for matrix, extra in ((w.gate, w.bias_gate), (w.up, w.bias_up)):
        assert torch.equal(matrix.double(), matrix.double().round())
        most = x.abs() @ matrix.double().abs().T + (0 if extra is None else extra.double().abs())
        assert most.max() < 256  # so every partial sum, in any order
    assert torch.equal(x, x.round())


@pytest.mark.parametrize("k", [1, 16, 252, 253, 896, 8192])
def test_integers_notice_every_column(k):
    made = make_inputs(Problem(64, 400, k), "integers", 0)
    x, w = made.x.double(), made.weights
    sums = x @ w.gate.double().T
    if k < 8192:
        assert (made.x != 0).any(0).all()
        assert (torch.cat([w.gate, w.up]) != 0).any(0).all()
    assert (sums != 0).double().mean() > 0.6
    assert len(sums.unique()) > 8
    tail = min(k, 16)
    short = x[:, : k - tail] @ w.gate[:, : k - tail].double().T
    assert (sums != short).double().mean() > 0.15


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["bf16", "fp16"]), st.integers(1, 400) | st.just(29568), st.booleans(), seeds())
def test_wide_never_overflows(dtype, k, bias, seed):
    problem = Problem(4, 8, k, dtype=dtype, bias=bias)
    made = make_inputs(problem, "wide", seed)
    x, w = made.x.double(), made.weights
    gate, up = (m.double().abs() for m in (w.gate, w.up))
    most = (x.abs() @ gate.T) * (x.abs() @ up.T)
    assert most.max() < torch.finfo(made.x.dtype).max
    assert twin(made.x, w).isfinite().all()


@pytest.mark.parametrize(("dtype", "octaves"), [("bf16", 32), ("fp16", 12)])
def test_wide_is_wide(dtype, octaves):
    made = make_inputs(Problem(64, 256, 128, dtype=dtype), "wide", 0)
    for tensor in (made.x, made.weights.gate, made.weights.up):
        exponents = tensor.double().abs().log2().floor()
        assert octaves - 2 <= exponents.max() - exponents.min() <= octaves + 1
        assert 0.45 < (tensor > 0).double().mean() < 0.55


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("k", [16, 128, 896, 8192])
def test_wide_gates_lie_where_the_activation_bends(dtype, k):
    made = make_inputs(Problem(32, 64, k, dtype=dtype), "wide", 0)
    gate = (made.x.double() @ made.weights.gate.double().T).abs()
    assert ((gate > 0.5) & (gate < 16)).double().mean() > 0.25
    assert gate.max() < 200


def test_several_steps_fill_a_matrix(monkeypatch):
    """Several steps fill a matrix with no row left out and none drawn twice."""
    monkeypatch.setattr(inputs, "_CHUNK", 100)
    for family in FAMILIES:
        x = make_inputs(Problem(7, 5, 30), family, 0).x
        assert x.isfinite().all()
        assert len({tuple(row) for row in x.tolist()}) == 7


def test_make_out():
    problem = Problem(3, 5, 8, dtype="fp16", out_stride=9)
    out = make_out(problem)
    assert (out.shape, out.stride(), out.dtype) == ((3, 5), (9, 1), torch.float16)
    both = make_out(problem, (3, 10))
    assert (both.shape, both.stride()) == ((3, 10), (14, 1))
    assert both.isnan().all()
    assert make_out(problem, poison=False).shape == (3, 5)
    assert make_out(Problem(0, 5, 8)).shape == (0, 5)
    assert make_out(Problem(1, 5, 8, dtype="bf16", out_dtype="fp32")).dtype == torch.float32


def test_bad_arguments():
    problem = Problem(2, 3, 4)
    for arguments, match in (
        ((problem, "uniform", 0), "unknown 'uniform'; choose from normal"),
        ((Problem(2, 3, 4, dtype="fp32"), "normal", 0), "dtype"),
        ((Problem(2, 3, 4, weight_dtype="fp8_e4m3"), "normal", 0), "weight_dtype"),
        ((Problem(2, 3, 4, gate_stride=8), "normal", 0), "up_stride"),
        ((Problem(2, 3, 4, scaling="row"), "normal", 0), "scaling"),
        ((problem, "normal", -1), "seed"),
    ):
        with pytest.raises(ArgumentError, match=match):
            make_inputs(*arguments)


def test_families_are_described():
    assert len(FAMILIES) == 4
    assert all(description and "\n" not in description for description in FAMILIES.values())
