"""Liger's elementwise silu-mul (Triton) after a GEMM: the form that reads gate and up from one tensor, uncopied.

Where the rounding is: it rounds the activated gate, too, before the product, as eager does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..arithmetic import UNDECLARED, Arithmetic
from ..config import Config
from ..problem import Problem
from .silu_mul import SiluMul

WIDEST = 65536  # one Triton block holds a row


class Liger(SiluMul):
    name = "liger.silu_mul"
    allocates = True
    function = "liger_kernel.ops.swiglu:swiglu_fused_gate_up_forward"
    distribution = "liger-kernel"

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic(UNDECLARED, UNDECLARED, ("gate", "up", "act")),)

    def why_not(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        return f"takes n up to {WIDEST}, not {problem.n}" if problem.n > WIDEST else None

    @staticmethod
    def call(function: Callable[..., Any], products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _, activated = function(products)
        return activated
