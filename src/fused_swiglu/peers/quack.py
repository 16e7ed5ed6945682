"""QuACK's gated GEMM (CuTe DSL): one launch over weights whose gate and up rows alternate.

Where the rounding is: the accumulators are one fp32 chain over ascending k in wgmma steps, without split-K; the
activation and the product follow in fp32, nothing is contracted, and the output is rounded once. silu is the recipe
`ex2` but for a reciprocal that flushes subnormal results, which shows at gates below -87.3: no recipe is declared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arithmetic import UNDECLARED, Arithmetic
from ..config import Config
from ..kernel import Bound, Compiled
from ..operands import Operands, Weights
from ..problem import Problem
from .peer import Peer

# Not relu: theirs makes NaN zero.
ACTIVATIONS = {"silu": "swiglu", "gelu_tanh": "geglu", "sigmoid": "glu"}


@dataclass(frozen=True, slots=True)
class GatedConfig(Config):
    """tuned: what QuACK's autotuner finds, which compiles and times about twenty tiles for each problem, instead of its
    default for the GPU. store_preact: also writes the pre-activations, gate and up columns in turn, as for training."""

    tuned: bool = False
    store_preact: bool = False


@dataclass(slots=True)
class _BoundGated(Bound):
    function: Callable[..., Any]
    operands: Operands
    options: dict[str, Any]

    def run(self) -> torch.Tensor:
        given = self.operands
        self.function(given.x, given.weights, postact_out=given.out, **self.options)
        return given.out


@dataclass(slots=True)
class _CompiledGated(Compiled):
    arithmetic: Arithmetic
    function: Callable[..., Any]
    problem: Problem
    config: GatedConfig

    def bind(self, operands: Operands) -> Bound:
        p, preact = self.problem, None
        if self.config.store_preact:
            preact = torch.empty((p.m, 2 * p.n), dtype=operands.out.dtype, device=operands.out.device)
        options = {
            "activation": ACTIVATIONS[p.activation],
            "tuned": self.config.tuned,
            "preact_out": preact,
            "store_preact": self.config.store_preact,  # without it QuACK would allocate what it is not given
        }
        bound = _BoundGated(self.function, operands, options)
        bound.run()  # tunes and compiles, for tensors like these
        return bound


class Gated(Peer):
    name = "quack.gated"
    role = "fused"
    config_type = GatedConfig
    activations = tuple(ACTIVATIONS)
    function = "quack.gemm_interface:gemm_gated"
    distribution = "quack-kernels"
    capability = (9, 0)

    def configs(self, problem: Problem) -> tuple[GatedConfig, ...]:
        """The default first: tuning takes a minute or so."""
        return tuple(GatedConfig(tuned, preact) for tuned in (False, True) for preact in (False, True))

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (Arithmetic("sm90", UNDECLARED),)

    def why_not(
        self, problem: Problem, config: GatedConfig, arithmetic: Arithmetic, device: torch.device
    ) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        packed = replace(problem, gate_stride=0, up_stride=0)  # whatever the distance of the rows it is packed from
        return f"moves rows by TMA: {packed.no_tma}" if packed.no_tma else None

    def prepare(self, weights: Weights, problem: Problem, config: GatedConfig) -> torch.Tensor:
        """[k, 2n], a view of rows of gate and up in turn."""
        return torch.stack((weights.gate, weights.up), dim=1).flatten(0, 1).t()

    def compile(self, problem: Problem, config: GatedConfig, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        return _CompiledGated(arithmetic, self.load(), problem, config)
