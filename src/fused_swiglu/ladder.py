"""The attribution ladder of an output: which step, from the exact result to a kernel's arithmetic, flips which share.

Each rung is a model of the whole kernel: the rung before it with one step added.

- `exact`, on which the ladder stands: everything without error, rounded once to the output dtype.
- `chain`: gate and up are sums of the tensor cores, one truncating chain over ascending k (`sm90_rule`).
- `order`: the sums are in another order: `sm90*3`, say, three chains over parts of k that are added in fp32. Or they
  are no truncating chain at all: `fp32`, torch's fp32 GEMM on the same device; such a ladder has no rung `chain`.
- `recipe`: the activation by its recipe, and the product, in fp32. (Up to here both have no error.)
- `gate`, `up`, `act`: that intermediate is rounded to the output dtype, in this order.
- `rest`: the kernel itself.

An output flips at a rung if its value is not the previous rung's; -0 equals +0 there, and NaN equals NaN. At `rest` it
does if its bits are not: what no step explains, and under a complete declaration M0. A step that the kernel does not
take has no rung.

What a kernel leaves undeclared is found by trial: of the `hypotheses` that its declaration leaves open, the one with
the least rest; a later one replaces an earlier one if its rest is less than half.

    print(ladder(out, x, weights, Arithmetic("undeclared", "undeclared", ("gate", "up", "act"))))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import recipes, sm90
from .activations import IDENTITY, get_activation
from .arithmetic import ROUNDS, UNDECLARED, Arithmetic
from .errors import ArgumentError
from .numerics import TOLERANCES, Mismatch, Tolerances, differing, mismatch, ulp_distance
from .operands import Weights, problem_of
from .reference import Exact, exact, round_to
from .sm90 import finish

RUNGS = ("chain", "order", "recipe", "gate", "up", "act", "rest")
SPLITS = range(1, 17)
# Recipes that libraries may use, the likeliest first. `torch` is what its own operator does with fp32 on the device,
# `inductor` the code that torch.compile makes of that operator; the others are those of `recipes`.
TRIED = {"cpu": ("torch", "ieee"), "cuda": ("torch", "ex2", "inductor", "ieee", "tanh", "poly3")}
SUSPICIOUS = 0.01  # a rest from which on other rounding points are tried too: a rounding of bf16 flips far more
_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What a kernel may do: as an `Arithmetic`, but nothing is undeclared, `fp32` is an accumulation, `torch` and
    `inductor` are recipes."""

    accumulation: str
    split_k: int
    recipe: str
    rounds: tuple[str, ...]

    def __str__(self) -> str:
        chain = self.accumulation + (f"*{self.split_k}" if self.split_k > 1 else "")
        return f"{chain}:{self.recipe}:{'+'.join((*self.rounds, 'out'))}"


def hypotheses(declared: Arithmetic, k: int, device_type: str) -> list[Hypothesis]:
    """What the declaration leaves open, in the order in which it is tried: sums in `SPLITS` chains (fewer where k has
    not so many parts of 64) or in torch's fp32, that one first on a CPU; recipes of `TRIED`. Roundings are as declared.
    """
    sums = [(declared.accumulation, declared.split_k)]
    if declared.accumulation == UNDECLARED:
        parts = {-(-k // (64 * split)): split for split in reversed(SPLITS)}  # of several with equal parts the fewest
        chains = [("sm90", split) for split in sorted(parts.values())]
        sums = [("fp32", 1), *chains] if device_type == "cpu" else [*chains, ("fp32", 1)]
    tried = TRIED[device_type] if declared.recipe == UNDECLARED else (declared.recipe,)
    return [Hypothesis(*of, recipe, declared.rounds) for of in sums for recipe in tried]


@dataclass(frozen=True, slots=True)
class Rung:
    """name: of `RUNGS`. flipped: share (0..1) of outputs that flip here. found: how far the rung is from exact."""

    name: str
    flipped: float
    found: Mismatch


@dataclass(frozen=True, slots=True)
class Ladder:
    """hypothesis: what the rungs are of, the best of `tried`; second: the next best, with its rest.
    otherwise: where the rest is suspicious, other rounding points under which it is least, and that rest; or None."""

    hypothesis: Hypothesis
    rungs: tuple[Rung, ...]
    tried: int
    second: tuple[Hypothesis, float] | None
    otherwise: tuple[Hypothesis, float] | None

    @property
    def rest(self) -> float:
        return self.rungs[-1].flipped

    @property
    def note(self) -> str | None:
        """How the hypothesis was found, and what may be wrong with it; None where it was declared and holds."""
        said = []
        if self.tried > 1:
            how = "whose rest none halves" if self.rest else "which leaves none"
            other = f"; the next, {self.second[0]}, leaves {_percent(self.second[1])}" if self.second else ""
            said.append(f"{self.hypothesis} of {self.tried} hypotheses, {how}{other}")
        if self.rest and self.hypothesis.accumulation == "fp32":
            said.append("the GEMM adds in blocks of its own, which nothing here models: torch's fp32 sums come nearest")
        if self.otherwise:
            said.append(f"it rounds elsewhere than declared: {self.otherwise[0]} leaves {_percent(self.otherwise[1])}")
        return "; ".join(said) or None

    def __str__(self) -> str:
        lines = [f"{self.hypothesis}, {self.rungs[-1].found.outputs} outputs"]
        for rung in self.rungs:
            flipped, off = _percent(rung.flipped), _percent(rung.found.m1_gt0)
            lines.append(f"{rung.name:8}{flipped:>10} flip, then {off} are off, the most by {rung.found.m1_max:g} ulps")
        return "\n".join([*lines, *filter(None, [self.note])])


def ladder(
    out: Tensor,
    x: Tensor,
    weights: Weights,
    declared: Arithmetic,
    activation: str = "silu",
    *,
    computes: str = "swiglu",
    rows: Tensor | None = None,
) -> Ladder:
    """The ladder of an output that a kernel of that declaration gave for x[m, k] and weights [n, k] (bf16 or fp16).

    out: [m, n] in bf16, fp16 or fp32, on x's device; [m, 2n] for computes `gate_up`. computes: as `Kernel.computes`.
    rows: of all these, only those; m n k products are modelled for each hypothesis, on a CPU 10^8 or so in a second.
    Raises ArgumentError for tensors that do not fit.
    """
    return Models(x, weights, activation, rows=rows).ladder(out, declared, computes)


class Models:
    """The models of one problem's outputs; each part is computed once, for all ladders that stand on it.

    x, weights, activation, rows: as in `ladder`. exact: gives `reference.exact` of those rows, by computes and dtype.
    """

    def __init__(
        self,
        x: Tensor,
        weights: Weights,
        activation: str = "silu",
        *,
        rows: Tensor | None = None,
        exact: Callable[[str, torch.dtype], Exact] | None = None,
        tolerances: Tolerances = TOLERANCES,
    ) -> None:
        problem_of(x, weights, activation=activation)
        self.x, self.weights, self.activation, self.tolerances = x, weights, activation, tolerances
        self.rows = None if rows is None else rows.to(x.device)
        self._exact = exact or cache(self._computed)
        self._sums: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def ladder(self, out: Tensor, declared: Arithmetic, computes: str = "swiglu") -> Ladder:
        """The ladder of an output; see the function of that name."""
        m, n = len(self.x), self.weights.gate.shape[0] * (2 if computes == "gate_up" else 1)
        if tuple(out.shape) != (m, n) or out.device != self.x.device:
            wrong = f"has shape {tuple(out.shape)} on {out.device}"
            raise ArgumentError("out", wrong, f"give what the kernel wrote, {(m, n)} on {self.x.device}")
        out = self._kept(out)
        rest, chosen, second, tried = self._best(
            out, hypotheses(declared, self.x.shape[1], self.x.device.type), computes
        )
        otherwise = None
        if rest > SUSPICIOUS and computes == "swiglu":
            others = [rounds for size in range(len(ROUNDS) + 1) for rounds in combinations(ROUNDS, size)]
            least, other, _, _ = self._best(
                out, [replace(chosen, rounds=r) for r in others if r != declared.rounds], computes
            )
            otherwise = (other, least) if least < rest / 2 else None
        return Ladder(chosen, tuple(self._rungs(out, chosen, computes)), tried, second, otherwise)

    def _best(self, out: Tensor, candidates: list[Hypothesis], computes: str):
        """The best hypothesis after its rest, the next best, and how many were tried; the first that leaves none ends
        it. A later one is better only if it halves the rest: of wrong ones one always has the least, by chance."""
        found: list[tuple[float, Hypothesis]] = []
        for hypothesis in candidates:
            found.append((_share(differing(self._finished(hypothesis, out.dtype, computes), out)), hypothesis))
            if not found[-1][0]:
                break
        best = found[0]
        for pair in found:
            best = pair if pair[0] < best[0] / 2 else best
        others = [pair for pair in found if pair is not best]
        second = min(others, key=lambda pair: pair[0], default=None)
        return *best, None if second is None else (second[1], second[0]), len(found)

    def _rungs(self, out: Tensor, hypothesis: Hypothesis, computes: str) -> Iterable[Rung]:
        wanted = self._exact(computes, out.dtype)
        before = wanted.rounded
        for name, model in self._steps(hypothesis, out.dtype, computes):
            yield Rung(name, _share(ulp_distance(model, before) > 0), mismatch(model, wanted, self.tolerances))
            before = model
        yield Rung("rest", _share(differing(out, before)), mismatch(out, wanted, self.tolerances))

    def _steps(self, hypothesis: Hypothesis, dtype: torch.dtype, computes: str) -> Iterable[tuple[str, Tensor]]:
        chain = replace(hypothesis, accumulation="sm90", split_k=1)
        if hypothesis.accumulation == "sm90":
            yield "chain", self._exactly_finished(chain, dtype, computes)
        if hypothesis != chain:
            yield "order", self._exactly_finished(hypothesis, dtype, computes)
        if computes == "gate_up":
            return
        for count, name in enumerate(("recipe", *hypothesis.rounds)):
            yield name, self._finished(replace(hypothesis, rounds=hypothesis.rounds[:count]), dtype, computes)

    def _exactly_finished(self, hypothesis: Hypothesis, dtype: torch.dtype, computes: str) -> Tensor:
        """The modelled sums, then activation and product in fp64, whose errors are too small to show in dtype."""
        gate, up = (half.double() for half in self._gate_and_up(hypothesis))
        if computes == "gate_up":
            return round_to(torch.cat((gate, up), 1), dtype)
        act = IDENTITY if computes == "product" else get_activation(self.activation)
        return round_to(act.torch(gate) * up, dtype)

    def _finished(self, hypothesis: Hypothesis, dtype: torch.dtype, computes: str) -> Tensor:
        gate, up = self._gate_and_up(hypothesis)
        if computes == "gate_up":
            return torch.cat((gate, up), 1).to(dtype)
        act = self._act(hypothesis.recipe) if computes == "swiglu" else lambda gate: gate
        return finish(gate, up, hypothesis.rounds, dtype, act)

    def _act(self, recipe: str) -> Callable[[Tensor], Tensor]:
        if recipe == "torch":
            return _TORCH[self.activation]
        if recipe == "inductor":
            return _by_inductor(self.activation)
        return lambda gate: self._executor.activated(gate, self.activation, recipe)

    def _gate_and_up(self, hypothesis: Hypothesis) -> tuple[Tensor, Tensor]:
        """fp32 accumulators with their biases, of the rows that are kept."""
        key = hypothesis.accumulation, hypothesis.split_k
        if key not in self._sums:
            w = self.weights
            gate, up = self._accumulated(w.gate, *key), self._accumulated(w.up, *key)
            self._sums[key] = _plus(gate, w.bias_gate), _plus(up, w.bias_up)
        return self._sums[key]

    def _accumulated(self, weight: Tensor, accumulation: str, split_k: int) -> Tensor:
        if accumulation == "fp32":  # of all rows: how a library adds may depend on how many there are
            return self._kept(self.x.float() @ weight.float().T)
        return self._executor.accumulate(self._kept(self.x), weight, split_k=split_k)

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[self.rows]

    def _computed(self, computes: str, dtype: torch.dtype) -> Exact:
        return exact(self.x, self.weights, self.activation, out_dtype=dtype, rows=self.rows, computes=computes)

    @cached_property
    def _executor(self) -> Any:
        """What models sums and recipes on the device: the module of its entry point, or the core's own on a CPU."""
        device_type = self.x.device.type
        if device_type == "cpu":
            return _OnCpu
        for point in entry_points(group="fused_swiglu.executors", name=device_type):
            return import_module(point.module)
        raise ArgumentError("device", f"nothing models the bits of {device_type}", "install fused-swiglu with pip")


class _OnCpu:
    """`accumulate` and `activated` of the core, in tensors."""

    @staticmethod
    def accumulate(a: Tensor, b: Tensor, *, split_k: int = 1) -> Tensor:
        return torch.from_numpy(sm90.accumulate(a, b, split_k=split_k))

    @staticmethod
    def activated(gate: Tensor, activation: str, recipe: str) -> Tensor:
        return torch.from_numpy(recipes.activate(gate.numpy(), activation, recipe))


@cache
def _by_inductor(activation: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(_TORCH[activation], dynamic=True, fullgraph=True)


def _plus(sums: Tensor, bias: Tensor | None) -> Tensor:
    return sums if bias is None else sums + bias.float()


def _share(wrong: Tensor) -> float:
    return float(wrong.double().mean()) if wrong.numel() else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
