"""The second executor of the tensor-core rule: on a GPU, in integers, without its tensor cores.

The rule is in `fused_swiglu.sm90_rule`, the first executor in `fused_swiglu.sm90`; that both give the same bits is
tested. This one is fast enough to predict 10^9 outputs in a minute. It applies a GPU's own special-function
instructions to the modelled accumulators: the recipes `ex2`, `tanh` and `poly3` are predictable to the bit there.
"""

# What a jitted function iterates over, only Triton's compiler knows.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fused_swiglu import DTYPES, ArgumentError, Arithmetic, Weights
from fused_swiglu.sm90 import predict
from fused_swiglu.sm90_rule import NO_EXPONENT, STEPS, ZERO_EXPONENT, Step

from .interpreter import interpreted
from .recipes import activate

_NO_EXPONENT, _ZERO_EXPONENT = tl.constexpr(NO_EXPONENT), tl.constexpr(ZERO_EXPONENT)
_OUTPUTS_AT_ONCE = 2**28  # 1 GiB of fp32 accumulators for gate, as much for up


@triton.jit(do_not_specialize=["M", "N", "K"])
def _chain(
    a_significand, a_exponent, b_significand, b_exponent, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, PRODUCTS: tl.constexpr, FRACTION: tl.constexpr, CUT: tl.constexpr,
    PRODUCT_FRACTION: tl.constexpr, SPECIAL: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """out[M, N]: fp32 accumulators, from operands split into integers and transposed to [K, M] and [K, N].

    BATCH: how many products of a step are written out in a row, a divisor of PRODUCTS and even.
    """
    tiles_n = (N + BN - 1) // BN
    rows = tl.program_id(0) // tiles_n * BM + tl.arange(0, BM)
    columns = tl.program_id(0) % tiles_n * BN + tl.arange(0, BN)
    in_rows, in_columns = rows < M, columns < N
    a_step, b_step = M.to(tl.int64), N.to(tl.int64)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for k0 in range(0, K, PRODUCTS):
        bits = acc.to(tl.int32, bitcast=True)
        biased = (bits >> 23) & 255
        significand = (bits & 0x7FFFFF) | tl.where(biased > 0, 0x800000, 0)
        own = tl.where(significand == 0, _ZERO_EXPONENT, tl.maximum(biased, 1) - 127)
        largest = own
        smallest = own
        for k in tl.range(0, PRODUCTS, BATCH):
            for i in tl.static_range(BATCH):
                ea = tl.load(a_exponent + (k0 + k + i) * a_step + rows, mask=in_rows, other=0).to(tl.int32)
                eb = tl.load(b_exponent + (k0 + k + i) * b_step + columns, mask=in_columns, other=0).to(tl.int32)
                e = ea[:, None] + eb[None, :]
                if SPECIAL:
                    e = tl.where(_is_special(e), _NO_EXPONENT, e)
                largest = tl.maximum(largest, e)
                smallest = tl.minimum(smallest, e)
        # A product that is zero takes part with an exponent of its own.
        zero_term = smallest < _NO_EXPONENT // 2
        largest = tl.where(zero_term, tl.maximum(largest, _ZERO_EXPONENT), largest)
        term = _shifted(significand, FRACTION - 23, largest - own)
        # Two halves: 16 products of nearly 2^27 each would not fit into 32 bits.
        low = tl.where(bits < 0, -term, term)
        high = tl.full((BM, BN), 0, tl.int32)
        special = tl.full((BM, BN), 0.0, tl.float32)
        for k in tl.range(0, PRODUCTS, BATCH):
            for i in tl.static_range(BATCH):
                ea = tl.load(a_exponent + (k0 + k + i) * a_step + rows, mask=in_rows, other=0).to(tl.int32)
                eb = tl.load(b_exponent + (k0 + k + i) * b_step + columns, mask=in_columns, other=0).to(tl.int32)
                sa = tl.load(a_significand + (k0 + k + i) * a_step + rows, mask=in_rows, other=0).to(tl.int32)
                sb = tl.load(b_significand + (k0 + k + i) * b_step + columns, mask=in_columns, other=0).to(tl.int32)
                product = sa[:, None] * sb[None, :]
                e = ea[:, None] + eb[None, :]
                if SPECIAL:
                    special += tl.where(_is_special(e), _special_product(e, product), 0.0)
                    product = tl.where(_is_special(e), 0, product)
                    e = tl.where(_is_special(e), _NO_EXPONENT, e)
                term = _shifted(tl.abs(product), FRACTION - PRODUCT_FRACTION, largest - e)
                term = tl.where(product < 0, -term, term)
                if i % 2 == 0:
                    low += term
                else:
                    high += term
        total = (low.to(tl.int64) + high.to(tl.int64)).to(tl.float64)
        scale = ((largest.to(tl.int64) + (1023 - FRACTION)) << 52).to(tl.float64, bitcast=True)
        new = _toward_zero(total * scale, CUT)
        new = tl.where(biased == 255, acc, new)  # an infinity stays
        if SPECIAL:
            met = tl.where(biased == 255, acc + special, special)
            new = tl.where(special == 0.0, new, met)
        acc = new
    at = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, acc, mask=in_rows[:, None] & in_columns[None, :])


# Exponents that say what an operand is that is not finite: sums of two tell all products apart.
INFINITY, NAN = 5_000, 25_000


@triton.jit
def _is_special(exponent):
    """Whether a product with this sum of exponents is infinite or NaN; inf * 0 lies at -5000."""
    return (exponent > 4_000) | ((exponent > -6_000) & (exponent < -4_000))


@triton.jit
def _special_product(exponent, product):
    infinite = (exponent > 0) & (exponent < 14_000)
    return tl.where(infinite, tl.where(product < 0, float("-inf"), float("inf")), float("nan"))


@triton.jit
def _shifted(magnitude, LEFT: tl.constexpr, right):
    """magnitude * 2^(LEFT - right), toward zero, for magnitudes that fit after the left shift."""
    if LEFT >= 0:
        return (magnitude << LEFT) >> tl.minimum(right, 31)
    else:
        return (magnitude >> -LEFT) >> tl.minimum(right, 31)


@triton.jit
def _toward_zero(value, CUT: tl.constexpr):
    """fp64 to fp32, toward zero, its last bits CUT away; subnormals kept, a zero is +0, beyond fp32 an infinity."""
    near = value.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True)
    size = tl.abs(value)
    too_far = (tl.abs(near).to(tl.float64) > size) & (size < 3.402823669209385e38)
    bits = tl.where(too_far, bits - 1, bits)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits & CUT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["size"])
def _activate(gate, out, size, ACTIVATION: tl.constexpr, RECIPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out + at, activate(tl.load(gate + at, mask=inside, other=0.0), ACTIVATION, RECIPE), mask=inside)


@dataclass(frozen=True, slots=True)
class _Split:
    """An operand as integers, transposed to [k, rows] and padded with zeros to whole steps."""

    significand: torch.Tensor
    exponent: torch.Tensor
    special: bool


def _split(operand: torch.Tensor, rule: Step) -> _Split:
    given = operand.float().T
    given = torch.nn.functional.pad(given, (0, 0, 0, -given.shape[0] % rule.products))
    value = torch.where(given.isfinite(), given, 0.0)
    exponent = (torch.frexp(value).exponent - 1).clamp(min=rule.min_exponent)
    significand = torch.ldexp(value.double(), rule.digits - exponent)
    significand = torch.where(given.isinf(), given.sign(), significand).to(torch.int16)
    exponent = exponent.masked_fill(value == 0, NO_EXPONENT)
    exponent = exponent.masked_fill(given.isinf(), INFINITY).masked_fill(given.isnan(), NAN).to(torch.int16)
    return _Split(significand.contiguous(), exponent.contiguous(), not bool(given.isfinite().all()))


def accumulate(a: torch.Tensor, b: torch.Tensor, *, split_k: int = 1) -> torch.Tensor:
    """As `fused_swiglu.sm90.accumulate`, in a tensor on a's device: fp32 [m, n] of a[m, k] @ b[n, k].T.

    On a CPU it runs in Triton's interpreter. Raises ArgumentError for another dtype.
    """
    name = next((name for name, dtype in DTYPES.items() if dtype == a.dtype), "")
    if name not in STEPS or b.dtype != a.dtype:
        raise ArgumentError("a, b", f"have dtypes {a.dtype} and {b.dtype}", f"give both as one of {', '.join(STEPS)}")
    if split_k < 1:
        raise ArgumentError("split_k", f"{split_k}", "give 1 or more")
    rule, k = STEPS[name], a.shape[1]
    part = max(-(-k // (64 * split_k)) * 64, 64)
    chains = [
        _one_chain(a[:, start : start + part], b[:, start : start + part], rule) for start in range(0, max(k, 1), part)
    ]
    total = chains[0]
    for chain in chains[1:]:
        total = total + chain
    return total


def _one_chain(a: torch.Tensor, b: torch.Tensor, rule: Step) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[0], device=a.device)
    left, right = _split(a, rule), _split(b, rule)
    special = left.special or right.special
    # As large a tile, and as many products written out, as fit into registers.
    bm, bn, batch = (32, 64, 16) if rule.products == 16 and not special else (32, 32, 4)
    programs = -(-a.shape[0] // bm) * -(-b.shape[0] // bn)
    if programs:
        _here(a.device)._chain[(programs,)](
            left.significand, left.exponent, right.significand, right.exponent, out, a.shape[0], b.shape[0],
            left.exponent.shape[0], BM=bm, BN=bn, PRODUCTS=rule.products, FRACTION=rule.fraction,
            PRODUCT_FRACTION=2 * rule.digits, CUT=-(1 << (23 - rule.kept)),
            SPECIAL=special, BATCH=batch, num_warps=4,
        )  # fmt: skip
    return out


def activated(gate: torch.Tensor, activation: str, recipe: str) -> torch.Tensor:
    """The activation of contiguous fp32 gates of any shape by the recipe, on their device, by its own instructions."""
    out = torch.empty_like(gate)
    if gate.numel():
        _here(gate.device)._activate[(-(-gate.numel() // 1024),)](
            gate, out, gate.numel(), ACTIVATION=activation, RECIPE=recipe, BLOCK=1024
        )
    return out


def execute(
    arithmetic: Arithmetic,
    x: torch.Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `fused_swiglu.sm90.execute`, on x's device: what a kernel of that arithmetic writes, [m, n]."""
    dtype = out_dtype or x.dtype
    n = weights.gate.shape[0]
    out = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)

    def sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return accumulate(a, b, split_k=arithmetic.split_k)

    def act(gate: torch.Tensor) -> torch.Tensor:
        return activated(gate, activation, arithmetic.recipe)

    step = max(1, _OUTPUTS_AT_ONCE // n)
    for top in range(0, x.shape[0], step):
        rows = x[top : top + step]
        out[top : top + step] = predict(arithmetic, rows, weights, activation, dtype, sums, act)
    return out


def _here(device: torch.device) -> Any:
    """The module whose kernels run on that device."""
    return interpreted("model") if device.type == "cpu" else sys.modules[__name__]
