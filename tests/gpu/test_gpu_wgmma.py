"""One tensor-core instruction with an accumulator, on random bits and probes, against the model: no bit may differ."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fused_swiglu.sm90 import accumulate

DEVICE = torch.device("cuda", 0)
M, K = 64, 16


@triton.jit
def _one(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out[t] = a[t] @ b[t].T + c[t] for the program's t: a single wgmma m64nNk16."""
    t = tl.program_id(0)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + t * M * K + m[:, None] * K + k[None, :])
    right = tl.load(b + t * N * K + n[:, None] * K + k[None, :])
    at = t * M * N + m[:, None] * N + n[None, :]
    tl.store(out + at, tl.dot(left, right.T, tl.load(c + at)))


def run(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[np.ndarray, str]:
    out = torch.full(c.shape, torch.nan, device=DEVICE)
    built = _one[(len(a),)](a.to(DEVICE), b.to(DEVICE), c.to(DEVICE), out, M, b.shape[1], K, num_warps=4)
    return out.cpu().numpy(), built.asm["ptx"]


def differing(there: np.ndarray, here: np.ndarray) -> int:
    return int(((there.view(np.int32) != here.view(np.int32)) & ~(np.isnan(there) & np.isnan(here))).sum())


def bits(shape, dtype, generator) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31, shape, generator=generator)
    return words.to(torch.int16).view(dtype) if dtype != torch.float32 else words.to(torch.int32).view(dtype)


@pytest.mark.parametrize("n", [16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["any bits", "finite", "normal", "tiny", "cancelling", "no accumulator"])
def test_one_instruction(dtype, n, kind):
    generator = torch.Generator().manual_seed(0)
    trials = 2**20 // (M * n) if kind == "any bits" else 2**17 // (M * n)
    a, b = (bits((trials, rows, K), dtype, generator) for rows in (M, n))
    c = bits((trials, M, n), torch.float32, generator)
    if kind != "any bits":
        scale = {"tiny": 2.0**-62, "finite": 2.0**6}.get(kind, 1.0) if dtype == torch.bfloat16 else 1.0
        a, b = (torch.randn(t.shape, generator=generator) * scale for t in (a, b))
        c = torch.randn(c.shape, generator=generator) * scale**2
        if kind in ("finite", "tiny"):
            a = a * torch.exp2(torch.randint(-9, 9, a.shape, generator=generator).float())
        a, b = a.to(dtype), b.to(dtype)
        if kind == "tiny":
            a[torch.rand(a.shape, generator=generator) < 0.2] = 0
            c[torch.rand(c.shape, generator=generator) < 0.5] = 0
        if kind == "cancelling":
            c = -(a.float() @ b.float().transpose(1, 2))
        if kind == "no accumulator":
            c.zero_()
    there, ptx = run(a, b, c)
    assert f"wgmma.mma_async.sync.aligned.m64n{n}k16" in ptx
    wrong = [differing(there[t], accumulate(a[t], b[t], c=c[t].numpy())) for t in range(trials)]
    assert sum(wrong) == 0, f"{sum(wrong)} of {there.size} words differ"


def test_the_sign_of_what_is_cut_down_to_zero():
    """A product of -2^-151 and nothing else: is it -0 or 0?"""
    a, b, c = torch.zeros(1, M, K), torch.zeros(1, 16, K), torch.zeros(1, M, 16)
    a[..., 0], b[..., 0] = 2.0**-100, -(2.0**-51)
    there, _ = run(a.bfloat16(), b.bfloat16(), c)
    assert there[0, 0, 0] == 0
    here = accumulate(a[0].bfloat16(), b[0].bfloat16())
    assert np.signbit(there).all() == np.signbit(here).all()
