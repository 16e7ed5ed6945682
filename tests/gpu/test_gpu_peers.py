"""Other projects' kernels on the GPU, where their packages are installed: right, capturable, on the current stream."""

import pytest
import torch
from launched import captured_and_replayed, goes_to_the_current_stream

from fused_swiglu import DTYPES, Arithmetic, Operands, Problem, get_kernel
from fused_swiglu.bounds import error_bound, within_bound
from fused_swiglu.check import executor
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.numerics import mismatch
from fused_swiglu.peers.quack import GatedConfig
from fused_swiglu.reference import exact
from fused_swiglu.testing import assert_bits_equal, assert_padding_poisoned

DEVICE = torch.device("cuda", 0)
QUICK = [GatedConfig(), GatedConfig(store_preact=True)]
VARIANTS = [("quack.gated", config) for config in QUICK] + [("liger.silu_mul", None), ("flashinfer.silu_mul", None)]
IDS = ["quack.gated", "quack.gated preact", "liger.silu_mul", "flashinfer.silu_mul"]
variants = pytest.mark.parametrize(("name", "config"), VARIANTS, ids=IDS)
# Shares of outputs with M1 > 0 and M1 > 1 on normal inputs, by what is rounded: at most, and not much less.
EXPECTED = {(): (0.005, 0.0005), ("gate", "up"): (0.40, 0.01), ("gate", "up", "act"): (0.47, 0.03)}


def bind(name, config, problem, inputs):
    kernel = get_kernel(name)
    default, arithmetic = next(iter(kernel.defaults(problem, DEVICE)))
    config = config or default
    if reason := kernel.why_not(problem, config, arithmetic, DEVICE):
        pytest.skip(f"{name}: {reason}")
    compiled = kernel.compile(problem, config, arithmetic, DEVICE)
    out = make_out(problem, device=DEVICE)
    return compiled.bind(Operands(inputs.x, kernel.prepare(inputs.weights, problem, config), out)), compiled.arithmetic


@variants
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("m", [1, 64, 1000])
def test_outputs_are_as_near_to_the_exact_result_as_their_roundings_let_them_be(name, config, m, dtype):
    problem = Problem(m, 1032, 896, dtype=dtype)
    inputs = make_inputs(problem, "normal", 1, DEVICE)
    bound, arithmetic = bind(name, config, problem, inputs)
    out = bound.run()
    wanted = exact(inputs.x, inputs.weights, out_dtype=out.dtype)
    limit = error_bound(inputs.x, inputs.weights, rounds=arithmetic.rounds)
    assert bool(within_bound(out, wanted.value, limit).all())
    found, (most, far) = mismatch(out, wanted), EXPECTED[arithmetic.rounds]
    if dtype == "bf16" and m == 1000:  # fp16 has fewer bits to lose between fp32 and itself, one row few outputs
        assert found.m1_gt0 <= most
        assert found.m1_gt1 <= far
        assert not arithmetic.rounds or found.m1_gt0 >= 0.25


@pytest.mark.parametrize("config", QUICK, ids=str)
def test_away_from_the_tail_quack_has_the_bits_of_the_recipe_ex2(config):
    problem = Problem(130, 264, 896)
    inputs = make_inputs(problem, "normal", 6, DEVICE)
    out = bind("quack.gated", config, problem, inputs)[0].run()
    predict = executor("cuda")
    assert predict is not None
    assert_bits_equal(out, predict(Arithmetic("sm90", "ex2"), inputs.x, inputs.weights, "silu", out_dtype=out.dtype))


@pytest.mark.parametrize("config", QUICK, ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh", "sigmoid"])
def test_other_activations_of_quack(activation, config):
    problem = Problem(130, 264, 192, activation=activation)
    inputs = make_inputs(problem, "normal", 2, DEVICE)
    out = bind("quack.gated", config, problem, inputs)[0].run()
    limit = error_bound(inputs.x, inputs.weights, activation, recipe="tanh")  # its gelu uses tanh.approx
    wanted = exact(inputs.x, inputs.weights, activation, out_dtype=out.dtype)
    assert bool(within_bound(out, wanted.value, limit).all())


def test_quack_reads_and_writes_padded_rows():
    problem = Problem(130, 264, 192, x_stride=200, out_stride=280, layout="separate", gate_stride=193, up_stride=195)
    inputs = make_inputs(problem, "integers", 3, DEVICE)
    bound, _ = bind("quack.gated", None, problem, inputs)
    out = bound.run()
    assert_padding_poisoned(out)
    wanted = exact(inputs.x, inputs.weights, out_dtype=out.dtype)
    assert mismatch(out, wanted).m1_gt1 == 0


def test_the_pre_activations_of_quack():
    problem = Problem(130, 264, 192)
    inputs = make_inputs(problem, "integers", 4, DEVICE)
    bound, _ = bind("quack.gated", GatedConfig(store_preact=True), problem, inputs)
    bound.run()
    for first, weight in enumerate((inputs.weights.gate, inputs.weights.up)):
        wanted = (inputs.x.double() @ weight.double().T).to(DTYPES[problem.dtype])
        assert_bits_equal(bound.options["preact_out"][:, first::2], wanted)


@variants
def test_capture_and_replay(name, config):
    problem = Problem(130, 256, 192)
    captured_and_replayed(problem, lambda inputs: bind(name, config, problem, inputs)[0], DEVICE, times=20)


@variants
def test_a_launch_goes_to_the_current_stream(name, config):
    problem = Problem(64, 128, 64)
    goes_to_the_current_stream(problem, lambda inputs: bind(name, config, problem, inputs)[0], DEVICE)


def test_tuned_and_default_give_the_same_bits():
    """One chain over k: no tile may show in the output. And tuning is over once it is bound: a run can be captured."""
    problem, tuned = Problem(512, 1024, 896), GatedConfig(tuned=True)
    inputs = make_inputs(problem, "normal", 5, DEVICE)
    assert_bits_equal(*(bind("quack.gated", config, problem, inputs)[0].run() for config in (tuned, GatedConfig())))
    captured_and_replayed(problem, lambda inputs: bind("quack.gated", tuned, problem, inputs)[0], DEVICE, times=5)
