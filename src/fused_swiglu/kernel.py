"""Kernel, Compiled, Bound: the one interface behind which every way to compute SwiGLU stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from .arithmetic import Arithmetic
from .config import Config
from .operands import Operands, Weights
from .problem import Problem


class Bound(ABC):
    """A compiled kernel with its tensors."""

    @abstractmethod
    def run(self) -> torch.Tensor:
        """Launches once on the current stream and returns the output: the bound `out`, or, where the kernel
        `allocates`, a tensor of its own that the next run may overwrite. Does not synchronise."""

    def launcher(self) -> Callable[[], object] | None:
        """What launches as `run` does and keeps no tensor alive: for a caller who sees to it, at each launch, that
        tensors like those bound are at their addresses. None where a launch needs the tensors themselves."""
        return None


class Compiled(ABC):
    """A kernel built for one problem, config and device."""

    arithmetic: Arithmetic
    """What this build really does; may be undeclared, may depend on the problem and on a library's choice."""
    ran_on: str | None = None
    """`interpreter` or `model` where it does not run on the device itself; None where it does."""

    @abstractmethod
    def bind(self, operands: Operands) -> Bound:
        """Takes tensors that fit the problem. What can be worked out before a launch is worked out here."""


class Kernel(ABC):
    """One way to compute out = act(x @ w_gate.T) * (x @ w_up.T).

    name: unique, `family.variant`. role: `fused` (one launch), `unfused`, or `control` (leaves a part out).
    computes: `swiglu` ([m, n]), `product` ([m, n]: without the activation), or `gate_up` ([m, 2n]: x @ w_gate.T beside
        x @ w_up.T).
    allocates: `run` returns a tensor of its own instead of writing the bound `out`.
    adds_bias, writes_preactivations: whether it can, for the problems that want it.
    owns_graph: replays a CUDA graph of its own. capturable: may be captured in the caller's CUDA graph.
    """

    name: ClassVar[str]
    role: ClassVar[str]
    computes: ClassVar[str] = "swiglu"
    config_type: ClassVar[type[Config]] = Config
    allocates: ClassVar[bool] = False
    adds_bias: ClassVar[bool] = False
    writes_preactivations: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16")
    activations: ClassVar[tuple[str, ...]] = ("silu",)

    def owns_graph(self, config: Config) -> bool:
        return False

    def capturable(self, config: Config) -> bool:
        return not self.owns_graph(config)

    def configs(self, problem: Problem) -> Iterable[Config]:
        """Every config worth trying for this problem, the best guess first."""
        return (self.config_type(),)

    @abstractmethod
    def arithmetics(self, problem: Problem) -> Iterable[Arithmetic]:
        """Every arithmetic on offer, the default first."""

    def defaults(self, problem: Problem, device: torch.device) -> Iterable[tuple[Config, Arithmetic]]:
        """What a comparison runs when no config is asked for by name: the best guess under the default arithmetic."""
        config = next(iter(self.configs(problem)))
        return ((config, next(iter(self.arithmetics(problem)))),)

    def why_not(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> str | None:
        """Why this cannot run, in one clause; None where it can. A subclass asks `super()` first."""
        if problem.dtype not in self.dtypes or problem.weight_dtype != problem.dtype:
            return f"takes {' or '.join(self.dtypes)}, not x {problem.dtype} with weights {problem.weight_dtype}"
        if problem.out_dtype != problem.dtype:
            return f"writes {problem.dtype}, not {problem.out_dtype}"
        if problem.activation not in self.activations:
            return f"has {', '.join(self.activations)}, not {problem.activation}"
        if problem.bias and not self.adds_bias:
            return "adds no bias"
        if "preactivations" in problem.outputs and not self.writes_preactivations:
            return "writes no pre-activations"
        if problem.scaling != "none":
            return "takes no scales"
        if arithmetic not in tuple(self.arithmetics(problem)):
            return f"does not offer the arithmetic {arithmetic}"
        return None

    def output_shape(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of what `run` returns."""
        return problem.m, problem.n * (2 if self.computes == "gate_up" else 1)

    def is_built(self, problem: Problem, config: Config, arithmetic: Arithmetic) -> bool:
        """Whether `compile` need not wait for a compiler."""
        return True

    def prepare(self, weights: Weights, problem: Problem, config: Config) -> Any:
        """The weights as this kernel reads them, untimed: unchanged where it reads them in place, or packed."""
        return weights

    @abstractmethod
    def compile(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        """Builds the kernel, so that no launch does. Called only where `why_not` says None."""
