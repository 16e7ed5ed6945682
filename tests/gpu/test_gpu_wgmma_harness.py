"""Single wgmma instructions, from shared memory and from registers, against the model: no word may differ.

A NaN's word is 0x7FFFFFFF, and compared like any other. Where FUSED_SWIGLU_EVIDENCE names a folder,
operands and results that differ are saved there.
"""

import ctypes
import os
from pathlib import Path

import harness
import numpy as np
import pytest
import torch

from cutlass_kernels import toolchain
from fused_swiglu.sm90 import accumulate

OUTPUTS = {"any bits": 2**20, "finite bits": 2**20}  # for each harness; of the other kinds 2^18


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if reason := toolchain.why_not(harness.UNIT):
        pytest.skip(reason)
    return toolchain.load(harness.UNIT)


@pytest.mark.parametrize("kind", sorted(harness.KINDS))
@pytest.mark.parametrize("source", harness.SOURCES_OF_A)
@pytest.mark.parametrize("n", harness.WIDTHS)
@pytest.mark.parametrize("name", sorted(harness.FORMATS))
def test_one_instruction(library: ctypes.CDLL, name: str, n: int, source: str, kind: str) -> None:
    count = OUTPUTS.get(kind, 2**18) // (harness.ROWS * n)
    a, b, c = harness.draw(kind, name, count, n, seed=0)
    there = harness.launch(library, name, source, a, b, c)
    here = np.stack([accumulate(a[t], b[t], c=c[t]) for t in range(count)])
    wrong = np.argwhere(there.view(np.uint32) != here.view(np.uint32))
    assert not len(wrong), differences(f"{name} n{n} {source} {kind}", wrong, a, b, c, there, here)


def differences(
    case: str, wrong: np.ndarray, a: torch.Tensor, b: torch.Tensor, c: np.ndarray, there: np.ndarray, here: np.ndarray
) -> str:
    """How many words differ and the first of them in hexadecimal; saved where that is asked for."""
    t, i, j = wrong[:: max(1, len(wrong) // 200)].T
    words = {2: np.uint16, 1: np.uint8}[a.element_size()]
    rows = {
        "a": a.view(torch.uint8).numpy().view(words)[t, i],
        "b": b.view(torch.uint8).numpy().view(words)[t, j],
        **{name: m[t, i, j].view(np.uint32) for name, m in (("c", c), ("there", there), ("here", here))},
    }
    if folder := os.environ.get("FUSED_SWIGLU_EVIDENCE"):
        np.savez_compressed(Path(folder) / f"{case.replace(' ', '-')}.npz", **rows)
    text = [f"{case}: {len(wrong)} of {there.size} words differ"]
    for row in zip(*(values[:4] for values in rows.values()), strict=True):
        text += [
            f"  {name} {' '.join(f'{word:x}' for word in np.atleast_1d(value))}"
            for name, value in zip(rows, row, strict=True)
        ]
    return "\n".join(text)
