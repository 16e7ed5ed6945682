"""Records outputs of triton.fused, of cutlass.* and of cuBLAS on this GPU into tests/vectors, for tests that have none.

    python tests/gpu/record_vectors.py [FOLDER]

The accumulators of triton.fused are those of a kernel with its loop, its loads and its tiles, which stores them. A
product of cuBLAS's is recorded with its kernels' names, and with the number of K splits by which the model gives its
words: null where no number up to 16 does.
"""

# What a jitted function iterates over, only Triton's compiler knows.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `recorded` is

from recorded import FOLDER, RECORDINGS, Recording, draw, save

from fused_swiglu import Operands, Problem, Weights, registry
from fused_swiglu.numerics import differing
from triton_baselines import model
from triton_baselines.fused import LARGE
from triton_baselines.launching import operand, pair
from triton_baselines.tiles import load_pair, load_tile

DEVICE = torch.device("cuda", 0)
SPLITS = range(1, 17)


@triton.jit
def _accumulate(x, weights, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[M, 2 N]: gate's and up's accumulators, by triton.fused's loop."""
    tiles_n = tl.cdiv(N, BN)
    row, column = tl.program_id(0) // tiles_n * BM, tl.program_id(0) % tiles_n * BN
    both = tl.full((BM, 2 * BN), 0.0, tl.float32)
    for k in tl.range(0, K, BK):
        a = load_tile(x, row, k, M, K, K, BM, BK, True)
        b = load_pair(weights, column, k, N, K, 0, K, K, BN, BK, True)
        both = tl.dot(a, b.T, both)
    r, j = row + tl.arange(0, BM), tl.arange(0, 2 * BN)
    c = column + j % BN
    at = out + r[:, None] * 2 * N + (j // BN * N + c)[None, :]
    tl.store(at, both, mask=(r < M)[:, None] & (c < N)[None, :])


def record_fused(recording: Recording) -> tuple[dict[str, torch.Tensor], dict]:
    """All outputs of triton.fused under its largest tiles, and their accumulators."""
    m, n, k = recording.m, recording.n, recording.k
    x, gate, up = (draw(recording, name).to(DEVICE) for name in ("x", "gate", "up"))
    problem, kernel = Problem(m, n, k), registry.get_kernel("triton.fused")
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    weights = Weights.from_stacked(torch.cat((gate, up)))
    arithmetic = next(iter(kernel.arithmetics(problem)))
    compiled = kernel.compile(problem, LARGE, arithmetic, DEVICE)
    compiled.bind(Operands(x, weights, out)).run()
    sums = torch.full((m, 2 * n), torch.nan, device=DEVICE)
    _accumulate[(triton.cdiv(m, LARGE.bm) * triton.cdiv(n, LARGE.bn),)](
        operand(x, k, LARGE.bm, LARGE.bk, True), pair(weights.gate, weights.up, k, LARGE.bn, LARGE.bk), sums, m, n, k,
        BM=LARGE.bm, BN=LARGE.bn, BK=LARGE.bk, num_warps=LARGE.warps, num_stages=LARGE.stages,
    )  # fmt: skip
    words = {"gate": sums[:, :n], "up": sums[:, n:], "out": out}
    return words, {"config": str(LARGE), "arithmetic": str(compiled.arithmetic)}


def record_cutlass(recording: Recording) -> tuple[dict[str, torch.Tensor], dict]:
    """All outputs of a kernel's first geometry, and the accumulators of a debug build."""
    m, n, k = recording.m, recording.n, recording.k
    x, gate, up = (draw(recording, name).to(DEVICE) for name in ("x", "gate", "up"))
    problem, kernel = Problem(m, n, k), registry.get_kernel(recording.of)
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    config, arithmetic = kernel.table()[0], next(iter(kernel.arithmetics(problem)))
    operands = Operands(x, Weights.from_stacked(torch.cat((gate, up))), out)
    kernel.compile(problem, config, arithmetic, DEVICE).bind(operands).run()
    kept = out.clone()
    sums = kernel.accumulators(problem, config, arithmetic, operands)
    words = {"gate": sums[:, :n], "up": sums[:, n:], "out": kept}
    return words, {"config": str(config), "arithmetic": str(arithmetic)}


def record_mm(recording: Recording) -> tuple[dict[str, torch.Tensor], dict]:
    """cuBLAS's x @ gate.T in bf16 and in fp32: kernels, split counts, and the words that are kept."""
    x, gate = (draw(recording, name).to(DEVICE) for name in ("x", "gate"))
    rows, columns = (torch.from_numpy(kept).to(DEVICE) for kept in recording.kept())
    words, kernels, splits = {}, {}, {}
    for name, options in {"bf16": {}, "fp32": {"out_dtype": torch.float32}}.items():
        kernels[name], out = _profiled(lambda o=options: torch.mm(x, gate.T, **o))
        words[name] = out[rows][:, columns]
        splits[name] = _split_of(words[name], x[rows], gate[columns])
        print(f"{recording.name} {name}: {', '.join(kernels[name])}; splits of K: {splits[name]}")
    flag = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return words, {"kernels": kernels, "splits": splits, "bf16_reduction_allowed": flag}


def _profiled(call):
    """The names of the kernels that the call launches, and what it returns."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() or () if event.device_type.name == "CUDA"], out


def _split_of(words: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> int | None:
    for split in SPLITS:
        if not differing(model.accumulate(a, b, split_k=split).to(words.dtype), words).any():
            return split
    return None


RECORDERS = {"triton": record_fused, "cutlass": record_cutlass, "torch": record_mm}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name(DEVICE)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda, "ran_on": gpu}
    for recording in RECORDINGS:
        words, about = RECORDERS[recording.of.partition(".")[0]](recording)
        path = save(folder, gpu.split()[-1].lower(), recording, words, **versions, **about)
        print(f"{path.name}: {sum(w.numel() for w in words.values())} words, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
