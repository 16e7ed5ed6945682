"""factors: a variant as levels of factors, and which pairs of variants differ in one factor alone.

Factors come from a kernel's name and role, its config's fields and its arithmetic, so that any kernel takes part.
They are nested. A kernel's own fields (where Swish happens, say, in cutlass.pingpong) exist only within it: between
kernels they belong to the level of `fusion`. `recipe` exists only where there is an activation: between a kernel and
its control it belongs to the level of `activation`. `stages` follows what a stage holds: tiles and kernels are compared
with as many stages as each has at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .results import Row

FUSION, ACTIVATION, RECIPE, TILE, CLUSTER, STAGES = "fusion", "activation", "recipe", "tile", "cluster", "stages"
GEOMETRY = ("schedule", TILE, CLUSTER)  # what two kernels must both have, and alike, to be compared
COMMON = (FUSION, ACTIVATION, RECIPE, "accumulation", "rounds", *GEOMETRY, STAGES, "band")
ORDER = (FUSION, "swish", CLUSTER, "schedule", RECIPE, ACTIVATION, "band", TILE, STAGES)  # others come after
_STAGE = (TILE, "passes", "bk")  # what the bytes of a stage depend on
_JOINED = {TILE: ("bm", "bn"), CLUSTER: ("cluster_m", "cluster_n")}
_CONTROL = ".product"  # the same kernel without the activation, by this suffix


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel under a config and an arithmetic, by their ids, and its levels: factor -> level."""

    kernel: str
    config: str
    arithmetic: str
    levels: Mapping[str, str] = field(compare=False)

    @classmethod
    def of(cls, kernel: str, role: str | None, config: object, arithmetic: object) -> Variant:
        texts = str(config), str(arithmetic)
        return cls(kernel, *texts, _levels(kernel, role, *texts))

    @classmethod
    def of_row(cls, row: Row) -> Variant:
        return cls.of(row.kernel, row.role, row.config, row.arithmetic)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kernel, self.config, self.arithmetic

    @property
    def family(self) -> str:
        """The kernel, whose control without the activation belongs to it."""
        return self.levels[FUSION]

    @property
    def context(self) -> str:
        """The recipe, or that there is no activation: what an effect of another factor may depend on."""
        return self.levels.get(RECIPE, "no activation")

    @property
    def own(self) -> dict[str, str]:
        """Levels that exist within this kernel only."""
        return {name: level for name, level in self.levels.items() if name not in COMMON}


def _levels(kernel: str, role: str | None, config: str, arithmetic: str) -> dict[str, str]:
    values = dict(pair.split("=", 1) for pair in config.split(",") if "=" in pair)
    accumulation, recipe, rounds = [*arithmetic.split(":"), "", ""][:3]
    levels = {FUSION: kernel.removesuffix(_CONTROL), ACTIVATION: "off" if role == "control" else "on"}
    levels |= {"accumulation": accumulation, "rounds": rounds}
    if role != "control":
        levels[RECIPE] = recipe
    for name, parts in _JOINED.items():
        if all(part in values for part in parts):
            levels[name] = "x".join(values.pop(part) for part in parts)
    return levels | values


class Design:
    """Variants of one problem, looked at together.

    What a level is called, and whether a variant has as many stages as its like, depends on the others.
    """

    def __init__(self, variants: Iterable[Variant]) -> None:
        self.variants = tuple({variant.key: variant for variant in variants}.values())
        self._most: dict[tuple, float] = {}
        values: dict[tuple[str, str], set[str]] = {}
        for v in self.variants:
            self._most[_but_stages(v)] = max(self._most.get(_but_stages(v), 0.0), _stages(v))
            for name, level in v.own.items():
                values.setdefault((v.family, name), set()).add(level)
        self._varying = {key for key, levels in values.items() if len(levels) > 1}

    def level(self, variant: Variant, factor: str) -> str:
        """What a variant's level of a factor is called: with what is nested in it, as far as that varies."""
        if factor == FUSION:
            own = (f"{name}={v}" for name, v in variant.own.items() if (variant.family, name) in self._varying)
            return " ".join((variant.family, *own))
        if factor == ACTIVATION and RECIPE in variant.levels:
            return f"on ({variant.levels[RECIPE]})"
        return variant.levels[factor]

    def factor(self, a: Variant, b: Variant) -> str | None:
        """The one factor in which two variants differ, what is nested in it apart; None where there is none, or
        several."""
        apart = {name for name in {*a.levels, *b.levels} if a.levels.get(name) != b.levels.get(name)}
        if FUSION in apart:
            alike = all(name in a.levels and name in b.levels for name in GEOMETRY)
            nested = {STAGES, *a.own, *b.own}
            found = FUSION if alike and apart - nested == {FUSION} else None
        elif ACTIVATION in apart:
            found = ACTIVATION if apart - {RECIPE} == {ACTIVATION} else None
        else:
            rest = apart - {STAGES} if apart & {*_STAGE} else apart
            found = next(iter(rest)) if len(rest) == 1 else None
        if found != STAGES and STAGES in apart and not (self.fullest(a) and self.fullest(b)):
            return None
        return found

    def fullest(self, variant: Variant) -> bool:
        """Whether no variant that is otherwise alike has more stages."""
        return _stages(variant) == self._most[_but_stages(variant)]


def _stages(variant: Variant) -> float:
    """0 asks for as many as fit."""
    text = variant.levels.get(STAGES, "0")
    return float(text) if text.isdigit() and text != "0" else float("inf")


def _but_stages(variant: Variant) -> tuple:
    return variant.kernel, tuple(sorted(item for item in variant.levels.items() if item[0] != STAGES))


def rank(factor: str) -> tuple[int, str]:
    """For sorting factors."""
    return ORDER.index(factor) if factor in ORDER else len(ORDER), factor


def natural(text: str) -> list[tuple[int, int, str]]:
    """For sorting levels: numbers in them by value."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]
