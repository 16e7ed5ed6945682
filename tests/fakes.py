"""Kernels that go right or wrong in one known way, under names that say which."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from fused_swiglu import Arithmetic, Bound, Compiled, Config, Kernel, Operands, Problem

Body = Callable[[Operands], torch.Tensor]


@dataclass(slots=True)
class FakeBound(Bound):
    body: Body
    operands: Operands

    def run(self) -> torch.Tensor:
        return self.body(self.operands)


@dataclass(slots=True)
class FakeCompiled(Compiled):
    body: Body
    arithmetic: Arithmetic

    def bind(self, operands: Operands) -> Bound:
        return FakeBound(self.body, operands)


@dataclass(frozen=True, slots=True)
class Tile(Config):
    tile: int = 64
    fast: bool = False


class FakeKernel(Kernel):
    """`body` is what a launch does."""

    role = "fused"

    def __init__(self, name: str, body: Body, **traits: object) -> None:
        self.name = name  # type: ignore[misc]
        self.body = body
        for trait, value in traits.items():
            setattr(self, trait, value)

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic(), Arithmetic(recipe="ex2"))

    def compile(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        return FakeCompiled(self.body, arithmetic)


class TiledKernel(FakeKernel):
    config_type = Tile

    def configs(self, problem: Problem) -> tuple[Tile, ...]:
        return (Tile(64), Tile(128), Tile(128, fast=True))


class BrokenBuild(FakeKernel):
    def compile(self, *_: object) -> Compiled:
        raise ValueError("no such tile\nwith a long explanation")


class Elsewhere(FakeKernel):
    def why_not(self, *_: object) -> str:
        return "needs a machine that nobody has"


def _value(operands: Operands) -> torch.Tensor:
    x, weights = operands.x.double(), operands.weights
    gate, up = x @ weights.gate.double().T, x @ weights.up.double().T
    return (functional.silu(gate) * up).to(operands.out.dtype)


def good(operands: Operands) -> torch.Tensor:
    return operands.out.copy_(_value(operands))


def wrong(operands: Operands) -> torch.Tensor:
    return operands.out.copy_(2 * _value(operands))


def unwritten(operands: Operands) -> torch.Tensor:
    operands.out[:, 1:] = _value(operands)[:, 1:]
    return operands.out


def raises(operands: Operands) -> torch.Tensor:
    raise RuntimeError("\nillegal memory access\nsecond line")


def interrupted(operands: Operands) -> torch.Tensor:
    raise KeyboardInterrupt


def products(operands: Operands) -> torch.Tensor:
    weights = torch.cat((operands.weights.gate, operands.weights.up)).double()
    return operands.out.copy_(operands.x.double() @ weights.T)


_calls, _flaky_calls = itertools.count(), itertools.count()


def changes(operands: Operands) -> torch.Tensor:
    """One word is another at each run."""
    out = good(operands)
    out[0, 0] = next(_calls)
    return out


def depends_on_m(operands: Operands) -> torch.Tensor:
    return good(operands).mul_(1 + len(operands.x) % 2)


def flaky(operands: Operands) -> torch.Tensor:
    """Raises at its fourth call: after the check and the first look at its time."""
    if next(_flaky_calls) % 4 == 3:
        raise RuntimeError("the fourth call")
    return good(operands)


def overwrites(operands: Operands) -> torch.Tensor:
    out = good(operands)
    operands.x.zero_()
    return out


def of_another_shape(operands: Operands) -> torch.Tensor:
    return operands.out[:, :-1]


KERNELS = (
    FakeKernel("fake.good", good),
    BrokenBuild("fake.build", good),
    FakeKernel("fake.raises", raises),
    FakeKernel("fake.unwritten", unwritten),
    FakeKernel("fake.wrong", wrong),
    Elsewhere("fake.elsewhere", good),
    FakeKernel("fake.own", _value, allocates=True),
    FakeKernel("fake.products", products, role="control", computes="gate_up"),
    FakeKernel("fake.shape", of_another_shape),
    TiledKernel("tiled.good", good),
    FakeKernel("stop.here", interrupted),
    FakeKernel("odd.changes", changes),
    FakeKernel("odd.batch", depends_on_m),
    FakeKernel("odd.flaky", flaky),
    FakeKernel("aaa.overwrites", overwrites),
)
