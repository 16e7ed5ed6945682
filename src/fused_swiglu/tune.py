"""tune: times the candidates for a problem, and keeps the quickest for `swiglu` to pick."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import torch

from . import choice, select, timing, tuned
from .arithmetic import Arithmetic
from .bench import Bench, Built, Progress, Steps, synchronize
from .config import Config
from .intervals import FASTER, Interval, paired_ratio, verdict
from .kernel import Kernel
from .plan import Candidate, Case
from .problem import Problem
from .results import Environment, Row

OF_EACH_KERNEL = 6
"""So many of a kernel's configs are timed: those that it thinks best."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found for one problem.

    heuristic, quickest: both the heuristic's pick, unless another is distinguishably quicker. ratio: of the quickest's
    time to the heuristic's, in the same rounds. rows: one for each candidate. left_out: configs that would have to be
    compiled."""

    problem: Problem
    heuristic: Candidate
    quickest: Candidate
    heuristic_us: float
    time_us: float
    ratio: Interval
    rows: tuple[Row, ...]
    left_out: int


def tune(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> None:
    """Searches, unless a pick is known. Raises as `search` does."""
    if problem.m and tuned.find(problem, arithmetic, device) is None:
        search(problem, arithmetic, device)


def search(
    problem: Problem,
    arithmetic: Arithmetic,
    device: torch.device,
    *,
    compile_jobs: int = 0,
    seed: int = 0,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Times the candidates in turns, in bursts on rotated buffers so that the L2 cache is cold, by graph replay where
    launches are short; each must give the bits of the heuristic's pick. Keeps the quickest (`tuned`).

    The heuristic's pick is compiled if need be. compile_jobs: how many of the other candidates are compiled at a time;
    with 0 only those take part that are built. Operands are drawn from `seed`. environment: of the rows.
    Raises ArgumentError where no kernel takes the problem, RuntimeError where the heuristic's pick cannot be timed.
    """
    posed = replace(problem, outputs=("out",))  # the pre-activations' store is the same for all
    candidates = _candidates(posed, arithmetic, device)
    if not candidates:
        raise choice.refused(posed, arithmetic, device)
    first = candidates[0]
    if compile_jobs:
        _compile(candidates, posed, device, compile_jobs)
    ready = [c for c in candidates if c is first or _is_built(c, posed)]
    bench = Bench(Case(posed), seed, device, environment or Environment())
    bits = _Bits(device)
    steps = Steps(len(ready) + 1, progress)
    rows: dict[str, Row] = {}
    variants = []
    for candidate in ready:
        steps.next(f"running {candidate.name}")
        rows[candidate.key], variant = bench.attempt(candidate, bits.same)
        variants += [variant] if variant else []
        if not variants:
            raise RuntimeError(f"{first.key} cannot be timed: {rows[first.key].reason}")
    steps.next(f"timing {len(variants)} candidates")
    times: dict[str, timing.Timing] = {}
    for key, result in timing.measure(variants, device):
        rows[key] = bench.timed(rows[key], result)
        if isinstance(result, timing.Timing):
            times[key] = result
    if first.key not in times:
        raise RuntimeError(f"{first.key} cannot be timed: {rows[first.key].reason}")
    best = min(times, key=lambda key: times[key].time_us)
    ratio = paired_ratio(times[best].rounds, times[first.key].rounds)
    if verdict(ratio) != FASTER:
        best, ratio = first.key, (1.0, 1.0, 1.0)
    quickest = next(c for c in ready if c.key == best)
    found = Tuning(
        problem, first, quickest, times[first.key].time_us, times[best].time_us, ratio, tuple(rows.values()),
        left_out=len(candidates) - len(ready),
    )  # fmt: skip
    pick = tuned.Pick(quickest.name, str(quickest.config), problem.m, found.time_us, found.heuristic_us)
    tuned.keep(problem, arithmetic, device, pick)
    select.forget()
    return found


def _candidates(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> list[Candidate]:
    """The heuristic's pick first; of each kernel the configs that it thinks best."""
    found: list[Candidate] = []
    for _, of_one in groupby(choice.candidates(problem, arithmetic, device), key=lambda pick: pick[0].name):
        found += [
            Candidate(kernel.name, kernel, config, arithmetic) for kernel, config in islice(of_one, OF_EACH_KERNEL)
        ]
    return found


def _parts(candidate: Candidate) -> tuple[Kernel, Config, Arithmetic]:
    """Which a candidate may lack that could not be asked; those here could."""
    assert candidate.kernel
    assert candidate.config is not None
    assert candidate.arithmetic
    return candidate.kernel, candidate.config, candidate.arithmetic


def _is_built(candidate: Candidate, problem: Problem) -> bool:
    kernel, config, arithmetic = _parts(candidate)
    return kernel.is_built(problem, config, arithmetic)


def _compile(candidates: Iterable[Candidate], problem: Problem, device: torch.device, jobs: int) -> None:
    """Those that are not built; what cannot be is seen later."""

    def one(candidate: Candidate) -> None:
        kernel, config, arithmetic = _parts(candidate)
        with suppress(Exception):
            kernel.compile(problem, config, arithmetic, device)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [c for c in candidates if not _is_built(c, problem)]))


class _Bits:
    """A test for `Bench.attempt`: all that are tested write the same bits, everywhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.Tensor | None = None

    def same(self, built: Built) -> dict[str, Any]:
        if built.compiled.arithmetic != built.arithmetic:
            raise RuntimeError(f"does {built.compiled.arithmetic} here, not {built.arithmetic}")
        built.bound.run().fill_(torch.nan)
        words = built.bound.run().view(torch.int16)
        synchronize(self._device)
        if self._first is None:
            self._first = words.clone()
        elif not torch.equal(words, self._first):
            raise RuntimeError(f"{int((words != self._first).sum())} of its outputs are not the heuristic's pick's")
        return {}
