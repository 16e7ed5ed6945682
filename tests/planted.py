"""Kernels of a test's own, right or wrong on purpose.

As a pytest plugin (`-p planted`) it registers `planted.tail`, which drops the tail of k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from test_mutants import dropped_tail, honest
from torch import Tensor

from fused_swiglu import Arithmetic, Bound, Compiled, Config, Kernel, Operands, register

Body = Callable[[Operands, "Shade"], Any]


@dataclass(frozen=True, slots=True)
class Shade(Config):
    shade: int = 0


@dataclass(slots=True)
class _Launch(Bound):
    body: Body
    operands: Operands
    config: Shade

    def run(self) -> Tensor:
        result = self.body(self.operands, self.config)
        return self.operands.out if result is None else self.operands.out.copy_(result)


@dataclass(slots=True)
class _Built(Compiled):
    body: Body
    config: Shade
    arithmetic = Arithmetic()

    def bind(self, operands: Operands) -> Bound:
        return _Launch(self.body, operands, self.config)


class Planted(Kernel):
    """Declares `sm90:ieee:out`. body: gets operands and config; gives what is to be written, or writes it itself."""

    role = "fused"
    config_type = Shade
    dtypes = ("bf16",)

    def __init__(self, name: str, body: Body) -> None:
        self.name = name  # type: ignore[misc]
        self.body = body

    def configs(self, problem):
        return Shade(0), Shade(1)

    def arithmetics(self, problem):
        return (Arithmetic(),)

    def compile(self, problem, config, arithmetic, device):
        return _Built(self.body, config)


def honestly(operands: Operands) -> Tensor:
    return honest(operands.x, operands.weights)


def pytest_configure() -> None:
    register(Planted("planted.tail", lambda operands, config: dropped_tail(operands.x, operands.weights)))
