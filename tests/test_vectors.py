"""Outputs recorded on a GPU, against the model on this CPU: triton.fused's, and cuBLAS's where its split is known."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import recorded
import torch

from fused_swiglu.numerics import differing
from fused_swiglu.recipes import activate
from fused_swiglu.sm90 import accumulate

FUSED, CUTLASS, PRODUCTS = (
    sorted(recorded.FOLDER.glob(f"*-{of}-*.npz")) for of in ("triton-fused", "cutlass", "torch-mm")
)
EVERY = 1 if find_spec("numba") else 8  # row that is compared


def name_of(path: Path) -> str:
    return path.stem


def inputs(recording: recorded.Recording, *names: str) -> list[torch.Tensor]:
    rows, columns = recording.kept()
    return [recorded.draw(recording, name, rows[::EVERY] if name == "x" else columns) for name in names]


@pytest.mark.parametrize("path", FUSED + CUTLASS, ids=name_of)
def test_fused(path: Path) -> None:
    """The fp32 accumulators are the chain's, and the outputs are the epilogue of them."""
    vectors = recorded.load(path)
    x, *weights = inputs(vectors.recording, "x", "gate", "up")
    sums = {name: vectors.words[name][::EVERY] for name in ("gate", "up")}
    for (name, there), weight in zip(sums.items(), weights, strict=True):
        assert int(differing(torch.from_numpy(accumulate(x, weight)), there).sum()) == 0, name
    with np.errstate(all="ignore"):
        value = activate(sums["gate"].numpy(), "silu", "ieee") * sums["up"].numpy()
    assert int(differing(torch.from_numpy(value).bfloat16(), vectors.words["out"][::EVERY]).sum()) == 0


@cache
def product(path: Path, split: int) -> torch.Tensor:
    """The model's, for both dtypes of a file."""
    return torch.from_numpy(accumulate(*inputs(recorded.load(path).recording, "x", "gate"), split_k=split))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("path", PRODUCTS, ids=name_of)
def test_cublas(path: Path, dtype: str) -> None:
    """The words, where a split of K is known that gives them; elsewhere the bounds of sums in any order."""
    vectors = recorded.load(path)
    there, split = vectors.words[dtype][::EVERY], vectors.about["splits"][dtype]
    assert vectors.about["kernels"][dtype]
    if split:
        assert int(differing(product(path, split).to(there.dtype), there).sum()) == 0
        return
    x, weight = inputs(vectors.recording, "x", "gate")
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    ordinary = sizes < 2.0**126
    assert not there[~exact.isfinite()].isfinite().any()
    # Truncated at each of up to 512 steps; parts of a bf16 product may have been rounded to bf16.
    unit = {"fp32": 2.0**-14, "bf16": 2.0**-8}[dtype]
    assert bool(((there.double() - exact).abs() <= unit * (sizes + exact.abs()))[ordinary].all())


@pytest.mark.parametrize("path", FUSED + CUTLASS + PRODUCTS, ids=name_of)
def test_the_inputs_are_those_of_the_recording(path: Path) -> None:
    vectors = recorded.load(path)
    assert recorded.checksum(vectors.recording) == vectors.about["checksum"]
    assert vectors.recording in recorded.RECORDINGS


def test_a_set_of_recordings_is_whole() -> None:
    """Of a GPU, all of the CUTLASS kernels' or none, and all others or none."""
    for gpu in {path.stem.split("-")[0] for path in FUSED + CUTLASS + PRODUCTS}:
        for found, ours in ((CUTLASS, True), (FUSED + PRODUCTS, False)):
            there = {path.stem for path in found if path.stem.startswith(f"{gpu}-")}
            whole = {f"{gpu}-{r.name}" for r in recorded.RECORDINGS if r.of.startswith("cutlass") == ours}
            assert there in (set(), whole)


def test_inputs_are_pinned() -> None:
    """Rows are drawn alone or together, here as on the machine that recorded."""
    for recording, wanted in PINNED.items():
        whole = recorded.draw(recording, "up")
        assert torch.equal(whole[3:6].view(torch.int16), recorded.draw(recording, "up", [3, 4, 5]).view(torch.int16))
        assert recorded.checksum(recording) == wanted


PINNED = {
    recorded.Recording("triton.fused", 40, 30, 100, family, seed, 40, 30): wanted
    for seed, (family, wanted) in enumerate({"normal": 2395709581, "wide": 2697717517, "special": 404075255}.items())
}


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    recording = recorded.Recording("torch.mm", 9, 7, 16, "special", 1, 3, 2)
    words = {"fp32": torch.tensor([[1.5, -0.0]]), "bf16": torch.tensor([[torch.nan, 2.0]]).bfloat16()}
    vectors = recorded.load(recorded.save(tmp_path, "h200", recording, words, splits={"fp32": None}))
    assert vectors.recording == recording
    assert vectors.about["splits"] == {"fp32": None}
    for name, tensor in words.items():
        assert vectors.words[name].dtype == tensor.dtype
        assert torch.equal(vectors.words[name].view(torch.int16), tensor.view(torch.int16))
    rows, columns = recording.kept()
    assert (rows.tolist(), columns.tolist()) == ([0, 4, 8], [0, 6])
