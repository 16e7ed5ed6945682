"""The CUTLASS kernels on the GPU: every geometry against the model, to the bit; options pairwise; streams, graphs."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import cycle, product

import pytest
import torch

from fused_swiglu import Arithmetic, Operands, Problem, Weights, get_kernel
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.testing import assert_bits_equal, assert_padding_poisoned

pytest.importorskip("tvm_ffi")
from launched import captured_and_replayed, goes_to_the_current_stream
from prebuilt import prebuild

from cutlass_kernels import toolchain
from triton_baselines.model import accumulate, execute

DEVICE = torch.device("cuda", 0)
FUSED = ("cutlass.pingpong", "cutlass.evt", "cutlass.interleaved", "cutlass.decode")
NAMES = (*FUSED, "cutlass.gemm")
IEEE = Arithmetic("sm90", "ieee")
GEOMETRIES = [(name, config) for name in NAMES for config in get_kernel(name).table()]
SMALL = Problem(200, 328, 136)


def arithmetic_of(name):
    return Arithmetic("sm90", "none") if name == "cutlass.gemm" else IEEE


def bind(name, problem, inputs, config=None, arithmetic=None, preactivations=None):
    kernel = get_kernel(name)
    config, arithmetic = config or kernel.table()[0], arithmetic or arithmetic_of(name)
    assert kernel.why_not(problem, config, arithmetic, DEVICE) is None
    out = make_out(problem, kernel.output_shape(problem), device=DEVICE)
    compiled = kernel.compile(problem, config, arithmetic, DEVICE)
    assert compiled.ran_on is None
    return compiled.bind(Operands(inputs.x, inputs.weights, out, preactivations))


@cache
def case(problem, family, seed=1):
    return make_inputs(problem, family, seed, DEVICE)


@cache
def wanted(problem, family, computes, arithmetic=IEEE):
    inputs = case(problem, family)
    if computes == "gate_up":
        halves = [accumulate(inputs.x, w) for w in (inputs.weights.gate, inputs.weights.up)]
        return torch.cat(halves, 1).to(inputs.x.dtype)
    return execute(arithmetic, inputs.x, inputs.weights, problem.activation)


@pytest.fixture(scope="session", autouse=True)
def _built(request):
    """What the selected tests need is compiled first."""
    units = []
    for item in request.session.items:
        given = getattr(item, "callspec", None) and item.callspec.params
        if item.function is test_every_geometry_gives_the_bits_of_the_model:
            units.append(get_kernel(given["name"]).unit(SMALL, given["config"], arithmetic_of(given["name"])))
        elif item.function is test_options:
            name, *options = (given[key] for key in ("name", "activation", "recipe", "dtype", "bias", "kept"))
            problem, arithmetic = posed(*options)
            units.append(get_kernel(name).unit(problem, get_kernel(name).table()[-1], arithmetic))
    name, config = GEOMETRIES[-1]
    if reason := toolchain.why_not(get_kernel(name).unit(SMALL, config, arithmetic_of(name))):
        pytest.skip(reason)
    prebuild(units)


# Boundary sizes: one row; less than a tile; a tile more or less one; k below, at and off a stage; strides.
PROBLEMS = [
    (SMALL, "normal"),
    (Problem(1, 8, 8), "normal"),
    (Problem(127, 104, 72, layout="separate"), "wide"),
    (Problem(129, 200, 64), "integers"),
    (Problem(257, 192, 896), "outliers"),
    (Problem(64, 24, 128), "integers"),
    (Problem(300, 136, 80, out_stride=152, x_stride=96), "normal"),
    (Problem(1500, 1000, 200, layout="separate", gate_stride=208, up_stride=216, out_stride=1032), "normal"),
    (Problem(4096, 1216, 896), "normal"),
]


@pytest.mark.parametrize(("name", "config"), GEOMETRIES, ids=lambda v: str(v))
def test_every_geometry_gives_the_bits_of_the_model(name, config):
    kernel = get_kernel(name)
    for problem, family in PROBLEMS:
        bound = bind(name, problem, case(problem, family), config)
        out = bound.run().clone()
        assert_bits_equal(out, wanted(problem, family, kernel.computes))
        assert_padding_poisoned(bound.out)
        assert_bits_equal(bound.run(), out)


@pytest.mark.parametrize("name", FUSED)
def test_up_may_lie_below_gate(name):
    inputs = case(SMALL, "normal")
    stacked = torch.cat((inputs.weights.up, inputs.weights.gate))
    swapped = replace(inputs, weights=Weights(stacked[SMALL.n :], stacked[: SMALL.n]))
    problem = replace(SMALL, layout="separate")
    assert_bits_equal(bind(name, problem, swapped).run(), wanted(SMALL, "normal", "swiglu"))


# Each pair of dtype, activation, recipe, bias and pre-activations occurs.
ACTIVATED = [(a, r) for a in ("silu", "gelu_tanh", "sigmoid") for r in ("ieee", "ex2", "tanh", "poly3")] + [
    ("relu", "none")
]
OPTIONS = [
    (activation, recipe, *rest)
    for (activation, recipe), rest in zip(
        ACTIVATED,
        cycle([("bf16", False, True), ("fp16", True, False), ("fp16", False, False), ("bf16", True, True)]),
        strict=False,
    )
]


def posed(activation, recipe, dtype, bias, kept):
    outputs = ("out", "preactivations") if kept else ("out",)
    problem = Problem(150, 120, 136, dtype=dtype, activation=activation, bias=bias, outputs=outputs)
    return problem, Arithmetic("sm90", recipe)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("activation", "recipe", "dtype", "bias", "kept"), OPTIONS)
def test_options(name, activation, recipe, dtype, bias, kept):
    problem, arithmetic = posed(activation, recipe, dtype, bias, kept)
    inputs = case(problem, "normal")
    buffer = torch.full((150, 248), torch.nan, dtype=inputs.x.dtype, device=DEVICE)[:, :240] if kept else None
    config = get_kernel(name).table()[-1]
    out = bind(name, problem, inputs, config, arithmetic, buffer).run()
    assert_bits_equal(out, wanted(problem, "normal", "swiglu", arithmetic))
    if buffer is not None:
        halves = [accumulate(inputs.x, w) for w in (inputs.weights.gate, inputs.weights.up)]
        biases = (inputs.weights.bias_gate, inputs.weights.bias_up)
        added = [h if b is None else h + b.float() for h, b in zip(halves, biases, strict=True)]
        assert_bits_equal(buffer, torch.cat(added, 1).to(buffer.dtype))


@pytest.mark.parametrize("name", NAMES)
def test_a_debug_build_shows_the_accumulators(name):
    kernel, inputs = get_kernel(name), case(SMALL, "wide")
    out = make_out(SMALL, kernel.output_shape(SMALL), device=DEVICE)
    sums = kernel.accumulators(SMALL, kernel.table()[0], arithmetic_of(name), Operands(inputs.x, inputs.weights, out))
    torch.cuda.synchronize()
    halves = [accumulate(inputs.x, w) for w in (inputs.weights.gate, inputs.weights.up)]
    assert_bits_equal(sums, torch.cat(halves, 1))


@pytest.mark.parametrize("name", FUSED)
def test_a_hundred_runs_and_any_batch_give_the_same_bits(name):
    whole = Problem(8192, 1216, 896)
    inputs = case(whole, "normal")
    first = bind(name, whole, inputs).run().clone()
    bound = bind(name, whole, inputs)
    for _ in range(100):
        again = bound.run()
    assert_bits_equal(again, first)
    for m in (1, 7, 64, 100, 4096):
        part = type(inputs)(inputs.x[:m], inputs.weights)
        problem = Problem(m, whole.n, whole.k)
        for config in get_kernel(name).configs(problem)[:2]:
            assert_bits_equal(bind(name, problem, part, config).run(), first[:m])


@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_replays_allocate_nothing(name):
    captured_and_replayed(SMALL, lambda inputs: bind(name, SMALL, inputs), DEVICE, times=1000)


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_goes_to_the_current_stream(name):
    goes_to_the_current_stream(SMALL, lambda inputs: bind(name, SMALL, inputs), DEVICE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("name", FUSED)
def test_a_launch_goes_to_the_device_of_its_tensors(name):
    other = torch.device("cuda", 1)
    inputs, kernel = make_inputs(SMALL, "normal", 1, other), get_kernel(name)
    out = make_out(SMALL, device=other)
    compiled = kernel.compile(SMALL, kernel.table()[0], IEEE, other)
    compiled.bind(Operands(inputs.x, inputs.weights, out)).run()
    torch.cuda.synchronize(other)
    assert torch.cuda.current_device() == 0
    assert_bits_equal(out.to(DEVICE), wanted(SMALL, "normal", "swiglu"))


@pytest.mark.parametrize("name", FUSED)
def test_offsets_beyond_32_bits(name):
    """m * n >= 2^31: a store with a 32-bit offset would wrap."""
    problem = Problem(131_073, 16_384, 16)
    inputs = make_inputs(problem, "integers", 0, DEVICE)
    rows = torch.tensor([0, 1, 65_536, problem.m - 1], device=DEVICE)
    out = bind(name, problem, inputs).run()
    assert int(out.isnan().sum()) == 0
    assert_bits_equal(out[rows], execute(IEEE, inputs.x[rows], inputs.weights, "silu"))


@pytest.mark.parametrize("name", FUSED)
def test_nan_and_infinities_stay_in_their_row_or_column(name):
    inputs = make_inputs(SMALL, "normal", 1, DEVICE)
    inputs.x[3, 5], inputs.weights.gate[7, 0], inputs.weights.up[20, 100] = torch.nan, torch.inf, -torch.inf
    out = bind(name, SMALL, inputs).run()
    assert_bits_equal(out, execute(IEEE, inputs.x, inputs.weights, "silu"))
    clean = torch.ones(SMALL.m, SMALL.n, dtype=torch.bool, device=DEVICE)
    clean[3], clean[:, 7], clean[:, 20] = False, False, False
    assert_bits_equal(out[clean], wanted(SMALL, "normal", "swiglu")[clean])


SANITIZED = """
import torch
from fused_swiglu import Arithmetic, Operands, Problem, get_kernel
from fused_swiglu.inputs import make_inputs, make_out
device, problem = torch.device("cuda", 0), Problem(200, 200, 136)
inputs = make_inputs(problem, "normal", 1, device)
kernel = get_kernel({name!r})
for config in kernel.table()[:2]:
    arithmetic = next(iter(kernel.arithmetics(problem)))
    out = make_out(problem, kernel.output_shape(problem), device=device)
    kernel.compile(problem, config, arithmetic, device).bind(Operands(inputs.x, inputs.weights, out)).run()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("name", "tool"), list(product(NAMES, ("memcheck", "racecheck"))))
def test_compute_sanitizer(name, tool):
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
