"""ablate: the design space of the kernels, timed in groups that can be resumed; `effects` reads what came of it.

A group is what is timed together, in one process and with the references: variants of one problem, up to a limit. It
is a run of its own, with its own environment in the file of rows, and the unit that is resumed: a group of which every
row is there is not timed again. Variants of one tile are kept together where they fit, so that all but the effects of
the tile are of pairs that were timed round by round. The last group of a problem has the best variants of the groups
before it, timed anew: that the best of many was in luck no longer counts for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from . import compare, registry
from .bench import Bench, Progress
from .diff import REFERENCES
from .effects import Cell, cells
from .errors import ArgumentError
from .factors import RECIPE, TILE, Variant
from .numerics import TOLERANCES, Tolerances
from .plan import Candidate, Case, Plan, plan
from .results import Environment, Row

GROUP = 32  # variants, beside the references
SAME_ENVIRONMENT = ("gpu", "driver", "torch", "triton", "revision")


@dataclass(frozen=True)
class Space:
    """The variants of one problem: those to be timed in groups, the references to be timed with each group, and what
    cannot run here."""

    case: Case
    groups: tuple[tuple[Candidate, ...], ...]
    references: tuple[Candidate, ...]
    unsupported: tuple[Candidate, ...]

    @property
    def variants(self) -> list[Variant]:
        return [variant_of(candidate) for group in (*self.groups, self.unsupported) for candidate in group]


def variant_of(candidate: Candidate) -> Variant:
    role = candidate.kernel.role if candidate.kernel else None
    return Variant.of(candidate.name, role, candidate.config, candidate.arithmetic)


def design(
    work: Plan,
    *,
    device: torch.device,
    recipes: bool = True,
    vary: Sequence[tuple[str, Sequence[str]]] = (),
    group: int = GROUP,
) -> list[Space]:
    """A Space for each case of a plan that has the variants to begin with; nothing is computed yet.

    Added are variants of each kernel's first that can run here: under its other recipes, and with each field in `vary`
    at each of the values. group: how many variants are timed together, at most.

    Raises ArgumentError for a field that no kernel has, a value that cannot be read, and a group of less than 1.
    """
    if group < 1:
        raise ArgumentError("group", f"{group}", "give 1 or more")
    spaces = [_space(case, candidates, device, recipes, vary, group) for case, candidates in work]
    known = {f.name for _, candidates in work for c in candidates if c.config is not None for f in fields(c.config)}
    for name, _ in vary:
        if name not in known:
            raise ArgumentError("vary", f"no chosen kernel has {name!r}", f"choose from {', '.join(sorted(known))}")
    return spaces


def _space(
    case: Case,
    candidates: list[Candidate],
    device: torch.device,
    recipes: bool,
    vary: Sequence[tuple[str, Sequence[str]]],
    group: int,
) -> Space:
    known: dict[str, bool] = {}

    def runs(candidate: Candidate) -> bool:
        if candidate.key not in known:
            known[candidate.key] = _runs(case, candidate, device)
        return known[candidate.key]

    names = [name for name in REFERENCES if name in registry.kernel_names()]
    ((_, references),) = plan(case, names, device=device) if names else [(case, [])]
    asked = {c.key: c for c in candidates}
    for name in dict.fromkeys(c.name for c in candidates):
        first = next((c for c in candidates if c.name == name and runs(c)), None)
        if first and name not in REFERENCES:
            asked |= {c.key: c for c in _neighbours(case, first, recipes, vary)}
    for reference in references:
        asked.pop(reference.key, None)
    variants = [c for c in asked.values() if runs(c)]
    return Space(
        case,
        tuple(_groups(variants, group)),
        tuple(c for c in references if runs(c)),
        tuple(c for c in (*references, *asked.values()) if not runs(c)),
    )


def _runs(case: Case, candidate: Candidate, device: torch.device) -> bool:
    kernel, config, arithmetic = candidate.kernel, candidate.config, candidate.arithmetic
    if kernel is None or config is None or arithmetic is None:
        return False
    try:
        return kernel.why_not(case.problem, config, arithmetic, device) is None
    except Exception:
        return False  # the bench makes a row of it


def _neighbours(
    case: Case, first: Candidate, recipes: bool, vary: Sequence[tuple[str, Sequence[str]]]
) -> Iterator[Candidate]:
    kernel, config = first.kernel, first.config
    assert kernel is not None
    assert config is not None
    for arithmetic in kernel.arithmetics(case.problem) if recipes else ():
        yield replace(first, arithmetic=arithmetic)
    for name, values in vary:
        if name in {f.name for f in fields(config)}:
            for value in values:
                pairs = dict(pair.split("=", 1) for pair in str(config).split(",")) | {name: value}
                text = ",".join(f"{field}={text}" for field, text in pairs.items())
                try:
                    yield replace(first, config=type(config).parse(text))
                except ArgumentError as error:
                    raise ArgumentError("vary", error.wrong, error.remedy) from None


def _groups(candidates: list[Candidate], limit: int) -> Iterator[tuple[Candidate, ...]]:
    """At most `limit` in each; those of one tile together if there are no more."""
    tiles: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        tiles.setdefault(variant_of(candidate).levels.get(TILE, candidate.name), []).append(candidate)
    group: list[Candidate] = []
    for members in tiles.values():
        parts = -(-len(members) // limit)
        for i in range(parts):
            part = members[len(members) * i // parts : len(members) * (i + 1) // parts]
            if len(group) + len(part) > limit:
                yield tuple(group)
                group = []
            group += part
    if group:
        yield tuple(group)


def run(
    spaces: Iterable[Space],
    *,
    device: torch.device,
    environment: Environment,
    stored: Iterable[Row] = (),
    seed: int = 0,
    regime: str = "burst",
    tolerances: Tolerances = TOLERANCES,
    progress: Progress | None = None,
) -> Iterator[Environment | Row]:
    """Times every group that `stored` has not whole: for each, first its environment (a copy of that given, as a run of
    its own), then its rows as `compare.run` gives them; then the best of each kernel and recipe anew. What cannot
    run is a row `unsupported`.

    stored: rows of the same environment (`same_environment`), which count as done.
    """
    held = [row for row in stored if row.seed == seed and row.regime in (regime, None)]
    spaces = list(spaces)
    total = sum(len(space.groups) + 1 for space in spaces)
    done = 0

    def told(so_far: int, steps: int, what: str) -> None:
        if progress:
            progress(100 * done + 100 * so_far // steps, 100 * total, f"group {done + 1} of {total}: {what}")

    def timed(case: Case, group: Sequence[Candidate]) -> Iterator[Environment | Row]:
        nonlocal held
        if not _whole(held, case, group):
            own = _run_of_its_own(environment)
            yield own
            for row in compare.run(
                [(case, list(group))],
                device=device,
                seed=seed,
                regime=regime,
                tolerances=tolerances,
                environment=own,
                progress=told,
            ):
                held.append(row)
                yield row

    for space in spaces:
        yield from _refused(space, held, seed, device, environment)
        for group in space.groups:
            yield from timed(space.case, (*space.references, *group))
            done += 1
        finalists = _finalists(space, held)
        if finalists:
            yield from timed(space.case, (*space.references, *finalists))
        done += 1


def _run_of_its_own(environment: Environment) -> Environment:
    new = Environment()
    return replace(environment, run=new.run, date=new.date)


def same_environment(rows: Iterable[Row], environments: Iterable[Environment], now: Environment) -> list[Row]:
    """The rows of runs on the same GPU, driver, torch, triton and revision as now: what a resumed study builds on."""
    alike = {e.run for e in environments if all(getattr(e, name) == getattr(now, name) for name in SAME_ENVIRONMENT)}
    return [row for row in rows if row.run in alike]


def _of_case(rows: Iterable[Row], case: Case) -> list[Row]:
    names = ("m", "n", "k", "dtype", "activation", "bias", "layout")
    wanted = [*(getattr(case.problem, name) for name in names), case.source or case.family]
    return [row for row in rows if [*(getattr(row, name) for name in names), row.inputs] == wanted]


def _identity(kernel: str, config: object, arithmetic: object) -> tuple[str, str, str]:
    """A row may say of an arithmetic that less is declared than was asked for; the recipe stays."""
    return kernel, str(config), [*str(arithmetic).split(":"), ""][1]


def _whole(held: Iterable[Row], case: Case, group: Sequence[Candidate]) -> bool:
    """Whether some run timed just these, and all were ok."""
    wanted = Counter(_identity(c.name, c.config, c.arithmetic) for c in group)
    runs: dict[str | None, list[Row]] = {}
    for row in _of_case(held, case):
        runs.setdefault(row.run, []).append(row)
    return any(
        all(row.status == "ok" and row.time_us for row in rows)
        and Counter(_identity(*key) for key in {(r.kernel, r.config, r.arithmetic) for r in rows}) == wanted
        for rows in runs.values()
    )


def _refused(
    space: Space, held: list[Row], seed: int, device: torch.device, environment: Environment
) -> Iterator[Environment | Row]:
    """A row for each that cannot run, unless it is held."""
    own = _run_of_its_own(environment)
    bench = Bench(space.case, seed, device, own)
    rows = [bench.attempt(candidate, bench.check)[0] for candidate in space.unsupported]
    known = {(r.kernel, r.config, r.arithmetic, r.reason) for r in _of_case(held, space.case) if r.status != "ok"}
    new = [row for row in rows if (row.kernel, row.config, row.arithmetic, row.reason) not in known]
    if new:
        yield own
        yield from new


def _finalists(space: Space, held: list[Row]) -> list[Candidate]:
    """The best variant of each level of fusion and each recipe, of kernels with an activation; none where that is all
    there are, or one."""
    candidates = {
        _identity(c.name, c.config, c.arithmetic): c
        for group in space.groups
        for c in group
        if RECIPE in variant_of(c).levels
    }
    found: dict[str, Candidate] = {}
    for cell in cells(_of_case(held, space.case)):
        for variant in _bests(cell):
            if candidate := candidates.get(_identity(*variant.key)):
                found[candidate.key] = candidate
    return list(found.values()) if 1 < len(found) < sum(map(len, space.groups)) else []


def _bests(cell: Cell) -> list[Variant]:
    levels: dict[tuple[str, str], list[Variant]] = {}
    for variant in cell.rows:
        if RECIPE in variant.levels:
            levels.setdefault((cell.design.level(variant, "fusion"), variant.context), []).append(variant)
    return [best for variants in levels.values() if (best := cell.best(variants))]
