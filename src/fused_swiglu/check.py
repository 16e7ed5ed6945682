"""check: whether kernels do what they declare: bits against the model, over repeats, alone and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from .arithmetic import Arithmetic
from .bench import Bench, Built, Progress, Steps
from .numerics import differing
from .operands import Operands, Weights
from .plan import Plan
from .problem import DTYPES, address_alignment
from .results import Environment, Row

BATCHES = (1, 7, 64, 4096)
Executor = Callable[..., torch.Tensor]


@cache
def executor(device_type: str) -> Executor | None:
    """What predicts bits on that type of device, from the entry points `fused_swiglu.executors`; None without one."""
    for point in entry_points(group="fused_swiglu.executors", name=device_type):
        return point.load()
    return None


def check(
    work: Plan,
    *,
    device: torch.device,
    seed: int = 0,
    repeats: int = 3,
    environment: Environment,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """A Row for each candidate of the plan, with what `compare` checks (M1, M2) and:

    - m0: share of all output words that differ from the prediction of the build's own declaration; only where it is
      complete and the kernel ran on a GPU whose model is installed.
    - run_to_run: share of words that change over `repeats` more runs on the same operands.
    - batch: share of a row's words that change when it is computed among M = 1, 7, 64 and 4096 rows (those less than
      m), by what the kernel then runs by default under the same arithmetic: first, middle and last row.

    `broken` says which rows contradict their declaration.
    """
    steps = Steps(sum(len(candidates) for _, candidates in work), progress)
    for case, candidates in work:
        bench = Bench(case, seed, device, environment, sets=1)
        predictions: dict[Arithmetic, torch.Tensor] = {}
        for candidate in candidates:
            steps.next(f"checking {candidate.name}")
            row, _ = bench.attempt(candidate, lambda built, b=bench, p=predictions: _verify(b, built, repeats, p))
            yield row


def broken(row: Row) -> bool:
    """Whether the row contradicts what its kernel declared: bits other than predicted, or bits that change at all
    under a complete arithmetic."""
    declared = row.arithmetic is not None and Arithmetic.parse(row.arithmetic).complete
    return bool(row.m0) or (declared and bool(row.run_to_run or row.batch))


def _verify(bench: Bench, built: Built, repeats: int, predictions: dict[Arithmetic, torch.Tensor]) -> dict[str, Any]:
    out, known = bench.checked(built)
    if not bench.problem.m:
        return known
    first = out.clone()
    known["run_to_run"] = _changed(first, [built.bound.run() for _ in range(repeats)])
    known["batch"] = _batch(bench, built, first)
    arithmetic, predict = built.compiled.arithmetic, executor(bench.device.type)
    if predict and arithmetic.complete and built.compiled.ran_on is None and built.kernel.computes == "swiglu":
        if arithmetic not in predictions:
            x, weights = bench.operands()[0]
            predictions[arithmetic] = predict(arithmetic, x, weights, bench.problem.activation, out_dtype=first.dtype)
        known["m0"] = _changed(predictions[arithmetic], [first])
        known["outputs"] = first.numel()
    return known


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
