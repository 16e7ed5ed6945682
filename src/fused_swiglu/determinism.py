"""determinism: whether a row's bits change with the number of rows around it and from run to run, and what time each
kernel takes beside the others. What the rows say together: determinism_lines.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .bench import Bench, Built, Progress, Steps, sampled_rows
from .compare import _case_rows
from .determinism_lines import with_several_configs
from .errors import ArgumentError
from .inputs import make_inputs
from .numerics import TOLERANCES, Tolerances, bits_differ
from .plan import Case, Plan
from .results import Environment, Row

TOKENS = tuple(2**exponent for exponent in range(14))  # 1 to 8192
CHECKED = 2**18  # outputs of each case that are compared with the exact result


def determinism(
    work: Plan,
    *,
    device: torch.device,
    seed: int = 0,
    repeats: int = 3,
    tolerances: Tolerances = TOLERANCES,
    environment: Environment,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """A Row for each candidate of the plan, checked (M1, M2) and timed as by `compare`, in bursts, with:

    - first_m, batch: the share of the first row's words that differ from those at the first m of the plan at which the
      kernel ran. Cases that are alike but for m make a range: they share the weights, and each one's x is the first
      rows of the largest one's. At each m a kernel runs by the config that the plan gives it there.
    - run_to_run: share of words that change over `repeats` more runs on the same operands; None without any.

    `check.broken` says which rows contradict their declaration. Raises ArgumentError, before any work, for a range of
    one m, and for an m of 0.
    """
    alike = families(work)
    steps = Steps(sum(len(candidates) + 1 for _, candidates in work), progress)

    def rows() -> Iterator[Row]:
        for family in alike:
            known = _Known(repeats, _several(family))
            for case, candidates in _nested(family, seed, device):
                bench = _Bench(known, case, seed, device, environment, tolerances)
                for row in _case_rows(bench, candidates, "burst", steps):
                    yield row if row.first_m else replace(row, first_m=family[0][0].problem.m)

    return rows()


def families(work: Plan) -> list[Plan]:
    """The plan's cases that are alike but for m, together. Raises ArgumentError as `determinism` does."""
    found: dict[tuple, Plan] = {}
    for case, candidates in work:
        key = (replace(case.problem, m=0), case.family, case.source)
        found.setdefault(key, []).append((case, candidates))
    for family in found.values():
        sizes = {case.problem.m for case, _ in family}
        if len(sizes) < 2 or 0 in sizes:
            wrong = f"{', '.join(map(str, sorted(sizes)))} rows: no row's change could be seen"
            raise ArgumentError("tokens", wrong, "give two numbers or more, none of them 0, such as 1 64 4096")
    return list(found.values())


def _several(family: Plan) -> set[tuple[str, str]]:
    return with_several_configs(
        (c.name, str(c.arithmetic), case.problem.m, str(c.config)) for case, candidates in family for c in candidates
    )


def _nested(family: Plan, seed: int, device: torch.device) -> Plan:
    """The cases with their operands: the same weights, and as x the first rows of one."""
    largest = max((case for case, _ in family), key=lambda case: case.problem.m)
    x, weights = largest.x, largest.weights
    if x is None or weights is None:
        drawn = make_inputs(largest.problem, largest.family, seed, device)
        x, weights = drawn.x if x is None else x, drawn.weights if weights is None else weights
    return [(replace(case, x=x[: case.problem.m], weights=weights), candidates) for case, candidates in family]


@dataclass(slots=True)
class _Known:
    """Of a range: the first row's words by what computed them, with their m. several: see `with_several_configs`."""

    repeats: int
    several: set[tuple[str, str]]
    words: dict[tuple[str, ...], tuple[int, torch.Tensor]] = field(default_factory=dict)


class _Bench(Bench):
    """Its check is also of repeats, and of the first row."""

    def __init__(
        self,
        known: _Known,
        case: Case,
        seed: int,
        device: torch.device,
        environment: Environment,
        tolerances: Tolerances,
    ) -> None:
        super().__init__(case, seed, device, environment, tolerances=tolerances)
        self.known, self.rows = known, sampled_rows(case.problem, CHECKED, seed)

    def check(self, built: Built) -> dict[str, Any]:
        out, found = self.checked(built)
        first, repeats = out.clone(), self.known.repeats
        changed = sum(bits_differ(built.bound.run(), first) for _ in range(repeats))
        name = (built.kernel.name, str(built.arithmetic))
        key = (*name, str(built.config)) if name in self.known.several else name
        m, words = self.known.words.setdefault(key, (self.problem.m, first[:1].clone()))
        return found | {
            "first_m": m,
            "batch": bits_differ(first[:1], words) / words.numel(),
            "run_to_run": changed / (repeats * first.numel()) if repeats else None,
        }
