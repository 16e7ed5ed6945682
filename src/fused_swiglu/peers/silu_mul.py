"""SiluMul: torch's GEMM of [gate; up], then another project's elementwise kernel for silu and product: two launches.

Where the rounding is: the GEMM rounds gate and up; how it accumulates is the library's choice, as silu in fp32 is the
elementwise kernel's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..arithmetic import Arithmetic
from ..config import Config
from ..kernel import Bound, Compiled
from ..operands import Operands, Weights
from ..problem import Problem
from .peer import Peer


@dataclass(slots=True)
class _BoundPair(Bound):
    kernel: SiluMul
    function: Callable[..., Any]
    operands: Operands
    products: torch.Tensor

    def run(self) -> torch.Tensor:
        given = self.operands
        torch.mm(given.x, given.weights, out=self.products)
        return self.kernel.call(self.function, self.products, given.out)


@dataclass(slots=True)
class _CompiledPair(Compiled):
    kernel: SiluMul
    arithmetic: Arithmetic
    function: Callable[..., Any]

    def bind(self, operands: Operands) -> Bound:
        x, weights = operands.x, operands.weights
        products = torch.empty((len(x), weights.shape[1]), dtype=x.dtype, device=x.device)
        bound = _BoundPair(self.kernel, self.function, operands, products)
        bound.run()  # compiles, for tensors like these
        return bound


class SiluMul(Peer):
    role = "unfused"

    @staticmethod
    @abstractmethod
    def call(function: Callable[..., Any], products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of products [m, 2n], gate beside up: written to out [m, n], or a tensor of its own."""

    def why_not(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        return None if problem.m else "needs a row of x at least"

    def prepare(self, weights: Weights, problem: Problem, config: Config) -> torch.Tensor:
        """[k, 2n], a view of [gate; up]: in place where they are one tensor, else of a copy."""
        found = weights.stacked
        return (torch.cat((weights.gate, weights.up)) if found is None else found).t()

    def compile(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        return _CompiledPair(self, arithmetic, self.load())
