"""The tensors of one launch: weights, inputs, outputs, and the check that they fit a Problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import ArgumentError
from .problem import DTYPE_NAMES, DTYPES, Problem, address_alignment


@dataclass(frozen=True, slots=True)
class Weights:
    """w_gate[n, k] and w_up[n, k], with what goes with them: biases [n], fp8 scales (a scalar, or [n] per row)."""

    gate: torch.Tensor
    up: torch.Tensor
    bias_gate: torch.Tensor | None = None
    bias_up: torch.Tensor | None = None
    scale_gate: torch.Tensor | None = None
    scale_up: torch.Tensor | None = None

    @classmethod
    def from_stacked(cls, stacked: torch.Tensor, **more: torch.Tensor | None) -> Weights:
        """Views of one [2n, k] tensor, gate above up; nothing is copied. Raises ArgumentError for an odd row count."""
        if stacked.dim() != 2 or stacked.shape[0] % 2:
            raise ArgumentError("weights", f"shape {tuple(stacked.shape)}", "stack gate above up as [2n, k]")
        n = stacked.shape[0] // 2
        return cls(stacked[:n], stacked[n:], **more)

    @property
    def stacked(self) -> torch.Tensor | None:
        """The [2n, k] view that holds gate above up, or None where they are not rows of one tensor."""
        gate, up = self.gate, self.up
        n, k = gate.shape
        if (
            gate.stride() != up.stride()
            or gate.dtype != up.dtype
            or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr()
            or up.storage_offset() - gate.storage_offset() != n * gate.stride(0)
        ):
            return None
        return gate.as_strided((2 * n, k), gate.stride(), gate.storage_offset())


@dataclass(frozen=True, slots=True)
class Operands:
    """What a kernel is bound to. `weights` is what the kernel's `prepare` returned.

    x[m, k]; out[m, n] (or what `Kernel.output_shape` says); preactivations[m, 2n], gate beside up;
    x_scale: a scalar or [m], for fp8.
    """

    x: torch.Tensor
    weights: Any
    out: torch.Tensor
    preactivations: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None


def problem_of(
    x: torch.Tensor, weights: Weights, out: torch.Tensor | None = None, *, activation: str = "silu"
) -> Problem:
    """The Problem that these tensors pose. Raises ArgumentError, naming the tensor, where they do not fit together."""
    named = {"x": x, "w_gate": weights.gate, "w_up": weights.up} | ({} if out is None else {"out": out})
    for name, tensor in named.items():
        if tensor.dim() != 2:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", "give a matrix")
        if tensor.dtype not in DTYPE_NAMES:
            raise ArgumentError(name, f"has dtype {tensor.dtype}", f"convert it to one of {', '.join(DTYPES)}")
        if tensor.stride(1) != 1 and tensor.shape[1] > 1 and tensor.numel():
            raise ArgumentError(name, f"has column stride {tensor.stride(1)}", "call .contiguous() on it")
        if tensor.device != x.device:
            raise ArgumentError(name, f"is on {tensor.device}, x on {x.device}", "move them to one device")
    m, k = x.shape
    n = weights.gate.shape[0]
    for name, tensor, shape in (("w_gate", weights.gate, (n, k)), ("w_up", weights.up, (n, k)), ("out", out, (m, n))):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", f"with these operands it must be {shape}")
    if weights.up.dtype != weights.gate.dtype:
        raise ArgumentError("w_up", f"has dtype {weights.up.dtype}", f"convert it to w_gate's {weights.gate.dtype}")
    return Problem(
        m,
        n,
        k,
        dtype=DTYPE_NAMES[x.dtype],
        weight_dtype=DTYPE_NAMES[weights.gate.dtype],
        out_dtype="" if out is None else DTYPE_NAMES[out.dtype],
        activation=activation,
        layout="separate" if weights.stacked is None else "stacked",
        bias=weights.bias_gate is not None or weights.bias_up is not None,
        x_stride=_row_stride(x),
        gate_stride=weights.gate.stride(0) if weights.stacked is not None else _row_stride(weights.gate),
        up_stride=weights.up.stride(0) if weights.stacked is not None else _row_stride(weights.up),
        out_stride=0 if out is None else _row_stride(out),
        alignment=address_alignment(*named.values()),
    )


def check_fit(problem: Problem, operands: Operands, out_shape: tuple[int, int], device_type: str) -> None:
    """Raises ArgumentError, naming the tensor, unless the operands are what the problem says, down to the strides.

    operands.weights: a `Weights`, as kernels get them that read them in place.
    """
    weights = operands.weights
    named = {
        "x": (operands.x, (problem.m, problem.k), problem.dtype, problem.x_stride),
        "w_gate": (weights.gate, (problem.n, problem.k), problem.weight_dtype, problem.gate_stride),
        "w_up": (weights.up, (problem.n, problem.k), problem.weight_dtype, problem.up_stride),
        "out": (operands.out, out_shape, problem.out_dtype, problem.out_stride + out_shape[1] - problem.n),
    }
    for name, (tensor, shape, dtype, stride) in named.items():
        if tuple(tensor.shape) != shape or tensor.dtype != DTYPES[dtype]:
            wrong = f"is {tensor.dtype} of shape {tuple(tensor.shape)}"
            raise ArgumentError(name, wrong, f"the kernel was built for {DTYPES[dtype]} of shape {shape}")
        if tensor.device.type != device_type or tensor.device != operands.x.device:
            raise ArgumentError(name, f"is on {tensor.device}", f"move it to x's device, a {device_type}")
        rows, columns = shape
        if name.startswith("w_") and problem.layout == "stacked":
            rows += 1  # of one matrix with the other half: the distance matters also for a single row each
        if (rows > 1 and tensor.stride(0) != stride) or (columns > 1 and tensor.stride(1) != 1):
            raise ArgumentError(name, f"has strides {tensor.stride()}", f"the kernel was built for ({stride}, 1)")
    if address_alignment(*(tensor for tensor, *_ in named.values())) < problem.row_alignment:
        wrong = f"an address is not a multiple of {problem.row_alignment} bytes"
        raise ArgumentError("operands", wrong, "build for a problem of less alignment, or align x, weights and out")


def _row_stride(tensor: torch.Tensor) -> int:
    rows, columns = tensor.shape
    return tensor.stride(0) if rows > 1 else columns
