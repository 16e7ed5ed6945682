"""torch as it comes: two GEMMs and two elementwise kernels, one stacked GEMM, and cuBLAS's bare GEMM as a control.

Where the rounding is: cuBLAS rounds each product to the output dtype, silu rounds its result, the product rounds
last. How the GEMM accumulates and how silu is computed in fp32 is the libraries' choice: undeclared.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from fused_swiglu import UNDECLARED, Arithmetic, Bound, Compiled, Config, Kernel, Operands, Problem, Weights


@dataclass(slots=True)
class _Call(Bound):
    call: Callable[[Operands], torch.Tensor]
    operands: Operands

    def run(self) -> torch.Tensor:
        return self.call(self.operands)


@dataclass(slots=True)
class _Function(Compiled):
    """A function of the operands that needs no building."""

    arithmetic: Arithmetic
    call: Callable[[Operands], torch.Tensor]

    def bind(self, operands: Operands) -> Bound:
        return _Call(self.call, operands)


class _TorchKernel(Kernel):
    role = "unfused"

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic(UNDECLARED, UNDECLARED, ("gate", "up", "act")),)

    def compile(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        return _Function(arithmetic, self.call)

    @staticmethod
    @abstractmethod
    def call(operands: Operands) -> torch.Tensor:
        """Computes the output from x and the prepared weights."""


class Eager(_TorchKernel):
    """silu(x @ w_gate.T) * (x @ w_up.T), as a model's eager code has it: four launches."""

    name = "torch.eager"

    @staticmethod
    def call(operands: Operands) -> torch.Tensor:
        x, weights = operands.x, operands.weights
        gate = functional.silu(functional.linear(x, weights.gate))
        return torch.mul(gate, functional.linear(x, weights.up), out=operands.out)


class Concat(_TorchKernel):
    """One GEMM over [gate; up], then silu and product on the halves: three launches. Packs separate weights."""

    name = "torch.concat"

    def prepare(self, weights: Weights, problem: Problem, config: Config) -> torch.Tensor:
        return stacked(weights)

    @staticmethod
    def call(operands: Operands) -> torch.Tensor:
        gate, up = functional.linear(operands.x, operands.weights).chunk(2, dim=1)
        return torch.mul(functional.silu(gate), up, out=operands.out)


class BareGemm(_TorchKernel):
    """The GEMM of [gate; up] alone, from cuBLAS on a GPU: what a fused kernel of equal GEMM speed could reach."""

    name = "cublas.gemm"
    role = "control"
    computes = "gate_up"

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic(UNDECLARED, "none"),)

    def prepare(self, weights: Weights, problem: Problem, config: Config) -> torch.Tensor:
        return stacked(weights).t()

    @staticmethod
    def call(operands: Operands) -> torch.Tensor:
        return torch.mm(operands.x, operands.weights, out=operands.out)


def stacked(weights: Any) -> torch.Tensor:
    """[gate; up] as one [2n, k] tensor: in place where it is one, else a copy."""
    found = weights.stacked
    return torch.cat((weights.gate, weights.up)) if found is None else found
