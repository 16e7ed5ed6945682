"""arguments: what `swiglu` was called with, checked one by one, and as the matrices of a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from .errors import ArgumentError
from .operands import Operands, Weights, problem_of
from .problem import ACTIVATIONS, Problem

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Arguments:
    """As `swiglu` documents them."""

    x: torch.Tensor
    w_gate: torch.Tensor
    w_up: torch.Tensor | None
    bias_gate: torch.Tensor | None
    bias_up: torch.Tensor | None
    out: torch.Tensor | None
    preactivations: torch.Tensor | None
    activation: str

    def pose(self) -> tuple[Problem, Operands, torch.Tensor]:
        """The problem, its operands, and the output in its own shape, which is allocated where none was given.
        Raises ArgumentError that names the argument."""
        self._check_tensors()
        x, leading = self.x, self.x.shape[:-1]
        m = math.prod(leading)
        weights = self._weights()
        n = weights.gate.shape[0]
        rows = _matrix("x", x, m)
        problem_of(rows, weights, activation=self.activation)  # before anything is allocated
        self._check_biases(n)
        out = x.new_empty((*leading, n)) if self.out is None else self.out
        for name, tensor, columns in (("out", out, n), ("preactivations", self.preactivations, 2 * n)):
            if tensor is not None and tensor.shape != (*leading, columns):
                remedy = f"with these operands it must be {(*leading, columns)}"
                raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", remedy)
        written = _matrix("out", out, m)
        kept = None if self.preactivations is None else _matrix("preactivations", self.preactivations, m)
        read = {"x": rows, "w_gate": weights.gate, "w_up": weights.up}
        read |= {"bias_gate": weights.bias_gate, "bias_up": weights.bias_up}
        _check_apart("out", written, read)
        _check_apart("preactivations", kept, read | {"out": written})
        problem = problem_of(rows, weights, written, activation=self.activation)
        layout = "stacked" if self.w_up is None else "separate"  # even where both are of one tensor
        problem = replace(problem, layout=layout, outputs=("out",) if kept is None else ("out", "preactivations"))
        return problem, Operands(rows, weights, written, kept), out

    def _check_tensors(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ArgumentError("activation", f"unknown {self.activation!r}", f"choose from {', '.join(ACTIVATIONS)}")
        for name in ("x", "w_gate", "w_up", "bias_gate", "bias_up", "out", "preactivations"):
            tensor = getattr(self, name)
            if tensor is None and name not in ("x", "w_gate"):
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise ArgumentError(name, f"is {_kind(tensor)}", "give a dense torch.Tensor")
            if tensor.dtype not in DTYPES:
                raise ArgumentError(name, f"has dtype {tensor.dtype}", "convert it to bf16 or fp16")
            if tensor.dtype != self.x.dtype:
                raise ArgumentError(name, f"has dtype {tensor.dtype}", f"convert it to x's {self.x.dtype}")
            if tensor.device != self.x.device:
                raise ArgumentError(name, f"is on {tensor.device}, x on {self.x.device}", "move them to one device")
            if not tensor.dim():
                raise ArgumentError(name, "has no dimension", "give x [..., k], weights [n, k] and biases [n]")

    def _weights(self) -> Weights:
        """Of matrices; views of one where only one was given."""
        gate, up = self.w_gate, self.w_up
        for name, tensor in (("w_gate", gate), ("w_up", up)):
            if tensor is None:
                continue
            if tensor.dim() != 2:
                raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", "give a matrix, [n, k]")
            _check_rows(name, tensor)
        if up is None:
            if gate.shape[0] % 2:
                wrong = f"has {gate.shape[0]} rows and there is no w_up"
                raise ArgumentError("w_gate", wrong, "stack gate above up as [2n, k], or give w_up too")
            gate, up = gate.chunk(2) if gate.shape[0] else (gate, gate)
        return Weights(gate, up, self.bias_gate, self.bias_up)

    def _check_biases(self, n: int) -> None:
        given = {"bias_gate": self.bias_gate, "bias_up": self.bias_up}
        for name, bias in given.items():
            if bias is None and any(other is not None for other in given.values()):
                raise ArgumentError(name, "is missing, and the other bias is given", "give both; zeros add nothing")
            if bias is not None and bias.shape != (n,):
                raise ArgumentError(name, f"has shape {tuple(bias.shape)}", f"with these operands it must be ({n},)")
            if bias is not None and n > 1 and bias.stride(0) != 1:
                raise ArgumentError(name, f"has stride {bias.stride(0)}", "call .contiguous() on it")
            if bias is not None and bias.data_ptr() % 16:
                raise ArgumentError(name, "starts at an address that is no multiple of 16 bytes", "call .clone() on it")


def _matrix(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, the last dimension], without a copy."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise ArgumentError(name, f"has column stride {tensor.stride(-1)}", "call .contiguous() on it")
    try:
        matrix = tensor.view(rows, tensor.shape[-1])
    except RuntimeError:
        wrong = f"of strides {tensor.stride()} does not flatten to rows at one distance"
        raise ArgumentError(name, wrong, "call .contiguous() on it") from None
    _check_rows(name, matrix)
    return matrix


def _check_rows(name: str, matrix: torch.Tensor) -> None:
    rows, columns = matrix.shape
    if not matrix.numel():
        return
    if columns > 1 and matrix.stride(1) != 1:
        raise ArgumentError(name, f"has column stride {matrix.stride(1)}", "call .contiguous() on it")
    if rows > 1 and matrix.stride(0) < columns:
        wrong = f"has rows of {columns} elements, {matrix.stride(0)} apart"
        raise ArgumentError(name, wrong, "call .contiguous() on it")


def _check_apart(name: str, written: torch.Tensor | None, others: dict[str, torch.Tensor | None]) -> None:
    """Tiles are written while others are still read."""
    for other, tensor in others.items():
        if written is not None and tensor is not None and _overlap(written, tensor):
            raise ArgumentError(name, f"overlaps {other} in memory", "give it memory of its own")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    (begin_a, end_a), (begin_b, end_b) = _extent(a), _extent(b)
    if begin_a >= end_b or begin_b >= end_a:
        return False
    if a.dim() == b.dim() == 2 and a.stride(0) == b.stride(0):  # side by side in one matrix?
        pitch = a.stride(0) * a.element_size()
        right = (begin_b - begin_a) % pitch
        return right < a.shape[1] * a.element_size() or right + b.shape[1] * b.element_size() > pitch
    return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Of its addresses."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _kind(value: object) -> str:
    return f"of layout {value.layout}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
