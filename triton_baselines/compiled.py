"""torch.compile: the eager expression through Inductor, one config per mode, and one for its CUTLASS backend.

Where the rounding is: Inductor leaves both GEMMs to a library or template, which round gate and up; it fuses silu
and the product into one kernel that keeps the activated gate in fp32. With precision casts emulated it rounds that
too, as eager does: two arithmetics, chosen by name. An autotuned mode may pick a template that takes silu and product
into the epilogue of one GEMM, whose half then stays in fp32: it declares the rounding of the code that it generated.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from fused_swiglu import (
    UNDECLARED,
    ArgumentError,
    Arithmetic,
    Bound,
    Compiled,
    Config,
    Kernel,
    Operands,
    Problem,
    Weights,
)

from . import inductor_cutlass

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
NAMED_MODES = ("cutlass",)  # run only when asked for by name; not a mode of torch's: see inductor_cutlass.py
FUSED_CASTS = Arithmetic(UNDECLARED, UNDECLARED, ("gate", "up"))
EMULATED_CASTS = Arithmetic(UNDECLARED, UNDECLARED, ("gate", "up", "act"))


@dataclass(frozen=True, slots=True)
class CompileConfig(Config):
    mode: str = "default"

    def __post_init__(self) -> None:
        if self.mode not in (known := (*MODES, *NAMED_MODES)):
            raise ArgumentError("config", f"mode={self.mode!r}", f"choose from {', '.join(known)}")

    @property
    def autotunes(self) -> bool:
        return self.mode.startswith("max-autotune") or self.mode in NAMED_MODES

    @property
    def graphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")


class _Projections(torch.nn.Module):
    """Weights as parameters, whose addresses CUDA graphs may rely on: as in a model."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(weights.gate, requires_grad=False)
        self.up = torch.nn.Parameter(weights.up, requires_grad=False)


def _swiglu(weights: _Projections, x: torch.Tensor) -> torch.Tensor:
    return functional.silu(functional.linear(x, weights.gate)) * functional.linear(x, weights.up)


_serial = itertools.count()


def _fresh_function() -> Callable[..., torch.Tensor]:
    """`_swiglu` with a code object of its own: Dynamo counts recompilations, and gives up, per code object."""
    code = _swiglu.__code__.replace(co_name=f"swiglu_{next(_serial)}")
    return types.FunctionType(code, _swiglu.__globals__)


@dataclass(slots=True)
class _BoundGraph(Bound):
    function: Callable[..., torch.Tensor]
    weights: _Projections
    x: torch.Tensor

    def run(self) -> torch.Tensor:
        return self.function(self.weights, self.x)


@dataclass(slots=True)
class _CompiledGraph(Compiled):
    """watch: whether the first `bind`, which compiles, keeps the modules that Inductor generates in `codes`, and
    declares their rounding: a template may take the activation into its epilogue, in fp32."""

    arithmetic: Arithmetic
    function: Callable[..., torch.Tensor]
    watch: bool
    codes: list[str] = field(default_factory=list)

    def bind(self, operands: Operands) -> Bound:
        bound = _BoundGraph(self.function, operands.weights, operands.x)
        # The first call compiles; with CUDA graphs the second warms up and the third records.
        if self.watch and not self.codes:
            from .generated import parse

            self.codes = _run_and_watch(bound)
            if self.codes:
                self.arithmetic = replace(self.arithmetic, rounds=parse(self.codes[-1]).rounds)
        for _ in range(3):
            bound.run()
        return bound


def _run_and_watch(bound: Bound) -> list[str]:
    """Runs, and gives the modules that Inductor generates meanwhile; from its caches they would come unseen.

    torch's own run_and_get_code would also reset Dynamo, and with it what was compiled before."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    with (
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
        inductor.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False),
    ):
        bound.run()
    return codes


class TorchCompile(Kernel):
    name = "torch.compile"
    role = "unfused"
    config_type = CompileConfig
    allocates = True

    def owns_graph(self, config: CompileConfig) -> bool:
        return config.graphs

    def configs(self, problem: Problem) -> tuple[CompileConfig, ...]:
        return tuple(CompileConfig(mode) for mode in MODES)

    def arithmetics(self, problem: Problem) -> tuple[Arithmetic, ...]:
        return (FUSED_CASTS, EMULATED_CASTS)

    def defaults(self, problem: Problem, device: torch.device) -> Iterable[tuple[CompileConfig, Arithmetic]]:
        """Every mode that does not autotune for minutes; on a CPU also those, whose rows say why they do not run."""
        for config in self.configs(problem):
            if device.type == "cpu" or not config.autotunes:
                yield config, FUSED_CASTS
        yield CompileConfig(), EMULATED_CASTS

    def why_not(
        self, problem: Problem, config: CompileConfig, arithmetic: Arithmetic, device: torch.device
    ) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        if arithmetic == EMULATED_CASTS and config.mode != "default":
            return "emulates precision casts in mode=default only"
        if device.type == "cpu":
            if config.mode != "default":
                return "on a CPU only mode=default runs"
            return _no_cpp_compiler()
        return inductor_cutlass.why_not() if config.mode == "cutlass" else None

    def prepare(self, weights: Weights, problem: Problem, config: CompileConfig) -> _Projections:
        return _Projections(weights)

    def compile(
        self, problem: Problem, config: CompileConfig, arithmetic: Arithmetic, device: torch.device
    ) -> _CompiledGraph:
        options: dict[str, Any] | None = None
        if arithmetic == EMULATED_CASTS:
            options = {"emulate_precision_casts": True}
        elif config.mode == "cutlass":
            options = inductor_cutlass.options()
        mode = None if options else config.mode  # torch takes a mode or options, not both
        function = torch.compile(_fresh_function(), fullgraph=True, dynamic=False, mode=mode, options=options)
        return _CompiledGraph(arithmetic, function, watch=config.autotunes or config.mode == "cutlass")


def _no_cpp_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "needs a C++ compiler on a CPU, and none is on PATH: install g++ or set CXX"
    return None
