"""The activation recipes: how a gate function is computed in fp32, operation by operation, here in NumPy.

All four functions have one shape, y / (1 + exp(-z)): silu y = z = g; sigmoid y = 1, z = g; gelu_tanh y = g,
z = g (g^2 CUBIC + LINEAR); relu needs no recipe. The recipes differ in how that quotient is formed:

- `ieee`: IEEE operations only (fma, multiply, add, divide; round to nearest), so a CPU and a GPU give the same bits.
- `ex2`: y * rcp.approx(1 + ex2.approx(-z log2 e)). `poly3`: the same with 2^x by a polynomial of degree 3.
- `tanh`: h + h tanh.approx(z / 2), h = y / 2.

The last three use a GPU's approximate instructions, which a CPU can only come close to: `is_exact` says which is which.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError

F32 = NDArray[np.float32]
_f = np.float32

# log2(e) as a sum of two fp32 numbers, and minimax polynomials of 2^f on [-1/2, 1/2], constant term 1.
LOG2_E = (1.4426950216293335, 1.925963033500011e-08)
EXP2_DEGREE_3 = (0.6932829022407532, 0.24221095442771912, 0.055008936673402786)
EXP2_DEGREE_6 = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353360504377633,
)
LINEAR = 1.5957691669464111  # 2 sqrt(2 / pi), and 0.044715 times that, in fp32
CUBIC = 0.07135481387376785
ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum
SCALE_EXPONENT = -40  # keeps the divisor, and its reciprocal, normal for every z that matters
LOWEST, HIGHEST = -110.0, 20.0  # below, y / (1 + exp(-z)) rounds to 0; from HIGHEST on, 1 + exp(-z) rounds to 1


def is_exact(activation: str, recipe: str) -> bool:
    """Whether `activate` gives a GPU's bits."""
    return activation == "relu" or recipe == "ieee"


def activate(gate: F32, activation: str, recipe: str) -> F32:
    """The activation of fp32 gates of any shape, by the recipe. Follows torch for NaN and infinities: silu(-inf) and
    gelu_tanh(-inf) are NaN. Raises ArgumentError for a name it does not know."""
    if activation == "relu":
        return np.where(gate <= 0, _f(0), gate)
    if activation not in ("silu", "gelu_tanh", "sigmoid"):
        raise ArgumentError("activation", f"unknown {activation!r}", "choose silu, gelu_tanh, relu or sigmoid")
    if recipe not in ("ieee", "ex2", "poly3", "tanh"):
        raise ArgumentError("recipe", f"unknown {recipe!r}", "choose ieee, ex2, poly3 or tanh")
    with np.errstate(all="ignore"):
        z = gate * fma(gate * gate, _f(CUBIC), np.full_like(gate, LINEAR)) if activation == "gelu_tanh" else gate
        y = np.ones_like(gate) if activation == "sigmoid" else gate
        if recipe == "ieee":
            return _ieee(y, z, activation == "sigmoid")
        if recipe == "tanh":
            half = y * _f(0.5)
            return fma(np.tanh(z * _f(0.5)), half, half)
        power = _exp(-z, EXP2_DEGREE_3) if recipe == "poly3" else np.exp2(z * _f(-LOG2_E[0]))
        return (y * (_f(1) / (power + _f(1)))).astype(np.float32)


def _ieee(y: F32, z: F32, bounded: bool) -> F32:
    """y / (1 + exp(-z)), both sides of the division scaled by 2^SCALE_EXPONENT. bounded: y is the constant 1."""
    scale = _f(2.0**SCALE_EXPONENT)
    lowest = _f(LOWEST)
    if bounded:
        quotient = y / _scaled_divisor(np.maximum(z, lowest))  # maximum passes NaN on
        return np.where(z >= HIGHEST, y, quotient * scale)
    quotient = np.divide(np.fmax(y, lowest), _scaled_divisor(np.fmax(z, lowest)), dtype=np.float32)
    quotient = quotient + _f(0)  # -0 / b is +0: that is what a corrected reciprocal gives
    # y * 0 is NaN for an infinite gate, and makes silu(-inf) NaN as torch has it.
    return np.where(z < HIGHEST, fma(quotient, np.full_like(y, scale), y * _f(0)), y)


def _scaled_divisor(z: F32) -> F32:
    """2^SCALE_EXPONENT (1 + exp(-z))."""
    p, exponent = _exp_parts(-z, EXP2_DEGREE_6)
    power = (exponent + np.int32((127 + SCALE_EXPONENT) << 23)).view(np.float32)
    return fma(p, power, np.full_like(z, 2.0**SCALE_EXPONENT))


def _exp(x: F32, coefficients: tuple[float, ...]) -> F32:
    """exp(x); 2^-126 or so below -87, infinite above 88; NaN passes."""
    p, exponent = _exp_parts(np.where(x < -87, _f(-87), x), coefficients)
    return np.where(x > 88, _f(np.inf), (p.view(np.int32) + exponent).view(np.float32))


def _exp_parts(x: F32, coefficients: tuple[float, ...]) -> tuple[F32, NDArray[np.int32]]:
    """p and n << 23 with exp(x) = p 2^n."""
    high, low = (np.full_like(x, v) for v in LOG2_E)
    shifted = fma(x, high, np.full_like(x, ROUND))
    n = shifted - _f(ROUND)
    f = fma(x, high, -n)
    f = fma(x, low, f)
    p = np.full_like(x, coefficients[-1])
    for coefficient in (*coefficients[-2::-1], 1.0):
        p = fma(f, p, np.full_like(x, coefficient))
    return p, shifted.view(np.int32) << 23


def fma(a: F32, b: F32 | np.float32, c: F32) -> F32:
    """a * b + c in fp32 with one rounding, to nearest even; broadcasts. NumPy has none.

    The product is exact in fp64. The sum is rounded to fp64 toward the odd neighbour, by TwoSum (Boldo & Melquiond
    2008, "Emulation of FMA and correctly rounded sums"), after which rounding to fp32 is the only one that counts.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c).astype(np.float64)
    total = np.atleast_1d(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact_and_even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    outward = np.signbit(error) == np.signbit(total)
    odd = bits + np.where(inexact_and_even, np.where(outward, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32).reshape(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)))
