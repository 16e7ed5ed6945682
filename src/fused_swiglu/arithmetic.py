"""Arithmetic: what the bits of a kernel are. Chosen by the user; no tuner varies it."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ArgumentError

UNDECLARED = "undeclared"
ACCUMULATIONS = ("sm90", UNDECLARED)
RECIPES = ("ieee", "ex2", "tanh", "poly3", "none", UNDECLARED)
ROUNDS = ("gate", "up", "act")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The declaration that predicts a kernel's output to the bit, as far as its author can give one.

    accumulation: `sm90`: Hopper's tensor-core step, one chain over ascending k (the rule is in `sm90`'s model);
        or `undeclared` where a library chooses.
    split_k: how many chains are added in fp32 at the end; 1 is a single chain.
    recipe: how the activation is computed in fp32 (`recipes`): `ieee`, `ex2`, `tanh` or `poly3`; `none` for a kernel
        without one.
    rounds: which fp32 intermediates are rounded to the output dtype before they are used: `gate` and `up` (the
        accumulators), `act` (the activated gate). The output is always rounded once, to nearest even.
    """

    accumulation: str = "sm90"
    recipe: str = "ieee"
    rounds: tuple[str, ...] = ()
    split_k: int = 1

    def __post_init__(self) -> None:
        if self.accumulation not in ACCUMULATIONS:
            raise ArgumentError("accumulation", f"unknown {self.accumulation!r}", f"choose from {ACCUMULATIONS}")
        if self.recipe not in RECIPES:
            raise ArgumentError("recipe", f"unknown {self.recipe!r}", f"choose from {', '.join(RECIPES)}")
        if tuple(r for r in ROUNDS if r in self.rounds) != self.rounds:
            raise ArgumentError("rounds", f"{self.rounds}", f"give a subset of {ROUNDS}, in that order")
        if self.split_k < 1:
            raise ArgumentError("split_k", f"{self.split_k}", "give 1 or more")

    @property
    def complete(self) -> bool:
        """Whether the output bits follow from this declaration alone."""
        return UNDECLARED not in (self.accumulation, self.recipe)

    def __str__(self) -> str:
        chain = self.accumulation + (f"*{self.split_k}" if self.split_k > 1 else "")
        return f"{chain}:{self.recipe}:{'+'.join((*self.rounds, 'out'))}"

    @classmethod
    def parse(cls, text: str) -> Arithmetic:
        """The Arithmetic whose `str` is `text`, such as `sm90:ieee:out` or `undeclared:undeclared:gate+up+act+out`."""
        try:
            chain, recipe, rounds = text.split(":")
            accumulation, _, split = chain.partition("*")
            *intermediates, last = rounds.split("+")
            if last != "out":
                raise ValueError
            return cls(accumulation, recipe, tuple(intermediates), int(split or 1))
        except ArgumentError:
            raise
        except ValueError:
            raise ArgumentError(
                "arithmetic", f"cannot read {text!r}", "write accumulation:recipe:roundings, as in sm90:ieee:out"
            ) from None
