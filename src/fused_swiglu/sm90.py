"""A bit-accurate model of Hopper's tensor-core accumulation, and of whole kernels, on the CPU.

In NumPy; with numba, where it is installed, faster and with the same bits. The rule is in `sm90_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from .arithmetic import Arithmetic
from .errors import ArgumentError
from .operands import Weights, problem_of
from .problem import DTYPE_NAMES
from .recipes import activate
from .sm90_rule import NO_EXPONENT, STEPS, ZERO_EXPONENT, Step

_NAN = np.uint32(0x7FFFFFFF).view(np.float32)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """An operand, transposed to [k, rows] and padded to whole steps with zeros, as the hardware's copies pad it."""

    value: NDArray[np.float64]  # zero where not finite
    exponent: NDArray[np.int16]
    special: NDArray[np.float64] | None  # the operand itself where any element is not finite

    @property
    def rows(self) -> int:
        return self.value.shape[1]


def accumulate(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    split_k: int = 1,
    c: NDArray[np.float32] | None = None,
    step: Step | None = None,
) -> NDArray[np.float32]:
    """The fp32 accumulators of a[m, k] @ b[n, k].T: one chain of steps over ascending k from c (0 without it).

    a, b: bf16, fp16 or fp8 of one dtype, on any device. c: fp32 [m, n]. step: another rule than the dtype's.
    split_k: that many contiguous parts of k, of equal length up to a multiple of 64, each a chain of its own from 0;
    their results are added in fp32 in ascending order.
    NaN results are 0x7FFFFFFF. Raises ArgumentError for another dtype or shapes that do not match.
    """
    name = DTYPE_NAMES.get(a.dtype, str(a.dtype))
    if name not in STEPS or b.dtype != a.dtype:
        raise ArgumentError("a, b", f"have dtypes {a.dtype} and {b.dtype}", f"give both as one of {', '.join(STEPS)}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ArgumentError("a, b", f"have shapes {tuple(a.shape)} and {tuple(b.shape)}", "give [m, k] and [n, k]")
    rule = step or STEPS[name]
    if split_k < 1 or (c is not None and split_k > 1):
        raise ArgumentError("split_k", f"{split_k}", "give 1 or more; with c only 1")
    if c is not None and (c.shape != (a.shape[0], b.shape[0]) or c.dtype != np.float32):
        raise ArgumentError("c", f"is {c.dtype} of shape {c.shape}", f"give fp32 of {(a.shape[0], b.shape[0])}")
    k = a.shape[1]
    part = max(-(-k // (64 * split_k)) * 64, 64)
    result = c
    for start in range(0, max(k, 1), part):
        chain = _chain(
            _decode(a[:, start : start + part], rule), _decode(b[:, start : start + part], rule), rule,
            c if split_k == 1 else None,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            result = chain if result is None or split_k == 1 else result + chain
    assert result is not None
    result[np.isnan(result)] = _NAN
    return result


def execute(
    arithmetic: Arithmetic,
    x: torch.Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a kernel of that arithmetic writes, predicted: [m, n] in out_dtype (x's by default), on the CPU.

    x[m, k], weights [n, k]: bf16 or fp16, on any device; biases are added to the accumulators in fp32. To predict some
    rows or columns only, give those of x or of the weights. Bits are a GPU's where `recipes.is_exact` says so.
    Raises ArgumentError for an incomplete arithmetic and for operands that do not fit.
    """

    def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(accumulate(a, b, split_k=arithmetic.split_k))

    def act(gate: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(activate(gate.numpy(), activation, arithmetic.recipe))

    return predict(arithmetic, x, weights, activation, out_dtype or x.dtype, sums, act)


def predict(
    arithmetic: Arithmetic,
    x: torch.Tensor,
    weights: Weights,
    activation: str,
    dtype: torch.dtype,
    sums: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What is the same for every executor: sums(a, b) gives fp32 accumulators of a @ b.T and act(gate) the activation
    by the recipe; here biases are added, intermediates rounded, and the product."""
    if not arithmetic.complete:
        raise ArgumentError("arithmetic", f"{arithmetic} is incomplete", "only a complete declaration predicts bits")
    problem_of(x, weights, activation=activation)

    def accumulated(w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        total = sums(x, w)
        return total if bias is None else total + bias.to(total.device).float()

    gate = accumulated(weights.gate, weights.bias_gate)
    return finish(gate, accumulated(weights.up, weights.bias_up), arithmetic.rounds, dtype, act)


def finish(
    gate: torch.Tensor,
    up: torch.Tensor,
    rounds: tuple[str, ...],
    dtype: torch.dtype,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """act(gate) * up of fp32 sums, in fp32, each intermediate in `rounds` rounded to dtype, the product once."""

    def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).float() if name in rounds else value

    activated = rounded("act", act(rounded("gate", gate)))
    return (activated * rounded("up", up)).to(dtype)


def _decode(operand: torch.Tensor, rule: Step) -> _Matrix:
    real = operand.detach().cpu().float().numpy().T  # exact: every input format is a subset of fp32
    padding = -real.shape[0] % rule.products
    real = np.ascontiguousarray(np.pad(real, ((0, padding), (0, 0))))
    finite = np.isfinite(real)
    value = np.where(finite, real, 0).astype(np.float64)
    exponent = np.frexp(value)[1] - 1
    exponent = np.maximum(exponent, rule.min_exponent)
    exponent[value == 0] = NO_EXPONENT
    with np.errstate(invalid="ignore"):  # a signalling NaN
        special = None if finite.all() else real.astype(np.float64)
    return _Matrix(value, exponent.astype(np.int16), special)


@cache
def _compiled() -> Callable[..., None] | None:
    """The chain in numba, or None without it."""
    if find_spec("numba") is None:
        return None
    from .sm90_numba import chain

    return chain


def _chain(a: _Matrix, b: _Matrix, rule: Step, c: NDArray[np.float32] | None) -> NDArray[np.float32]:
    compiled = _compiled()
    if compiled and a.special is None and b.special is None and (c is None or bool(np.isfinite(c).all())):
        out = np.zeros((a.rows, b.rows), np.float32) if c is None else c + np.float32(0)
        operands = (part for matrix in (a, b) for part in _integers(matrix, rule))
        compiled(*operands, out, rule.products, rule.fraction, 2 * rule.digits, rule.kept)
        return out
    out = np.empty((a.rows, b.rows), np.float32)
    rows, columns = 128, 128  # a block's temporaries stay in the second-level cache
    for i in range(0, a.rows, rows):
        for j in range(0, b.rows, columns):
            here = np.s_[i : i + rows], np.s_[j : j + columns]
            start = None if c is None else c[here]
            out[here] = _block(_columns(a, here[0]), _columns(b, here[1]), rule, start)
    return out


def _integers(matrix: _Matrix, rule: Step) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    exponent = matrix.exponent.astype(np.int32)
    return np.ldexp(matrix.value, rule.digits - exponent).astype(np.int32), exponent


def _columns(matrix: _Matrix, part: slice) -> _Matrix:
    special = None if matrix.special is None else matrix.special[:, part]
    return _Matrix(matrix.value[:, part], matrix.exponent[:, part], special)


def _block(a: _Matrix, b: _Matrix, rule: Step, c: NDArray[np.float32] | None) -> NDArray[np.float32]:
    shape = a.rows, b.rows
    with np.errstate(invalid="ignore"):  # a signalling NaN
        acc = np.zeros(shape) if c is None else c.astype(np.float64)
    # Infinities and NaN are carried beside the finite accumulators: a sum of them follows IEEE.
    special = np.where(np.isfinite(acc), 0.0, acc)
    acc[~np.isfinite(acc)] = 0
    exponent, sums = np.empty(shape, np.int16), np.empty(shape, np.int16)
    total, term = np.empty(shape), np.empty(shape)
    for k0 in range(0, a.value.shape[0], rule.products):
        block = range(k0, k0 + rule.products)
        np.maximum(np.frexp(acc)[1] - 1, -126, out=exponent, casting="unsafe")
        exponent[acc == 0] = ZERO_EXPONENT
        for k in block:
            np.add(a.exponent[k][:, None], b.exponent[k], out=sums)
            np.maximum(exponent, sums, out=exponent)
        if exponent.min() < ZERO_EXPONENT:
            _raise_to_zero_terms(exponent, a.exponent[k0 : block.stop], b.exponent[k0 : block.stop])
        scale = np.ldexp(1.0, rule.fraction - exponent.astype(np.int32))
        np.multiply(acc, scale, out=total)
        np.trunc(total, out=total)
        for k in block:
            np.multiply(a.value[k][:, None], scale, out=term)
            np.multiply(term, b.value[k], out=term)
            np.trunc(term, out=term)
            np.add(total, term, out=total)
        acc = _toward_zero(total / scale, rule.kept)
        if a.special is not None or b.special is not None:
            _add_special(special, a, b, block)
        # Infinite products decide before finite ones can overflow.
        overflow = (np.abs(acc) >= 2.0**128) & (special == 0)
        special[overflow] = np.copysign(np.inf, acc[overflow])
        acc[special != 0] = 0
    result = np.where(special != 0, special, acc).astype(np.float32)
    result[np.isnan(special)] = _NAN
    return result


def _raise_to_zero_terms(exponent: NDArray[np.int16], a: NDArray[np.int16], b: NDArray[np.int16]) -> None:
    """A product that is zero takes part with an exponent of its own, which matters where all others are smaller."""
    for k in range(a.shape[0]):
        zero = (a[k] == NO_EXPONENT)[:, None] | (b[k] == NO_EXPONENT)
        exponent[zero & (exponent < ZERO_EXPONENT)] = ZERO_EXPONENT


def _toward_zero(value: NDArray[np.float64], kept: int) -> NDArray[np.float64]:
    """To fp32 with `kept` fraction bits, toward zero; subnormals kept; a zero is +0, also one cut down from below."""
    rounded = (value.view(np.int64) & ~((1 << (52 - kept)) - 1)).view(np.float64)
    tiny = np.abs(value) < 2.0**-126
    if tiny.any():
        rounded[tiny] = np.trunc(value[tiny] * 2.0**149) * 2.0**-149
    return rounded + 0.0


def _add_special(special: NDArray[np.float64], a: _Matrix, b: _Matrix, block: range) -> None:
    left = a.value if a.special is None else a.special
    right = b.value if b.special is None else b.special
    with np.errstate(invalid="ignore"):
        for k in block:
            product = left[k][:, None] * right[k]
            special += np.where(np.isfinite(product), 0.0, product)
