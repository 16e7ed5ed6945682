"""The attribution ladder on the GPU: what libraries leave undeclared is found, and hardly anything is unexplained."""

from importlib.util import find_spec

import pytest
import torch

from fused_swiglu import Arithmetic, Problem
from fused_swiglu.explain import explain, unexplained
from fused_swiglu.inputs import make_inputs
from fused_swiglu.ladder import Models
from fused_swiglu.plan import plan
from fused_swiglu.results import Environment
from triton_baselines import model

DEVICE = torch.device("cuda", 0)
MOST = 1e-4  # of the outputs of a library's kernel
# In the last, small and long, cuBLAS splits k.
SHAPES = [Problem(1024, 4864, 896), Problem(300, 520, 896), Problem(256, 256, 3584)]


def ladders(problem, *names, arithmetics=()):
    """The rungs of each candidate."""
    work = plan([problem], names, arithmetics=arithmetics, device=DEVICE)
    rows = list(explain(work, device=DEVICE, environment=Environment(run="r")))
    found: dict[tuple, dict] = {}
    for row in rows:
        if row.status == "unsupported":
            continue
        assert row.status == "ok", row.reason
        found.setdefault((row.kernel, row.config, row.arithmetic), {})[row.rung] = row
    return list(found.values())


@pytest.mark.parametrize("problem", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["torch.eager", "torch.concat", "cublas.gemm"])
def test_cublas_is_explained(name, problem):
    (found,) = ladders(problem, name)
    rest = found["rest"]
    print(f"{name} {problem}: {rest.hypothesis}, rest {rest.flipped:.4%}; {rest.reason}")
    assert rest.flipped <= MOST, f"{rest.hypothesis} leaves {rest.flipped:.4%}: {rest.reason}"
    assert rest.hypothesis.startswith("sm90")


def test_torch_compile_is_explained():
    for found in ladders(SHAPES[0], "torch.compile", arithmetics=["undeclared:undeclared:*"]):
        rest = found["rest"]
        print(f"{rest.config} {rest.arithmetic}: {rest.hypothesis}, rest {rest.flipped:.4%}; {rest.reason}")
        assert rest.flipped <= MOST, f"{rest.config}: {rest.hypothesis} leaves {rest.flipped:.4%}: {rest.reason}"


@pytest.mark.skipif(find_spec("quack") is None, reason="QuACK is not installed")
def test_quack_is_explained():
    (found,) = ladders(SHAPES[0], "quack.gated")
    assert found["rest"].hypothesis == "sm90:ex2:out"
    assert found["rest"].flipped <= MOST


def test_declarations_leave_nothing():
    found = ladders(SHAPES[0], "triton.fused", "triton.unfused", arithmetics=["sm90:*"])
    assert len(found) == 8
    for rungs in found:
        assert not unexplained(rungs["rest"])
        assert (rungs["rest"].flipped, rungs["rest"].m0, rungs["rest"].reason) == (0, 0, None)


def test_the_ladder_is_as_on_a_cpu():
    """Every rung of fp32 operations that are the same on both: sums, the exact activation, `ieee`, roundings."""
    problem = Problem(40, 264, 896)
    (found,) = ladders(problem, "triton.unfused", arithmetics=["sm90:ieee:*"])
    here = make_inputs(problem, "normal", 0, DEVICE)
    weights = type(here.weights)(here.weights.gate.cpu(), here.weights.up.cpu())
    declared = Arithmetic("sm90", "ieee", ("gate", "up"))
    out = model.execute(declared, here.x, here.weights).cpu()
    wanted = Models(here.x.cpu(), weights).ladder(out, declared)
    assert {name: row.flipped for name, row in found.items()} == {rung.name: rung.flipped for rung in wanted.rungs}
