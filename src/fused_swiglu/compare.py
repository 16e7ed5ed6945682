"""compare: kernels side by side on the same operands, each checked against the exact result, all timed together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from . import timing
from .bench import Bench, Progress, Steps, default_device
from .errors import ArgumentError
from .numerics import TOLERANCES, Tolerances
from .plan import Candidate, Case, Plan, plan
from .problem import Problem
from .results import Environment, Row

BASELINES = ("torch.eager", "cublas.gemm", "quack.gated")


def compare(
    cases: Problem | Case | Iterable[Problem | Case],
    kernels: Sequence[str] = ("*",),
    configs: Sequence[str] = (),
    arithmetics: Sequence[str] = (),
    *,
    inputs: str = "normal",
    seed: int = 0,
    regime: str = "burst",
    tolerances: Tolerances = TOLERANCES,
    device: torch.device | None = None,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """`run` on what `plan` makes of the arguments; raises what they raise, before it yields. device: a GPU if None
    and there is one."""
    device = device or default_device()
    work = plan(cases, kernels, configs, arithmetics, inputs=inputs, device=device)
    return run(
        work,
        device=device,
        seed=seed,
        regime=regime,
        tolerances=tolerances,
        environment=environment,
        progress=progress,
    )


def run(
    work: Plan,
    *,
    device: torch.device,
    seed: int = 0,
    regime: str = "burst",
    tolerances: Tolerances = TOLERANCES,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Runs, checks and times what `plan` gave; yields each Row once it is known.

    Per case: every kernel runs on the same operands (drawn from `seed`) and its output is compared with the exact
    result, on sampled rows where the output is large; then all that passed are timed together under `regime`.
    A kernel that cannot run is a row `unsupported`, one that raises, or leaves outputs unwritten, a row `failed`;
    the rest go on. On KeyboardInterrupt, rows that were checked and not yet timed come first, then it is raised.
    tolerances: pairs (rtol, atol) for M2. environment: gives the rows their run id and the measured peak; collected if
    None.

    Raises ArgumentError for an unknown regime.
    """
    if regime not in timing.REGIMES:
        raise ArgumentError("regime", f"unknown {regime!r}", f"choose from {', '.join(timing.REGIMES)}")
    environment = environment or Environment.collect(device)
    steps = Steps(sum(len(candidates) + 1 for _, candidates in work), progress)
    return (
        row
        for case, candidates in work
        for row in _case_rows(Bench(case, seed, device, environment, tolerances=tolerances), candidates, regime, steps)
    )


def _case_rows(bench: Bench, candidates: list[Candidate], regime: str, steps: Steps) -> Iterator[Row]:
    passed: list[tuple[Row, timing.Variant]] = []
    try:
        for candidate in candidates:
            steps.next(f"checking {candidate.name}")
            row, variant = bench.attempt(candidate, bench.check)
            if variant and bench.problem.m and row.ran_on != "model":  # whose time says nothing of the kernel
                passed.append((row, variant))
            else:
                yield row
        steps.next(f"timing {len(passed)} variants")
        results = _measure([variant for _, variant in passed], bench.device, regime)
    except KeyboardInterrupt:
        yield from (replace(row, reason="interrupted before it was timed") for row, _ in passed)
        raise
    rows = {variant.key: row for row, variant in passed}
    for key, result in results:
        yield bench.timed(rows[key], result)


def _measure(
    variants: list[timing.Variant], device: torch.device, regime: str
) -> list[tuple[str, timing.Timing | Exception]]:
    """Times all variants in one go; if that raises as a whole, each of them has failed."""
    try:
        return timing.measure(variants, device, regime, BASELINES) if variants else []
    except Exception as error:
        return [(variant.key, error) for variant in variants]


def once(
    work: Plan, *, device: torch.device, seed: int = 0, environment: Environment, progress: Progress | None = None
) -> Iterator[Row]:
    """Launches one variant of each kernel once after a warm-up, for a profiler: neither checked nor timed.

    On a GPU the launch stands in an NVTX range named after the kernel.
    """
    steps = Steps(sum(len({c.name for c in candidates}) for _, candidates in work), progress)
    for case, candidates in work:
        bench = Bench(case, seed, device, environment, sets=1)
        for name in dict.fromkeys(c.name for c in candidates):
            steps.next(f"launching {name}")
            yield bench.attempt(next(c for c in candidates if c.name == name), bench.launch)[0]
