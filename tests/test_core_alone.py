"""The core imports neither kernel package, nor triton, nor hypothesis: it runs where none of them is."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys
blocked = ("triton", "triton_baselines", "cutlass_kernels", "hypothesis")
for name in blocked:
    sys.modules[name] = None
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is not blocked")

import torch
import fused_swiglu
for module in pkgutil.iter_modules(fused_swiglu.__path__):
    if module.name not in ("testing", "__main__"):
        importlib.import_module(f"fused_swiglu.{module.name}")

from fused_swiglu.inputs import make_inputs
from fused_swiglu.numerics import mismatch
from fused_swiglu.reference import exact, twin
inputs = make_inputs(fused_swiglu.Problem(4, 8, 32), "integers", 0)
result = exact(inputs.x, inputs.weights, "relu", out_dtype=torch.bfloat16)
found = mismatch(twin(inputs.x, inputs.weights, "relu"), result)
print(found.outputs, found.m1_max, result.rounded.abs().sum().item() > 0)
"""


def test_core_runs_with_its_siblings_blocked():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["32", "0.0", "True"]


def test_testing_needs_hypothesis():
    """The block works, and the one module that is exempt is so for a reason."""
    script = "import sys; sys.modules['hypothesis'] = None; import fused_swiglu.testing"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "hypothesis" in done.stderr
