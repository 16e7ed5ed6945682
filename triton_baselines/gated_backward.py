"""The elementwise part of SwiGLU's gradient in one launch: from the gradient of out, and gate and up, to theirs.

In fp32, rounded once, when it is stored. With a' the activation's derivative:

    gradient of gate = grad * up * a'(gate)        gradient of up = grad * a(gate)
"""

# What a launch takes beside a function's own arguments, only Triton knows.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fused_swiglu import recipes as declared

from .tiles import load_tile, store_tile

_LINEAR, _CUBIC = tl.constexpr(declared.LINEAR), tl.constexpr(declared.CUBIC)
# 16 values a thread with 8 warps, loaded 16 bytes at a time along the row.
ROWS, COLUMNS, WARPS = 16, 256, 8


@triton.jit(do_not_specialize=["M", "N", "grad_stride"])
def _gated_backward(
    grad, both, out, M, N, grad_stride,
    BR: tl.constexpr, BC: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out[M, 2N] from grad[M, N] and both[M, 2N], gate beside up; the last two have no gaps between rows."""
    tiles_n = (N + BC - 1) // BC
    tile = tl.program_id(0)
    row, column = tile // tiles_n * BR, tile % tiles_n * BC
    d = load_tile(grad, row, column, M, N, grad_stride, BR, BC, False).to(tl.float32)
    gate = load_tile(both, row, column, M, N, 2 * N, BR, BC, False).to(tl.float32)
    up = load_tile(both + N, row, column, M, N, 2 * N, BR, BC, False).to(tl.float32)
    value, slope = _value_and_slope(gate, ACTIVATION)
    store_tile(out, d * up * slope, row, column, M, N, 2 * N, BR, BC, False)
    store_tile(out + N, d * value, row, column, M, N, 2 * N, BR, BC, False)


@triton.jit
def _value_and_slope(x, ACTIVATION: tl.constexpr):
    """The activation and its derivative, as `fused_swiglu.activations` has them."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu_tanh":
        near = tl.where(x > 40.0, 40.0, tl.where(x < -40.0, -40.0, x))  # beyond, the slope is 0 or 1; NaN passes
        square = near * near
        s = _logistic(near * (_LINEAR + _CUBIC * square))
        return x * s, s + s * (1.0 - s) * near * (_LINEAR + 3 * _CUBIC * square)
    else:
        s = _logistic(x)
        if ACTIVATION == "sigmoid":
            return s, s * (1.0 - s)
        else:
            return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def _logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


def gated_backward(grad: torch.Tensor, preactivations: torch.Tensor, activation: str) -> torch.Tensor:
    """Gradients of the pre-activations [m, 2n], from that of the output [m, n], in their dtype.

    activation: one of `ACTIVATIONS`. On the current stream; allocates the result.
    """
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    both = preactivations.contiguous()
    out = torch.empty_like(both)
    m, n = grad.shape
    tiles = -(-m // ROWS) * -(-n // COLUMNS)
    if tiles:
        with torch.cuda.device_of(grad):
            _gated_backward[(tiles,)](
                grad, both, out, m, n, grad.stride(0), BR=ROWS, BC=COLUMNS, ACTIVATION=activation, num_warps=WARPS
            )
    return out
