"""The CUTLASS kernels without a GPU: what they refuse, what their model gives, what their machine code holds."""

import re
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from prebuilt import prebuild, shared

from fused_swiglu import ArgumentError, Arithmetic, Operands, Problem, get_kernel, recipes
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.numerics import mismatch
from fused_swiglu.reference import exact
from fused_swiglu.resources import disassemble, resources
from fused_swiglu.sm90 import accumulate
from fused_swiglu.testing import assert_bits_equal, assert_padding_poisoned

cutlass_kernels = pytest.importorskip("cutlass_kernels")
from cutlass_kernels import toolchain  # noqa: E402
from cutlass_kernels.unit import SOURCES  # noqa: E402

CPU = torch.device("cpu")
FUSED = ("cutlass.pingpong", "cutlass.evt", "cutlass.interleaved")
NAMES = (*FUSED, "cutlass.gemm")
IEEE = Arithmetic("sm90", "ieee")


def default(kernel, problem):
    return next(iter(kernel.configs(problem))), next(iter(kernel.arithmetics(problem)))


def run(name, problem, inputs, arithmetic=None, preactivations=None):
    kernel = get_kernel(name)
    config, first = default(kernel, problem)
    out = make_out(problem, kernel.output_shape(problem))
    compiled = kernel.compile(problem, config, arithmetic or first, CPU)
    assert compiled.ran_on == "model"
    compiled.bind(Operands(inputs.x, inputs.weights, out, preactivations)).run()
    return out


# What they offer


@pytest.mark.parametrize("name", NAMES)
def test_every_geometry_on_offer_can_be_built(name):
    kernel = get_kernel(name)
    table = kernel.table()
    assert len(table) == len(set(table)) >= 8
    for config in table:
        assert kernel.invalid(config) is None
        assert kernel.config_type.parse(str(config)) == config
    assert set(kernel.configs(Problem(4096, 4864, 896))) == set(table)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bm": 96, "schedule": "pingpong"}, "multiples of 64"),
        ({"bm": 64, "schedule": "cooperative"}, "multiples of 128"),
        ({"bn": 24}, "multiples of 16"),
        ({"bm": 256, "bn": 96, "schedule": "pingpong"}, "registers"),
        ({"schedule": "stream-k"}, "pingpong and cooperative"),
        ({"cluster_m": 3}, "clusters"),
        ({"stages": 40}, "stages"),
        ({"stages": 1}, "at least 2"),
        ({"band": 0}, "band of at least 1"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_in_words(name, change, reason):
    kernel = get_kernel(name)
    config = replace(kernel.table()[0], **change)
    problem = Problem(64, 64, 64)
    assert reason in (kernel.why_not(problem, config, next(iter(kernel.arithmetics(problem))), CPU) or "")


def test_evt_counts_what_its_epilogue_stores():
    """A stage of 64x64 is 24 KiB, and a subtile of its epilogue 4 KiB: two in flight, six with pre-activations."""
    kernel = get_kernel("cutlass.evt")
    config = kernel.config_type.parse("bm=64,bn=64,stages=9")
    plain, kept = Problem(64, 64, 64), Problem(64, 64, 64, outputs=("out", "preactivations"))
    assert kernel.why_not(plain, config, IEEE, CPU) is None
    assert "at most 8 stages" in (kernel.why_not(kept, config, IEEE, CPU) or "")
    assert kernel.why_not(kept, replace(config, stages=8), IEEE, CPU) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem(8, 16, 72, x_stride=76), "x_stride"),
        (Problem(8, 16, 68), "x_stride"),
        (Problem(8, 16, 64, layout="separate", gate_stride=68), "gate_stride"),
        (Problem(8, 16, 64, layout="separate", up_stride=66), "up_stride"),
        (Problem(8, 12, 64), "out_stride"),
        (Problem(8, 130, 64, out_stride=136), "n must"),
        (Problem(8, 16, 68, layout="separate", x_stride=72, gate_stride=72, up_stride=72), "k must"),
        (Problem(8, 16, 64, alignment=8), "multiple of 16 bytes"),
        (Problem(8, 16, 64, dtype="fp8_e4m3"), "bf16 or fp16"),
    ],
)
def test_a_problem_that_tma_cannot_move_is_refused_by_name(name, problem, reason):
    kernel = get_kernel(name)
    assert reason in (kernel.why_not(problem, *default(kernel, problem), CPU) or "")


def test_without_a_compiler_and_a_build_the_reason_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    kernel, problem = get_kernel("cutlass.pingpong"), Problem(64, 64, 64)
    unit = kernel.unit(problem, *default(kernel, problem))
    reason = toolchain.why_not(unit, tmp_path)
    assert reason
    assert "CUDA_HOME" in reason
    assert "\n" not in reason


# Their model


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "sigmoid"])
def test_without_an_sm90_gpu_they_run_as_their_model(name, dtype, activation):
    problem = Problem(17, 40, 136, dtype=dtype, activation=activation, layout="separate", out_stride=48)
    inputs = make_inputs(problem, "normal", 3)
    out = run(name, problem, inputs)
    wanted = exact(inputs.x, inputs.weights, activation, out_dtype=out.dtype)
    assert mismatch(out, wanted).m1_max <= 1
    assert_padding_poisoned(out)
    assert_bits_equal(out, run("cutlass.evt", problem, inputs))


def test_the_control_is_the_product_of_both_halves():
    problem = Problem(9, 24, 80)
    inputs = make_inputs(problem, "normal", 4)
    out = run("cutlass.gemm", problem, inputs)
    halves = [torch.from_numpy(accumulate(inputs.x, w)) for w in (inputs.weights.gate, inputs.weights.up)]
    assert_bits_equal(out, torch.cat(halves, 1).bfloat16())


@pytest.mark.parametrize("name", ["cutlass.pingpong.product", "cutlass.evt.product"])
def test_the_controls_without_activation_are_the_product(name):
    problem = Problem(9, 24, 80)
    inputs, kernel = make_inputs(problem, "normal", 4), get_kernel(name)
    out = run(name, problem, inputs)
    gate, up = (torch.from_numpy(accumulate(inputs.x, w)) for w in (inputs.weights.gate, inputs.weights.up))
    assert_bits_equal(out, (gate * up).bfloat16())
    wanted = exact(inputs.x, inputs.weights, out_dtype=out.dtype, computes=kernel.computes)
    assert mismatch(out, wanted).m1_max <= 1
    unit = kernel.unit(problem, *default(kernel, problem))
    assert ("FS_ACTIVATION", 4) in unit.defines


@pytest.mark.parametrize("name", FUSED)
def test_biases_come_before_all_else_and_preactivations_are_what_was_activated(name):
    problem = Problem(5, 16, 64, bias=True, outputs=("out", "preactivations"))
    inputs = make_inputs(problem, "normal", 5)
    kept = torch.full((5, 32), torch.nan, dtype=torch.bfloat16)
    out = run(name, problem, inputs, preactivations=kept)
    halves = [
        torch.from_numpy(accumulate(inputs.x, w)) + b.float()
        for w, b in (
            (inputs.weights.gate, inputs.weights.bias_gate),
            (inputs.weights.up, inputs.weights.bias_up),
        )
    ]
    assert_bits_equal(kept, torch.cat(halves, 1).bfloat16())
    gate = torch.from_numpy(recipes.activate(halves[0].numpy(), "silu", "ieee"))
    assert_bits_equal(out, (gate * halves[1]).bfloat16())


@pytest.mark.parametrize("name", FUSED)
def test_operands_that_do_not_fit_are_refused_by_name(name):
    problem = Problem(5, 16, 64, bias=True, outputs=("out", "preactivations"))
    inputs, kernel = make_inputs(problem, "normal", 5), get_kernel(name)
    compiled = kernel.compile(problem, *default(kernel, problem), CPU)
    out = make_out(problem)
    short = replace(inputs.weights, bias_up=inputs.weights.bias_up[:8])
    with pytest.raises(ArgumentError, match="bias_up"):
        compiled.bind(Operands(inputs.x, short, out))
    with pytest.raises(ArgumentError, match="preactivations"):
        compiled.bind(Operands(inputs.x, inputs.weights, out))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_no_work(name):
    problem = Problem(0, 16, 64)
    assert run(name, problem, make_inputs(problem, "normal", 1)).shape[0] == 0


# Their source


def test_the_device_has_the_declared_constants():
    text = (SOURCES / "include" / "fused_swiglu" / "gate.cuh").read_text()
    found = {name: float(value) for name, value in re.findall(r"(\w+) = (-?[0-9.e-]+)f?[,;]", text)}
    declared = {
        "LOG2_E_HIGH": recipes.LOG2_E[0],
        "LOG2_E_LOW": recipes.LOG2_E[1],
        **{f"D{i}": c for i, c in enumerate(recipes.EXP2_DEGREE_3, 1)},
        **{f"C{i}": c for i, c in enumerate(recipes.EXP2_DEGREE_6, 1)},
        **{
            name: getattr(recipes, name) for name in ("LINEAR", "CUBIC", "ROUND", "SCALE_EXPONENT", "LOWEST", "HIGHEST")
        },
    }
    for name, value in declared.items():
        assert np.float32(found[name]) == np.float32(value), name


# Their machine code

BUILT = {
    "overlap": ("cutlass.pingpong", "bm=64,bn=64,stages=4,cluster_m=2,swish=overlap"),
    "held": ("cutlass.pingpong", "bm=64,bn=64,stages=4,swish=held"),
    "pingpong": ("cutlass.interleaved", "bm=128,bn=96,stages=5,cluster_m=2"),
    "evt pingpong": ("cutlass.evt", "bm=128,bn=96,cluster_m=2"),
    "evt cooperative": ("cutlass.evt", "bm=256,bn=96,schedule=cooperative"),
    "control": ("cutlass.gemm", "bm=128,bn=96,stages=5,cluster_m=2"),
}


def unit_of(key):
    name, text = BUILT[key]
    kernel = get_kernel(name)
    problem = Problem(64, 64, 64)
    return kernel.unit(problem, kernel.config_type.parse(text), next(iter(kernel.arithmetics(problem))))


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    units = {key: unit_of(key) for key in BUILT}
    folder = shared(tmp_path_factory, "cutlass")
    if reason := toolchain.why_not(units["held"], folder):
        pytest.skip(reason)
    libraries = prebuild(units.values(), folder)
    return {key: libraries[unit] for key, unit in units.items()}


@pytest.mark.parametrize("key", BUILT)
def test_the_machine_code_is_what_the_design_says(built, key):
    name, text = BUILT[key]
    (used,) = resources(built[key])
    (code,) = disassemble(built[key]).values()
    names = {instruction.name for instruction in code}
    assert used.stack == used.counts["LDL"] == used.counts["STL"] == 0
    assert min(used.counts[key] for key in ("HGMMA", "UTMASTG", "STSM")) > 0
    assert any(n.startswith("USETMAXREG") for n in names)
    loads = [i for i in code if i.opcode == "UTMALDG"]
    assert loads
    assert any("MULTICAST" in i.name for i in loads) == ("cluster_m=2" in text)
    wide = 1 if name == "cutlass.pingpong" else 2
    bn = int(re.search(r"bn=(\d+)", text)[1])
    assert {i.name for i in code if i.opcode == "HGMMA"} == {f"HGMMA.64x{wide * bn}x16.F32.BF16"}


def order(code):
    """Runs of tensor-core products, of barrier operations and of the reciprocals that every activation has."""
    kinds = {"HGMMA": "products", "BAR.ARV": "gives", "BAR.SYNC": "takes", "MUFU.RCP": "swish"}
    told = [kinds[k] for i in code if (k := next((k for k in kinds if i.name.startswith(k)), None))]
    return [(kind, len(list(run))) for kind, run in groupby(told)]


@pytest.mark.parametrize(
    ("key", "wanted"), [("overlap", ["products", "gives", "swish", "takes", "products"]),
                        ("held", ["products", "swish", "gives", "takes", "products"])]
)  # fmt: skip
def test_kernel_1_activates_between_its_passes(built, key, wanted):
    """Between the gate products and the up products: after the turn was given away, or, held, before."""
    (code,) = disassemble(built[key]).values()
    runs = [(kind, count) for kind, count in order(code) if kind != "swish" or count > 8]  # others are index divisions
    kinds = [kind for kind, _ in runs]
    first = kinds.index("products")
    assert kinds[first : first + 5] == wanted
    assert dict(runs[first : first + 5])["swish"] == 64 * 64 // 128


def test_evt_computes_between_the_stores_of_subtiles(built):
    """Each subtile's reciprocals stand before its own store and after an earlier one, not all of them at the front."""
    (code,) = disassemble(built["evt pingpong"]).values()
    told = [i.opcode for i in code if i.opcode in ("UTMASTG",) or i.name.startswith("MUFU.RCP")]
    runs = [(kind, len(list(run))) for kind, run in groupby(told)]
    computed = [count for kind, count in runs if kind == "MUFU" and count >= 8]
    assert len(computed) >= 3
    assert max(computed) <= 128 * 96 // 128 / 2
