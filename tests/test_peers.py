"""Kernels of other projects: a row each where they cannot run, and how they are called where they can.

Their packages are never there: small ones take their place, which note how they are called and compute by torch.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch.nn import functional

from fused_swiglu import Config, Kernel, Operands, Problem, get_kernel
from fused_swiglu.compare import compare
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.peers.peer import Peer
from fused_swiglu.peers.quack import Gated, GatedConfig
from fused_swiglu.plan import plan
from fused_swiglu.testing import problems, seeds

PEERS = ("quack.gated", "liger.silu_mul", "flashinfer.silu_mul")
PACKAGES = {"quack": "gemm_interface", "liger_kernel": "ops/swiglu", "flashinfer": "activation"}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

QUACK = """
import torch
calls = []
def gemm_gated(A, B, *, activation, postact_out, preact_out=None, store_preact=True, tuned=True):
    given = dict(activation=activation, tuned=tuned, store_preact=store_preact, preact_out=preact_out)
    calls.append(dict(A=A, B=B, postact_out=postact_out) | given)
    acc = A.double() @ B.double()
    if store_preact:
        preact_out.copy_(acc)
    gate, up = acc[:, ::2], acc[:, 1::2]
    tanh = lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")
    act = {"swiglu": torch.nn.functional.silu, "geglu": tanh, "glu": torch.sigmoid}[activation]
    postact_out.copy_(act(gate) * up)
    return preact_out, postact_out
"""
LIGER = """
import torch
calls = []
def swiglu_fused_gate_up_forward(y):
    calls.append(dict(y=y))
    gate, up = y.float().chunk(2, dim=-1)
    return y, torch.nn.functional.silu(gate).to(y.dtype) * up.to(y.dtype)
"""
FLASHINFER = """
import torch
calls = []
def silu_and_mul(input, out=None):
    calls.append(dict(y=input, out=out))
    gate, up = input.float().chunk(2, dim=-1)
    return out.copy_(torch.nn.functional.silu(gate) * up)
"""
SOURCES = dict(zip(PACKAGES, (QUACK, LIGER, FLASHINFER), strict=True))


def install(folder: Path, package: str, source: str) -> None:
    """The package, in the folder, with that source where the peer looks for its function."""
    module = folder / package / f"{PACKAGES[package]}.py"
    module.parent.mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    (module.parent / "__init__.py").touch()
    module.write_text(source)


@pytest.fixture(autouse=True)
def _no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages can be imported, and none that a test installs stays."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers run on a CPU, too."""
    monkeypatch.setattr(Peer, "why_not", Kernel.why_not)


def calls_of(package: str) -> list[dict]:
    return importlib.import_module(f"{package}.{PACKAGES[package].replace('/', '.')}").calls


def reason(name: str, problem: Problem, device: torch.device, config: Config | None = None) -> str | None:
    kernel = get_kernel(name)
    default, arithmetic = next(iter(kernel.defaults(problem, device)))
    return kernel.why_not(problem, config or default, arithmetic, device)


def launch(name: str, problem: Problem, config: Config | None = None, seed: int = 0):
    """x, weights, out and what a run returned, on a CPU."""
    kernel = get_kernel(name)
    default, arithmetic = next(iter(kernel.defaults(problem, CPU)))
    inputs, out = make_inputs(problem, "integers", seed), make_out(problem)
    operands = Operands(inputs.x, kernel.prepare(inputs.weights, problem, config or default), out)
    bound = kernel.compile(problem, config or default, arithmetic, CPU).bind(operands)
    out.fill_(torch.nan)
    return inputs, out, bound.run()


# Where they cannot run


def test_a_comparison_has_one_row_of_each_that_says_what_it_needs():
    rows = {row.kernel: row for row in compare(Problem(4, 16, 32), PEERS)}
    assert {row.status for row in rows.values()} == {"unsupported"}
    assert {name: row.reason for name, row in rows.items()} == {
        "quack.gated": "needs an SM90 GPU and quack-kernels (pip install '.[peers]')",
        "liger.silu_mul": "needs a CUDA GPU and liger-kernel (pip install '.[peers]')",
        "flashinfer.silu_mul": "needs a CUDA GPU and flashinfer-python (pip install flashinfer-python)",
    }


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_by_default_each_is_one_candidate(device):
    [(_, candidates)] = plan(Problem(4, 16, 32), PEERS, device=device)
    assert sorted(candidate.name for candidate in candidates) == sorted(PEERS)


def test_on_a_gpu_only_the_package_is_missing(sm90):
    assert reason("quack.gated", Problem(4, 16, 32), GPU) == "needs quack-kernels (pip install '.[peers]')"


def test_with_the_packages_only_the_gpu_is_missing(folder):
    for package, source in SOURCES.items():
        install(folder, package, source)
    reasons = [reason(name, Problem(4, 16, 32), CPU) for name in PEERS]
    assert reasons == ["needs an SM90 GPU", "needs a CUDA GPU", "needs a CUDA GPU"]


def test_with_both_they_run(folder, sm90):
    for package, source in SOURCES.items():
        install(folder, package, source)
    assert [reason(name, Problem(4, 16, 32), GPU) for name in PEERS] == [None] * 3


def test_quack_is_for_sm90_alone(folder, monkeypatch):
    for package, source in SOURCES.items():
        install(folder, package, source)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    reasons = [reason(name, Problem(4, 16, 32), GPU) for name in PEERS]
    assert reasons == ["needs an SM90 GPU", None, None]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('\\nno driver\\nsecond line')", "RuntimeError: no driver"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import a_package_that_nobody_has", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
        ("def gemm_gated(:", "SyntaxError: "),
        ("gemm = None", "AttributeError: module 'quack.gemm_interface' has no attribute 'gemm_gated'"),
    ],
    ids=["raises", "exits", "lacks a dependency", "is broken", "is of another version"],
)
def test_a_package_that_does_not_load_is_a_reason_of_one_line(source, said, folder, sm90):
    install(folder, "quack", source)
    found = reason("quack.gated", Problem(4, 16, 32), GPU)
    assert found is not None
    assert found.startswith(f"quack-kernels is installed but does not load ({said}")
    assert found.endswith("): pip install '.[peers]'")
    assert "\n" not in found


def test_their_modules_import_nothing_of_theirs_nor_triton():
    script = """
import importlib, pkgutil, sys
for name in ("quack", "liger_kernel", "flashinfer", "triton"):
    sys.modules[name] = None
import fused_swiglu.peers
names = [module.name for module in pkgutil.iter_modules(fused_swiglu.peers.__path__)]
for name in names:
    importlib.import_module(f"fused_swiglu.peers.{name}")
print(*sorted(names))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {"quack", "liger", "flashinfer"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("quack.gated", Problem(4, 12, 32), "must be a multiple of 8, not 12"),
        ("quack.gated", Problem(4, 16, 20), "must be a multiple of 8, not 20"),
        ("quack.gated", Problem(4, 16, 32, x_stride=36), "x_stride must be a multiple of 8, not 36"),
        ("quack.gated", Problem(4, 16, 32, out_stride=18), "out_stride must be a multiple of 8, not 18"),
        ("quack.gated", Problem(4, 16, 32, alignment=8), "multiple of 16 bytes, not of 8"),
        ("quack.gated", Problem(4, 16, 32, activation="relu"), "not relu"),
        ("quack.gated", Problem(4, 16, 32, bias=True), "adds no bias"),
        ("quack.gated", Problem(4, 16, 32, dtype="fp32"), "not x fp32"),
        ("liger.silu_mul", Problem(4, 65544, 8), "takes n up to 65536, not 65544"),
        ("liger.silu_mul", Problem(0, 16, 32), "needs a row"),
        ("flashinfer.silu_mul", Problem(4, 16, 32, out_stride=24), "out_stride must be 16, not 24"),
        ("flashinfer.silu_mul", Problem(4, 16, 32, alignment=8), "multiple of 16 bytes, not of 8"),
        ("flashinfer.silu_mul", Problem(4, 16, 32, activation="gelu_tanh"), "not gelu_tanh"),
    ],
    ids=str,
)
def test_what_they_cannot_compute_is_a_reason(name, problem, said, folder, sm90):
    for package, source in SOURCES.items():
        install(folder, package, source)
    found = reason(name, problem, GPU)
    assert found is not None
    assert said in found


def test_how_the_weights_lie_is_no_matter_for_what_is_packed(folder, sm90):
    install(folder, "quack", QUACK)
    assert reason("quack.gated", Problem(4, 16, 32, layout="separate", gate_stride=37, up_stride=41), GPU) is None


# Where they can


@given(problem=problems(max_m=2, max_n=40, max_k=64, activations=["silu"]), seed=seeds())
def test_packing_can_be_undone(problem, seed):
    weights = make_inputs(problem, "normal", seed).weights
    packed = Gated().prepare(weights, problem, GatedConfig())
    assert tuple(packed.shape) == (problem.k, 2 * problem.n)
    assert packed.t().is_contiguous()
    gate, up = packed.t().unflatten(0, (problem.n, 2)).unbind(1)
    assert torch.equal(gate, weights.gate)
    assert torch.equal(up, weights.up)


@pytest.mark.parametrize("config", list(Gated().configs(Problem(1, 8, 8))), ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["stacked", "separate"])
def test_what_quack_is_given(config, dtype, layout, folder):
    install(folder, "quack", QUACK)
    problem = Problem(5, 24, 32, dtype=dtype, layout=layout, x_stride=40, out_stride=32)
    inputs, out, returned = launch("quack.gated", problem, config)
    first, last = calls_of("quack")  # when it was bound, and when it was run
    assert returned is out is last["postact_out"]
    assert last["A"] is inputs.x
    assert (tuple(last["B"].shape), last["B"].stride()) == ((32, 48), (1, 32))
    assert {last[name].dtype for name in ("A", "B", "postact_out")} == {out.dtype}
    assert (last["activation"], last["tuned"], last["store_preact"]) == ("swiglu", config.tuned, config.store_preact)
    assert all(first[name] is last[name] for name in ("B", "preact_out"))  # a run packs and allocates nothing
    preact = last["preact_out"]
    assert (preact is None) == (not config.store_preact)
    gate, up = (inputs.x.float() @ w.float().T for w in (inputs.weights.gate, inputs.weights.up))
    if preact is not None:
        assert torch.equal(preact[:, ::2].float(), gate)
        assert torch.equal(preact[:, 1::2].float(), up)


@pytest.mark.parametrize(("name", "theirs"), [("silu", "swiglu"), ("gelu_tanh", "geglu"), ("sigmoid", "glu")])
def test_quack_has_its_own_names_for_the_activations(name, theirs, folder, anywhere):
    install(folder, "quack", QUACK)
    [row] = compare(Problem(5, 24, 32, activation=name), ["quack.gated"])
    assert (row.status, row.m1_max) == ("ok", 0)
    assert {call["activation"] for call in calls_of("quack")} == {theirs}


def test_a_comparison_of_every_config_of_quack(folder, anywhere):
    install(folder, "quack", QUACK)
    rows = list(compare(Problem(5, 24, 32), ["quack.gated"], ["*"]))
    assert [row.config for row in rows] == [
        f"tuned={tuned},store_preact={preact}" for tuned in ("no", "yes") for preact in ("no", "yes")
    ]
    assert {(row.role, row.status, row.m1_max, row.arithmetic) for row in rows} == {
        ("fused", "ok", 0, "sm90:undeclared:out")
    }


@pytest.mark.parametrize(
    ("name", "package"), [("liger.silu_mul", "liger_kernel"), ("flashinfer.silu_mul", "flashinfer")]
)
@pytest.mark.parametrize("layout", ["stacked", "separate"])
def test_what_the_elementwise_kernels_are_given(name, package, layout, folder):
    install(folder, package, SOURCES[package])
    inputs, out, returned = launch(name, Problem(5, 24, 32, layout=layout))
    first, last = calls_of(package)
    gate, up = (inputs.x.float() @ w.float().T for w in (inputs.weights.gate, inputs.weights.up))
    assert torch.equal(last["y"], torch.cat((gate, up), dim=1).to(out.dtype))
    assert last["y"].is_contiguous()
    assert first["y"] is last["y"]
    wanted = functional.silu(last["y"][:, :24].float())
    wanted = wanted.to(out.dtype).float() if get_kernel(name).allocates else wanted
    assert torch.equal(returned, (wanted * last["y"][:, 24:].float()).to(out.dtype))
    assert (returned is out) == (not get_kernel(name).allocates)
    assert get_kernel(name).allocates == bool(out.isnan().all())


@pytest.mark.parametrize("name", ["liger.silu_mul", "flashinfer.silu_mul"])
def test_stacked_weights_are_read_in_place(name):
    problem = Problem(5, 24, 32)
    weights = make_inputs(problem, "normal", 0).weights
    assert get_kernel(name).prepare(weights, problem, Config()).data_ptr() == weights.gate.data_ptr()


def test_a_comparison_of_all_three(folder, anywhere):
    for package, source in SOURCES.items():
        install(folder, package, source)
    rows = {row.kernel: row for row in compare(Problem(5, 24, 32), [*PEERS, "torch.eager"])}
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["quack.gated"].m1_max == 0
    assert "quack.gated" in rows["torch.eager"].ratios
    eager = rows["torch.eager"]
    for name in ("liger.silu_mul", "flashinfer.silu_mul"):
        assert 0 < rows[name].m1_gt0 <= eager.m1_gt0
