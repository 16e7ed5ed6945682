"""Recorded GPU outputs in tests/vectors: what was computed, its inputs redrawn from a seed, and the files' format.

tests/gpu/record_vectors.py writes the files, tests/test_vectors.py compares them with the model.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "vectors"


@dataclass(frozen=True, slots=True)
class Recording:
    """One file: a problem, whose `rows` x `columns` outputs were kept, evenly spread with the first and the last.

    of: triton.fused or cutlass.* (`gate` and `up`: the fp32 accumulators; `out`: bf16), or torch.mm (`fp32` and
    `bf16`: x @ gate.T).
    """

    of: str
    m: int
    n: int
    k: int
    family: str
    seed: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.of.replace('.', '-')}-{self.m}-{self.n}-{self.k}-{self.family}"

    def kept(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of the rows and of the columns."""
        pairs = (self.m, self.rows), (self.n, self.columns)
        first, second = (np.arange(count) * (size - 1) // (count - 1) for size, count in pairs)
        return first, second


RECORDINGS = (
    *(
        # Tiles of 128 x 128, and parts of such at both edges.
        Recording("triton.fused", 300, 272, k, family, seed, 300, 272)
        for seed, (k, family) in enumerate(((896, "normal"), (3584, "normal"), (8192, "wide")))
    ),
    Recording("triton.fused", 130, 136, 896, "special", 3, 130, 136),
    *(
        Recording("torch.mm", size, size, k, family, seed, 192, 192)
        for size in (256, 4096)
        for seed, (k, family) in enumerate(((896, "normal"), (3584, "normal"), (8192, "wide")))
    ),
    Recording("torch.mm", 256, 256, 896, "special", 3, 192, 192),
    *(
        Recording(of, 130, 136, k, family, seed, 130, 136)
        for of in ("cutlass.pingpong", "cutlass.evt", "cutlass.interleaved")
        for seed, (k, family) in enumerate(((896, "normal"), (8192, "wide"), (904, "special")), 4)
    ),
)

Draw = Callable[[NDArray[np.uint64]], NDArray[np.float64]]  # values from random words, one from each


def _normal(exponent: int) -> Draw:
    """About N(0, 1.15 * 2^exponent): sums of four uniform numbers."""

    def draw(words: NDArray[np.uint64]) -> NDArray[np.float64]:
        total = words.view(np.uint16).reshape(-1, 4).sum(1, dtype=np.int64) - 2 * 0xFFFF
        return np.ldexp(total.astype(np.float64), exponent - 15)

    return draw


def _wide(bottom: int) -> Draw:
    """Random signs and significands, exponents uniform in bottom to bottom + 31."""

    def draw(words: NDArray[np.uint64]) -> NDArray[np.float64]:
        w = words.astype(np.int64)
        value = np.ldexp(1 + (w & 127) / 128, bottom + (w >> 7 & 31).astype(np.int32))
        return np.where(w >> 12 & 1, -value, value)

    return draw


# of x, w_gate and w_up; `special` puts an infinity, a NaN or bf16's largest number into every eighth row of each
FAMILIES: dict[str, tuple[Draw, Draw, Draw]] = {
    "normal": (_normal(0), _normal(-6), _normal(-6)),
    "wide": (_wide(-16), _wide(-46), _wide(-46)),
    "special": (_normal(0), _normal(-6), _wide(-160)),  # up: subnormals, of bf16 and of fp32
}
_ODD = (np.inf, -np.inf, np.nan, 3.3895313892515355e38)


def draw(recording: Recording, matrix: str, rows: Sequence[int] | NDArray[np.int64] | None = None) -> torch.Tensor:
    """Those rows (all without) of x, gate or up, bf16 [rows, k]: the same on every machine.

    Each row comes from a Philox stream of its own, whose words NumPy keeps over versions, by exact operations.
    """
    which = ("x", "gate", "up").index(matrix)
    value_of = FAMILIES[recording.family][which]
    if rows is None:
        rows = np.arange(recording.m if matrix == "x" else recording.n)
    drawn = np.empty((len(rows), recording.k), np.float32)
    for into, row in zip(drawn, rows, strict=True):
        words = np.random.Philox(key=(recording.seed << 66) + (which << 64) + int(row)).random_raw(recording.k + 1)
        into[:] = value_of(words[:-1])
        last = int(words[-1])
        if recording.family == "special" and last % 8 == 0:
            into[last // 32 % recording.k] = _ODD[last // 8 % 4]
    return torch.from_numpy(drawn).bfloat16()


def checksum(recording: Recording) -> int:
    """Of the inputs that the kept outputs depend on."""
    rows, columns = recording.kept()
    parts = draw(recording, "x", rows), draw(recording, "gate", columns), draw(recording, "up", columns)
    total = 0
    for part in parts:
        total = zlib.crc32(part.view(torch.int16).numpy().tobytes(), total)
    return total


def save(folder: Path, gpu: str, recording: Recording, words: dict[str, torch.Tensor], **about: Any) -> Path:
    """words: bf16 and fp32 tensors, kept as unsigned integers. about: how they were made, as JSON."""
    path = folder / f"{gpu}-{recording.name}.npz"
    integers = {torch.bfloat16: (torch.int16, np.uint16), torch.float32: (torch.int32, np.uint32)}
    arrays = {}
    for name, tensor in words.items():
        signed, unsigned = integers[tensor.dtype]
        arrays[name] = tensor.cpu().contiguous().view(signed).numpy().view(unsigned)
    about = {"recording": asdict(recording), "checksum": checksum(recording), **about}
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)
    return path


@dataclass(frozen=True)
class Recorded:
    """A file's content: what it is of, how it was made, its words as bf16 and fp32 tensors."""

    recording: Recording
    about: dict[str, Any]
    words: dict[str, torch.Tensor]


def load(path: Path) -> Recorded:
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        words = {}
        for name in set(file.files) - {"about"}:
            array = file[name]
            signed, dtype = {2: (np.int16, torch.bfloat16), 4: (np.int32, torch.float32)}[array.itemsize]
            words[name] = torch.from_numpy(array.view(signed)).view(dtype)
    return Recorded(Recording(**about.pop("recording")), about, words)
