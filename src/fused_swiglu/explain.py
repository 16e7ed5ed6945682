"""explain: for each kernel the attribution ladder (`ladder`): which step of its arithmetic flips which outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from .arithmetic import Arithmetic
from .bench import Bench, Built, Progress, Steps, sampled_rows
from .ladder import Ladder, Models
from .numerics import TOLERANCES, Tolerances
from .plan import Plan
from .results import Environment, Row

SAMPLES = {"cpu": 2**16, "cuda": 2**22}  # outputs of each case that are explained, unless told


def explain(
    work: Plan,
    *,
    device: torch.device,
    seed: int = 0,
    sample: int | None = None,
    tolerances: Tolerances = TOLERANCES,
    environment: Environment,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """A Row for each rung of each candidate's ladder, from the exact result up to the kernel's own output (`rest`).

    rung, flipped: its name, and the share of outputs that flip there. hypothesis: what the rungs are of: the build's
    own declaration, or, where that leaves something open, what explains most. M1 and M2: of the rung's model, and at
    `rest` of the kernel. m0, at `rest`: where it is defined. reason, at `rest`: how the hypothesis was found.

    sample: about so many outputs of each case, in whole rows drawn by the seed; by default `SAMPLES`. A candidate that
    does not run has one row, which says why.
    """
    steps = Steps(sum(len(candidates) for _, candidates in work), progress)
    for case, candidates in work:
        bench = Bench(case, seed, device, environment, sets=1, tolerances=tolerances)
        bench.rows = sampled_rows(case.problem, sample or SAMPLES.get(device.type, 2**16), seed)
        models: list[Models] = []  # made with the operands
        for candidate in candidates:
            steps.next(f"explaining {candidate.name}")
            found: list[tuple[Built, Ladder]] = []
            row, _ = bench.attempt(candidate, lambda built, b=bench, m=models, f=found: _climb(b, built, m, f))
            if row.status != "ok" or not found:
                models.clear()  # what failed may have overwritten the operands
                yield row
                continue
            yield from _rows(row, *found[0])


def unexplained(row: Row) -> bool:
    """Whether the row is a `rest` of outputs whose bits a complete declaration does not give."""
    declared = row.arithmetic is not None and Arithmetic.parse(row.arithmetic).complete
    return row.rung == "rest" and declared and bool(row.flipped)


def _climb(bench: Bench, built: Built, models: list[Models], found: list[tuple[Built, Ladder]]) -> dict[str, Any]:
    out, known = bench.checked(built)
    if not bench.problem.m:
        return known
    if not models:
        x, weights = bench.operands()[0]
        models.append(
            Models(
                x,
                weights,
                bench.problem.activation,
                rows=bench.rows,
                exact=lambda computes, dtype: bench.exact(computes),
                tolerances=bench.tolerances,
            )
        )
    found.append((built, models[0].ladder(out, built.compiled.arithmetic, built.kernel.computes)))
    return known


def _rows(row: Row, built: Built, found: Ladder) -> Iterator[Row]:
    for rung in found.rungs:
        step: dict[str, Any] = {"rung": rung.name, "flipped": rung.flipped, "hypothesis": str(found.hypothesis)}
        if rung.name == "rest":
            step["reason"] = found.note
            if built.compiled.ran_on is None and built.compiled.arithmetic.complete and row.ran_on != "cpu":
                step["m0"] = rung.flipped
        yield replace(row, **asdict(rung.found), **step)
