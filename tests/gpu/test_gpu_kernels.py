"""Every kernel, config and arithmetic on the GPU, at the shapes, strides and values where kernels fail."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launched import captured_and_replayed, goes_to_the_current_stream

from fused_swiglu import Operands, Problem, get_kernel
from fused_swiglu.bounds import error_bound, within_bound
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.reference import exact
from fused_swiglu.testing import assert_bits_equal, assert_padding_poisoned, families, problems, seeds

DEVICE = torch.device("cuda", 0)
TRITON = ("triton.fused", "triton.unfused")
KERNELS = ("torch.eager", "torch.concat", *TRITON)


def bind(name, problem, inputs, config=None, arithmetic=None):
    kernel = get_kernel(name)
    default = next(iter(kernel.defaults(problem, DEVICE)))
    config, arithmetic = config or default[0], arithmetic or default[1]
    assert kernel.why_not(problem, config, arithmetic, DEVICE) is None
    out = make_out(problem, kernel.output_shape(problem), device=DEVICE)
    compiled = kernel.compile(problem, config, arithmetic, DEVICE)
    return compiled.bind(Operands(inputs.x, kernel.prepare(inputs.weights, problem, config), out)), compiled


@pytest.mark.parametrize("name", KERNELS)
@given(data=st.data(), problem=problems(max_m=300, max_n=300, max_k=600), family=families(), seed=seeds())
def test_every_output_is_within_the_rounding_that_the_kernel_declares(name, data, problem, family, seed):
    inputs = make_inputs(problem, family, seed, DEVICE)
    kernel = get_kernel(name)
    config = data.draw(st.sampled_from(list(kernel.configs(problem))))
    arithmetic = data.draw(st.sampled_from(list(kernel.arithmetics(problem))))
    bound, compiled = bind(name, problem, inputs, config, arithmetic)
    out = bound.run()
    wanted = exact(inputs.x, inputs.weights, problem.activation, out_dtype=out.dtype)
    limit = error_bound(
        inputs.x,
        inputs.weights,
        problem.activation,
        rounds=compiled.arithmetic.rounds,
        recipe=compiled.arithmetic.recipe,
    )
    assert bool(within_bound(out, wanted.value, limit).all())
    assert_padding_poisoned(out)


@pytest.mark.parametrize("name", TRITON)
@given(problem=problems(max_m=300, max_n=300, max_k=600), family=families(), seed=seeds())
def test_all_configs_give_the_same_bits(name, problem, family, seed):
    """One declared arithmetic, one chain over k: no tile and no memory path may show in the output."""
    inputs = make_inputs(problem, family, seed, DEVICE)
    kernel = get_kernel(name)
    for arithmetic in kernel.arithmetics(problem):
        outs = [bind(name, problem, inputs, config, arithmetic)[0].run() for config in kernel.configs(problem)]
        for out in outs[1:]:
            assert_bits_equal(out, outs[0])


@pytest.mark.parametrize("name", TRITON)
@given(problem=problems(min_m=2, max_m=300, max_n=300, max_k=300), seed=seeds())
def test_a_row_does_not_depend_on_its_batch(name, problem, seed):
    inputs = make_inputs(problem, "normal", seed, DEVICE)
    whole = bind(name, problem, inputs)[0].run()
    strides = {name: getattr(problem, name) for name in ("x_stride", "gate_stride", "up_stride")}
    alone = Problem(1, problem.n, problem.k, dtype=problem.dtype, layout=problem.layout, alignment=2, **strides)
    row = type(inputs)(inputs.x[-1:], inputs.weights)
    assert_bits_equal(bind(name, alone, row)[0].run(), whole[-1:])


@pytest.mark.parametrize("name", TRITON)
def test_capture_and_replay(name):
    problem = Problem(130, 256, 192)
    captured_and_replayed(problem, lambda inputs: bind(name, problem, inputs)[0], DEVICE, times=100)


@pytest.mark.parametrize("name", TRITON)
def test_a_launch_goes_to_the_current_stream(name):
    problem = Problem(64, 128, 64)
    goes_to_the_current_stream(problem, lambda inputs: bind(name, problem, inputs)[0], DEVICE)


def test_offsets_beyond_32_bits():
    """m * n >= 2^31: a store with a 32-bit offset would wrap."""
    problem = Problem(131_073, 16_384, 16)
    inputs = make_inputs(problem, "integers", 0, DEVICE)
    last = exact(inputs.x, inputs.weights, out_dtype=torch.bfloat16, rows=[problem.m - 1, 0])
    kernel = get_kernel("triton.fused")
    for config in list(kernel.configs(problem))[:1]:
        for memory in ("tma", "pointer"):
            chosen = type(config).parse(str(config).replace("memory=tma", f"memory={memory}"))
            out = bind("triton.fused", problem, inputs, chosen)[0].run()
            assert int(out.isnan().sum()) == 0
            torch.testing.assert_close(out[[problem.m - 1, 0]], last.rounded, rtol=8e-3, atol=1e-30)


def test_the_reference_gives_the_same_bits_as_on_a_cpu():
    problem = Problem(33, 40, 200)
    inputs = make_inputs(problem, "outliers", 5)
    here = exact(inputs.x, inputs.weights, out_dtype=torch.bfloat16)
    weights = type(inputs.weights)(inputs.weights.gate.to(DEVICE), inputs.weights.up.to(DEVICE))
    there = exact(inputs.x.to(DEVICE), weights, out_dtype=torch.bfloat16)
    assert_bits_equal(there.rounded.cpu(), here.rounded)
