"""A kernel on the CPU that is launched as those on a GPU are: with addresses, and without tensors."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from fakes import FakeKernel, Tile, good

from fused_swiglu import Arithmetic, Bound, Compiled, Config, Operands, Problem, Weights

Launch = Callable[[], object]


def at(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes a tensor of what is at its address when it is called; holds no reference to it."""
    address, shape, strides, dtype = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

    def make() -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        words = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address)
        return torch.frombuffer(words, dtype=dtype).as_strided(shape, strides)

    return make


@dataclass(slots=True)
class Counts:
    compiled: int = 0
    bound: int = 0
    launched: int = 0
    released: int = 0


@dataclass(slots=True)
class _Bound(Bound):
    out: torch.Tensor
    launch: Launch

    def run(self) -> torch.Tensor:
        self.launch()
        return self.out

    def launcher(self) -> Launch:
        return self.launch


@dataclass(slots=True)
class _Compiled(Compiled):
    kernel: Addressed
    config: Config
    arithmetic: Arithmetic
    ran_on: str | None = field(default=None)

    def bind(self, operands: Operands) -> Bound:
        counts, body, config = self.kernel.counts, self.kernel.body, self.config
        counts.bound += 1
        x, gate, up, out = map(at, (operands.x, operands.weights.gate, operands.weights.up, operands.out))

        def launch() -> None:
            counts.launched += 1
            self.kernel.wait(config)
            body(Operands(x(), Weights(gate(), up()), out()))

        def release() -> None:
            counts.released += 1

        weakref.finalize(launch, release)
        return _Bound(operands.out, launch)


class Addressed(FakeKernel):
    """wait: is called with the config at each launch. declares: in place of the arithmetic that is asked for.
    takes_s: how long it compiles."""

    config_type = Tile
    tiles = (Tile(64), Tile(128))
    takes_s = 0.0

    def __init__(self, name: str = "cutlass.interleaved", body=good, **traits: object) -> None:
        super().__init__(name, body, **traits)
        self.counts = Counts()
        self.wait = getattr(self, "wait", lambda config: None)

    def configs(self, problem: Problem) -> tuple[Tile, ...]:
        return self.tiles

    def compile(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> Compiled:
        self.counts.compiled += 1
        time.sleep(self.takes_s)
        return _Compiled(self, config, getattr(self, "declares", arithmetic))


def packing(kernel: FakeKernel) -> FakeKernel:
    """The same, but it wants its weights packed."""

    class Packing(type(kernel)):
        def prepare(self, weights: Weights, problem: Problem, config: Config) -> Weights:
            return replace(weights)

    return Packing(kernel.name, kernel.body)
