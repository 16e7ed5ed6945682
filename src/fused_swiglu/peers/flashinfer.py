"""FlashInfer's elementwise silu-and-mul (CUDA, compiled by its own nvcc call when first used) after a GEMM.

Where the rounding is: silu and the product are in fp32, the output is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..arithmetic import UNDECLARED, Arithmetic
from ..config import Config
from ..problem import Problem
from .silu_mul import SiluMul


class FlashInfer(SiluMul):
    name = "flashinfer.silu_mul"
    function = "flashinfer.activation:silu_and_mul"
    distribution = "flashinfer-python"
    # Not in the extra: it wants a newer CuTe DSL than the one that QuACK was run with.
    remedy = "pip install flashinfer-python"

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic(UNDECLARED, UNDECLARED, ("gate", "up")),)

    def why_not(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        if problem.out_stride != problem.n:
            return f"writes rows without padding: out_stride must be {problem.n}, not {problem.out_stride}"
        if problem.alignment < 16:
            return f"every tensor must start at a multiple of 16 bytes, not of {problem.alignment}"
        return None

    @staticmethod
    def call(function: Callable[..., Any], products: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return function(products, out)
