"""The model on the GPU: recipes and chain against NumPy, and Triton's kernels against the model, to the bit."""

import numpy as np
import pytest
import torch

from fused_swiglu import Arithmetic, Problem
from fused_swiglu.inputs import FAMILIES, make_inputs
from fused_swiglu.recipes import activate
from fused_swiglu.sm90 import accumulate, execute
from fused_swiglu.testing import assert_bits_equal
from triton_baselines import model

DEVICE = torch.device("cuda", 0)


def on_gpu(gates: np.ndarray, activation: str, recipe: str) -> np.ndarray:
    x = torch.from_numpy(gates).to(DEVICE)
    out = torch.full_like(x, torch.nan)
    model._activate[(-(-x.numel() // 1024),)](x, out, x.numel(), ACTIVATION=activation, RECIPE=recipe, BLOCK=1024)
    return out.cpu().numpy()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid", "relu"])
def test_ieee_gives_a_cpus_bits(activation):
    """Every bf16 gate, random fp32 bit patterns, and fp32 gates densely where the function lives."""
    rng = np.random.default_rng(0)
    gates = np.concatenate(
        (
            (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32),
            rng.integers(0, 2**32, 2**22, dtype=np.uint64).astype(np.uint32).view(np.float32),
            rng.uniform(-112, 24, 2**22).astype(np.float32),
        )
    )
    there, here = on_gpu(gates, activation, "ieee"), activate(gates, activation, "ieee")
    differ = (there.view(np.int32) != here.view(np.int32)) & ~(np.isnan(there) & np.isnan(here))
    zeros = (there == 0) & (here == 0)
    assert not (differ & ~zeros).any(), gates[differ & ~zeros][:8]
    assert not differ.any(), f"sign of zero at {gates[differ][:8]}"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_chain_gives_numpys_bits(dtype, special):
    generator = torch.Generator().manual_seed(1)
    words = {2: torch.int16, 1: torch.int8}[dtype.itemsize]
    for k in (16, 200):
        a, b = (torch.randint(-(2**15), 2**15, (n, k), generator=generator).to(words).view(dtype) for n in (130, 90))
        if not special:
            a, b = (torch.where(t.float().isfinite(), t.float(), 1.0).to(dtype) for t in (a, b))
        there = model.accumulate(a.to(DEVICE), b.to(DEVICE)).cpu().numpy()
        here = accumulate(a, b)
        assert not ((there.view(np.int32) != here.view(np.int32)) & ~(np.isnan(there) & np.isnan(here))).any()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_both_executors_predict_the_same_outputs(family, dtype):
    inputs = make_inputs(Problem(70, 90, 333, dtype=dtype), family, 3)
    weights = type(inputs.weights)(inputs.weights.gate.to(DEVICE), inputs.weights.up.to(DEVICE))
    for rounds in ((), ("gate", "up")):
        arithmetic = Arithmetic("sm90", "ieee", rounds)
        there = model.execute(arithmetic, inputs.x.to(DEVICE), weights)
        assert_bits_equal(there.cpu(), execute(arithmetic, inputs.x, inputs.weights))
