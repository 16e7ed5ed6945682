"""The activation recipes: how a gate function is computed in fp32, operation by operation, and that in NumPy.

`ieee` is a sequence of IEEE operations, so a CPU and a GPU give the same bits. The others (`ex2`, `tanh`, `poly3`)
are built on a GPU's approximate instructions, which a CPU can only come close to: `is_exact` says which is which.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# log2(e) as a sum of two fp32 numbers, and minimax polynomials of 2^f on [-1/2, 1/2], constant term 1.
LOG2_E = (1.4426950216293335, 1.925963033500011e-08)
EXP2_DEGREE_6 = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353360504377633,
)
ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum
SCALE_EXPONENT = -40  # keeps the divisor, and its reciprocal, normal for every gate that matters
LOWEST, HIGHEST = -110.0, 20.0  # below, silu rounds to -0; from HIGHEST on, 1 + exp(-z) rounds to 1


def fma(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a * b + c in fp32 with one rounding, to nearest even. NumPy has none.

    The product is exact in fp64. The sum is rounded to fp64 toward the odd neighbour, by TwoSum (Boldo & Melquiond
    2008, "Emulation of FMA and correctly rounded sums"), after which rounding to fp32 is the only one that counts.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.atleast_1d(total).view(np.int64)
    even_and_inexact = (np.atleast_1d(error) != 0) & (bits & 1 == 0) & np.isfinite(np.atleast_1d(total))
    outward = np.signbit(np.atleast_1d(error)) == np.signbit(np.atleast_1d(total))
    odd = bits + np.where(even_and_inexact, np.where(outward, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32).reshape(total.shape)


def _quotient_ieee(a: F32, z: F32) -> F32:
    """a / (1 + exp(-z)) for LOWEST <= z; with both sides of the division scaled by 2^SCALE_EXPONENT, then undone."""
    high, low = (np.float32(v) for v in LOG2_E)
    shifted = fma(z, -high, np.float32(ROUND))
    n = shifted - np.float32(ROUND)
    f = fma(z, -high, -n)
    f = fma(z, -low, f)
    p = np.full_like(f, EXP2_DEGREE_6[-1])
    for coefficient in (*EXP2_DEGREE_6[-2::-1], 1.0):
        p = fma(f, p, np.float32(coefficient))
    with np.errstate(over="ignore"):
        power = ((shifted.view(np.int32) << 23) + np.int32((127 + SCALE_EXPONENT) << 23)).view(np.float32)
    return a / fma(p, power, np.float32(2.0**SCALE_EXPONENT))


def silu_ieee(gate: F32) -> F32:
    """silu of fp32 gates by the `ieee` recipe; any shape."""
    with np.errstate(invalid="ignore", over="ignore"):
        z = np.fmax(gate, np.float32(LOWEST))
        quotient = _quotient_ieee(z, z)
        # gate * 0 is NaN for an infinite gate, and makes silu(-inf) NaN as torch has it.
        scaled = fma(quotient, np.float32(2.0**SCALE_EXPONENT), gate * np.float32(0))
        return np.where(gate < np.float32(HIGHEST), scaled, gate)
