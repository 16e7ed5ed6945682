"""check: whether kernels do what they declare: bits against the model, over repeats, alone and in batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from .arithmetic import Arithmetic
from .bench import Bench, Built, Progress, Steps
from .cores import execute, of_columns
from .errors import ArgumentError
from .numerics import TOLERANCES, Tolerances, differing
from .operands import Operands, Weights
from .plan import Plan
from .problem import DTYPES, address_alignment
from .recipes import is_exact
from .results import Environment, Row

BATCHES = (1, 7, 64, 4096)
SAMPLES = {"device": None, "numpy": 2**16}  # outputs that an executor predicts for each case, unless told
Executor = Callable[..., torch.Tensor]


@cache
def executor(device_type: str) -> Executor | None:
    """What predicts bits on that type of device, from the entry points `fused_swiglu.executors`; None without one."""
    for point in entry_points(group="fused_swiglu.executors", name=device_type):
        return point.load()
    return None


@dataclass(frozen=True, slots=True)
class _Predictor:
    """Predicts a case's outputs, or a sample of them; each arithmetic's once."""

    bench: Bench
    executor: str
    sample: int | None
    known: dict[Arithmetic, torch.Tensor] = field(default_factory=dict)

    def differing(self, built: Built, out: torch.Tensor) -> dict[str, Any]:
        """m0 and outputs; nothing where M0 is not defined."""
        arithmetic, problem = built.compiled.arithmetic, self.bench.problem
        numpy = self.executor == "numpy"
        predict = execute if numpy else executor(self.bench.device.type)
        defined = arithmetic.complete and built.compiled.ran_on is None and built.kernel.computes == "swiglu"
        if not predict or not defined or (numpy and not is_exact(problem.activation, arithmetic.recipe)):
            return {}
        x, weights = self.bench.operands()[0]
        if self.sample is not None and self.sample < out.numel():
            rows, columns = (numbers.to(out.device) for numbers in self.part(self.sample))
            x, weights, out = x[rows], of_columns(weights, columns), out[rows][:, columns]
        if arithmetic not in self.known:
            predicted = predict(arithmetic, x, weights, problem.activation, out_dtype=out.dtype)
            self.known[arithmetic] = predicted.to(out.device)
        return {"m0": _changed(self.known[arithmetic], [out]), "outputs": out.numel()}

    def part(self, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and columns, ascending, that have about so many outputs: as many of each if there are; the first, the
        last and others drawn by the seed."""
        m, n = self.bench.problem.m, self.bench.problem.n
        rows = min(m, max(math.isqrt(outputs), -(-outputs // n)))
        generator = torch.Generator().manual_seed(self.bench.seed)
        return _drawn(m, rows, generator), _drawn(n, min(n, -(-outputs // rows)), generator)


def _drawn(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    inner = 1 + torch.randperm(max(size - 2, 0), generator=generator)[: max(count - 2, 0)]
    return torch.cat((torch.tensor([0, size - 1])[: min(count, size)], inner)).sort().values


def check(
    work: Plan,
    *,
    device: torch.device,
    seed: int = 0,
    repeats: int = 3,
    executor: str = "device",
    sample: int | None = None,
    tolerances: Tolerances = TOLERANCES,
    environment: Environment,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """A Row for each candidate of the plan, with what `compare` checks (M1, M2) and:

    - m0: share of output words that differ from the prediction of the build's own declaration; only where it is
      complete and the kernel ran on a GPU. Predicted by the executor: `device`, on the GPU by what is installed for it,
      or `numpy`, on all cores, only for recipes that a CPU gives the bits of. sample: about so many outputs a case, at
      rows and columns drawn by the seed; without it `SAMPLES`, where None is all.
    - run_to_run: share of words that change over `repeats` more runs on the same operands.
    - batch: share of a row's words that change when it is computed among M = 1, 7, 64 and 4096 rows (those less than
      m), by what the kernel then runs by default under the same arithmetic: first, middle and last row.

    `broken` says which rows contradict their declaration. Raises ArgumentError for another executor.
    """
    if executor not in SAMPLES:
        raise ArgumentError("executor", f"unknown {executor!r}", f"choose from {', '.join(SAMPLES)}")
    sample = SAMPLES[executor] if sample is None else sample
    steps = Steps(sum(len(candidates) for _, candidates in work), progress)
    for case, candidates in work:
        bench = Bench(case, seed, device, environment, sets=1, tolerances=tolerances)
        predictor = _Predictor(bench, executor, sample)
        for candidate in candidates:
            steps.next(f"checking {candidate.name}")
            row, _ = bench.attempt(candidate, lambda built, b=bench, p=predictor: _verify(b, built, repeats, p))
            yield row


def broken(row: Row) -> bool:
    """Whether the row contradicts what its kernel declared: bits other than predicted, or bits that change at all
    under a complete arithmetic."""
    declared = row.arithmetic is not None and Arithmetic.parse(row.arithmetic).complete
    return bool(row.m0) or (declared and bool(row.run_to_run or row.batch))


def _verify(bench: Bench, built: Built, repeats: int, predictor: _Predictor) -> dict[str, Any]:
    out, known = bench.checked(built)
    if not bench.problem.m:
        return known
    first = out.clone()
    known["run_to_run"] = _changed(first, [built.bound.run() for _ in range(repeats)])
    known["batch"] = _batch(bench, built, first)
    return known | predictor.differing(built, first)


def _changed(first: torch.Tensor, others: list[torch.Tensor]) -> float:
    """Share of words of the others that differ; NaN equals NaN."""
    words = sum(other.numel() for other in others)
    return sum(int(differing(first, other).sum()) for other in others) / words if words else 0.0


def _batch(bench: Bench, built: Built, whole: torch.Tensor) -> float:
    x, weights = bench.operands()[0]
    m = bench.problem.m
    changed, words = 0, 0
    for size in (size for size in BATCHES if size < m):
        for row in sorted({0, m // 2, m - 1}):
            top = min(row, m - size)
            part = x[top : top + size]
            got = _among(bench, built, part, weights)[row - top]
            changed += int(differing(got[None], whole[row][None]).sum())
            words += got.numel()
    return changed / words if words else 0.0


def _among(bench: Bench, built: Built, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """The kernel's output for these rows alone, by the config that it takes for so many under the same arithmetic."""
    kernel = built.kernel
    problem = replace(bench.problem, m=len(x))
    out = torch.full(kernel.output_shape(problem), torch.nan, dtype=DTYPES[problem.out_dtype], device=x.device)
    problem = replace(problem, out_stride=out.shape[1], alignment=address_alignment(x, weights.gate, weights.up, out))
    config = next(iter(kernel.configs(problem)))
    compiled = kernel.compile(problem, config, built.arithmetic, bench.device)
    return compiled.bind(Operands(x, kernel.prepare(weights, problem, config), out)).run()
