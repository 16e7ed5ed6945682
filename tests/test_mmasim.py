"""The rule of the tensor-core step against another's model of Hopper: MMA-Sim (arXiv 2511.10909), `pip install mmasim`.

Any bits are compared, infinities and NaN included: release 2.1.1 has no case where the two differ, nor any where it
differs from the outputs of an H200 in tests/vectors.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from fused_swiglu.sm90 import accumulate

mmasim = pytest.importorskip("mmasim.nv_ptx", reason="mmasim is not installed")

FORMATS = {  # dtype, its words, and the k of one instruction
    "bf16": (torch.bfloat16, torch.int16, 16),
    "f16": (torch.float16, torch.int16, 16),
    "e4m3": (torch.float8_e4m3fn, torch.int8, 32),
    "e5m2": (torch.float8_e5m2, torch.int8, 32),
}


def bits(shape: tuple[int, ...], words: torch.dtype, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    info = torch.iinfo(words)
    return torch.randint(info.min, info.max + 1, shape, generator=generator).to(words).view(dtype)


def shrunk(tensor: torch.Tensor, power: int) -> torch.Tensor:
    """Finite, and so small that products meet the exponent of a zero term."""
    value = tensor.float()
    return (torch.where(value.isfinite(), value, 0).clamp(-1, 1) * 2.0**power).to(tensor.dtype)


@pytest.mark.parametrize("kind", ["any bits", "no accumulator", "finite", "tiny"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_one_instruction(name, kind):
    dtype, words, k = FORMATS[name]
    instruction = mmasim.WGMMA("Hopper", f"m64n256k{k}.f32.{name}.{name}")
    generator = torch.Generator().manual_seed(0)
    a, b = (bits((rows, k), words, dtype, generator) for rows in (64, 256))
    c = bits((64, 256), torch.int32, torch.float32, generator)
    if kind == "no accumulator":
        c.zero_()
    if kind in ("finite", "tiny"):
        power = -64 if kind == "tiny" and name == "bf16" else 0
        a, b, c = shrunk(a, power), shrunk(b, power), torch.randn(c.shape, generator=generator) * 2.0 ** (2 * power)
    there, here = instruction(a, b.T, c).numpy(), accumulate(a, b, c=c.numpy())
    assert np.array_equal(there.view(np.int32), here.view(np.int32))
    assert np.isfinite(here).mean() > 0.05


def test_an_h200s_infinities():
    vectors = np.load(Path(__file__).parent / "vectors" / "h200-wgmma-infinities.npz")
    a, b = (torch.from_numpy(vectors[name]).view(torch.bfloat16) for name in "ab")
    instruction = mmasim.WGMMA("Hopper", "m64n256k16.f32.bf16.bf16")
    out = instruction.dpa(a, b, torch.from_numpy(vectors["c"]).float()).numpy()
    assert np.array_equal(out, vectors["out"])
