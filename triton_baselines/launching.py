"""How the Triton kernels of this package are built, bound and launched, on a GPU and in the interpreter."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_swiglu import DTYPES, UNDECLARED, Arithmetic, Bound, Compiled, Config, Kernel, Operands, Problem, Weights
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.operands import check_fit
from fused_swiglu.problem import ACTIVATIONS, DTYPE_NAMES
from fused_swiglu.resources import Binary

from .interpreter import interpreted


def programs_for(m: int, n: int, bm: int, bn: int, sms: int) -> int:
    """Size of the persistent grid: a program for every SM, or for every output tile where there are fewer."""
    return min(-(-m // bm) * -(-n // bn), sms)


# Arguments whose value a build must not depend on: `alignment` says all that is worth knowing about them.
SIZES = ["M", "N", "K", "PROGRAMS", "x_stride", "w_stride", "gate_stride", "up_stride", "out_stride", "apart"]


def alignment(problem: Problem) -> int:
    """The multiple of elements that the lengths of all rows and the distances between them are."""
    return math.gcd(problem.row_alignment // DTYPES[problem.dtype].itemsize, problem.k, problem.n)


def units(problem: Problem, *lengths: int) -> tuple[int, ...]:
    """Lengths in elements, in units of `alignment`."""
    return tuple(length // alignment(problem) for length in lengths)


def recipes_of(problem: Problem) -> tuple[str, ...]:
    """The recipes on offer for the problem's activation, the default first."""
    return ("none",) if problem.activation == "relu" else ("ieee", "ex2", "tanh", "poly3")


def operand(tensor: torch.Tensor, stride: int, rows: int, columns: int, tma: bool) -> torch.Tensor | TensorDescriptor:
    """What a kernel gets for a matrix: the tensor, or a TMA descriptor of [rows, columns] boxes."""
    if not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), [stride, 1], [rows, columns])


def pair(first: torch.Tensor, second: torch.Tensor, stride: int, rows: int, columns: int) -> TensorDescriptor:
    """One TMA descriptor of two matrices of one shape and stride, the second behind the first, anywhere in memory."""
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size()
    return TensorDescriptor(first, [2, *first.shape], [apart, stride, 1], [2, rows, columns])


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the jitted function, its grid, its arguments, its constants and options, and the matrix it writes."""

    function: Any
    programs: int
    arguments: tuple
    options: dict[str, Any]
    writes: torch.Tensor

    def build(self) -> None:
        """Compiles for these arguments, or finds the build in Triton's cache; launches nothing."""
        self.function.warmup(*self.arguments, grid=(self.programs,), **self.options)

    def __call__(self) -> None:
        self.function[(self.programs,)](*self.arguments, **self.options)

    def binary(self) -> Binary:
        """Compiled for SM90 as `build` does there, without a GPU."""
        names, given = self.function.arg_names, self.arguments  # the constants come after the arguments
        types = dict(zip(names, [*map(_type_name, given), *["constexpr"] * (len(names) - len(given))], strict=True))
        constants = {(i,): self.options[name] for i, name in enumerate(names) if types[name] == "constexpr"}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, argument in enumerate(given)
            if isinstance(argument, torch.Tensor) and argument.data_ptr() % 16 == 0
        }
        options = {name: value for name, value in self.options.items() if name not in names}
        source = ASTSource(self.function, types, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        return Binary(built.asm["cubin"], built.metadata.shared, options.get("num_stages"))


def _type_name(argument: torch.Tensor | TensorDescriptor | int) -> str:
    """As Triton writes it in a signature."""
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{DTYPE_NAMES[argument.base.dtype]}{list(argument.block_shape)}>"
    if isinstance(argument, torch.Tensor):
        return f"*{DTYPE_NAMES[argument.dtype]}"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


@dataclass(slots=True)
class _BoundLaunches(Bound):
    launches: tuple[Launch, ...]
    out: torch.Tensor

    def run(self) -> torch.Tensor:
        for launch in self.launches:
            launch()
        return self.out


_INTERPRETING = threading.Lock()  # Triton's interpreter keeps its state in globals
_COMPILING = threading.Lock()  # nobody says that Triton's compiler may run in two threads


@dataclass(slots=True)
class _BoundInterpreted(Bound):
    """Runs on fp32 copies, and rounds what each launch wrote to the output dtype, as the kernel does on a GPU."""

    launches: tuple[Launch, ...]
    operands: Operands
    wide: Operands

    def run(self) -> torch.Tensor:
        real, wide = self.operands, self.wide
        wide.x.copy_(real.x)
        wide.weights.gate.copy_(real.weights.gate)
        wide.weights.up.copy_(real.weights.up)
        with _INTERPRETING, np.errstate(all="ignore"):  # a GPU does not warn of overflow and NaN either
            for launch in self.launches:
                launch()
                launch.writes.copy_(launch.writes.to(real.out.dtype))
        return real.out.copy_(wide.out)


@dataclass(slots=True)
class _CompiledLaunches(Compiled):
    kernel: TritonKernel
    problem: Problem
    config: Config
    arithmetic: Arithmetic
    sms: int
    ran_on: str | None = None

    def bind(self, operands: Operands) -> Bound:
        device_type = "cpu" if self.ran_on == "interpreter" else "cuda"
        check_fit(self.problem, operands, self.kernel.output_shape(self.problem), device_type)
        if self.ran_on == "interpreter":
            wide = Operands(_wide_like(operands.x), _wide_weights(operands.weights), _wide_like(operands.out))
            return _BoundInterpreted(self._launches(wide), operands, wide)
        launches = self._launches(operands)
        for launch in launches:
            launch.build()
        return _BoundLaunches(launches, operands.out)

    def _launches(self, operands: Operands) -> tuple[Launch, ...]:
        if not operands.out.numel():
            return ()
        return tuple(self.kernel.launches(self.problem, self.config, self.arithmetic, operands, self.sms))


class TritonKernel(Kernel):
    """What the Triton kernels share: how they are built, and where they cannot run. Weights are read in place."""

    activations = ACTIVATIONS

    @abstractmethod
    def launches(
        self, problem: Problem, config: Any, arithmetic: Arithmetic, operands: Operands, sms: int
    ) -> Iterable[Launch]:
        """The launches of one run on a device with `sms` multiprocessors, in order."""

    def binaries(
        self, problem: Problem, config: Any, arithmetic: Arithmetic, *, build: bool = False
    ) -> Iterable[Binary]:
        """Compiled at once, or taken from Triton's cache."""
        inputs, out = make_inputs(problem, "normal", 0), make_out(problem, self.output_shape(problem))
        with _COMPILING:
            operands = Operands(inputs.x, inputs.weights, out)
            return [launch.binary() for launch in self.launches(problem, config, arithmetic, operands, sms=132)]

    def why_not(self, problem: Problem, config: Any, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        sizes = (config.bm, config.bn, config.bk)
        if config.bm < 64 or min(sizes) < 16 or max(sizes) > 256 or any(size & (size - 1) for size in sizes):
            return "takes tiles of powers of two up to 256, bm from 64 (a wgmma) and bn, bk from 16"
        if config.warps not in (4, 8, 16) or config.stages < 1 or config.group < 1:
            return "takes 4, 8 or 16 warps, at least 1 stage and groups of at least 1 row"
        if config.memory not in ("tma", "pointer"):
            return f"takes memory=tma or memory=pointer, not {config.memory!r}"
        if config.memory == "tma" and (reason := self.no_tma(problem)):
            return f"memory=tma {reason}: choose memory=pointer"
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if config.memory == "tma" and capability < (9, 0):
                return "memory=tma needs an SM90 GPU: choose memory=pointer"
            if capability < (8, 0):
                return "needs an SM80 GPU or newer"
        return None

    def no_tma(self, problem: Problem) -> str | None:
        """Why TMA descriptors cannot describe this problem's matrices; None where they can."""
        return f"needs rows aligned to 16 bytes: {problem.no_tma}" if problem.no_tma else None

    def compile(self, problem: Problem, config: Any, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        if device.type == "cpu":
            module = interpreted(type(self).__module__.rpartition(".")[2])
            kernel = getattr(module, type(self).__name__)()
            declared = replace(arithmetic, accumulation=UNDECLARED)
            # Few programs, so that each takes several tiles and the persistent loop is run here as well.
            return _CompiledLaunches(kernel, problem, config, declared, sms=3, ran_on="interpreter")
        if torch.cuda.get_device_capability(device) != (9, 0):
            arithmetic = replace(arithmetic, accumulation=UNDECLARED)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return _CompiledLaunches(self, problem, config, arithmetic, sms)


def _wide_weights(weights: Weights) -> Weights:
    """Wide like both halves; of one tensor where they are."""
    stacked = weights.stacked
    if stacked is not None:
        return Weights.from_stacked(_wide_like(stacked))
    return Weights(_wide_like(weights.gate), _wide_like(weights.up))


def _wide_like(tensor: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor of the same shape and strides, filled with NaN."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.full((max(span, 0),), torch.nan, dtype=torch.float32, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride())
