"""The chain of `sm90` compiled by numba: integers all through, the same bits, about twice as fast as NumPy."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .sm90_rule import NO_EXPONENT, ZERO_EXPONENT


@njit(cache=True, nogil=True)
def chain(
    a: NDArray[np.int32],
    ea: NDArray[np.int32],
    b: NDArray[np.int32],
    eb: NDArray[np.int32],
    acc: NDArray[np.float32],
    products: int,
    fraction: int,
    product_fraction: int,
    kept: int,
) -> None:
    """Adds a @ b.T to acc[m, n] in place. a, ea [k, m] and b, eb [k, n]: significands as integers and their
    exponents, of finite operands; k is a multiple of `products`."""
    k, m = a.shape
    n = b.shape[1]
    largest, smallest = np.empty(n, np.int32), np.empty(n, np.int32)
    low, high = np.empty(n, np.int32), np.empty(n, np.int32)
    left = fraction - product_fraction
    drop = np.int32(-(1 << (23 - kept)))
    for i in range(m):
        row = acc[i]
        bits = row.view(np.int32)
        for k0 in range(0, k, products):
            for j in range(n):
                largest[j] = _own_exponent(bits[j])
                smallest[j] = largest[j]
            for step in range(k0, k0 + products):
                e = ea[step, i]
                for j in range(n):
                    total = e + eb[step, j]
                    largest[j] = max(largest[j], total)
                    smallest[j] = min(smallest[j], total)
            for j in range(n):
                if smallest[j] < NO_EXPONENT // 2:
                    largest[j] = max(largest[j], ZERO_EXPONENT)
                size = np.int32(bits[j] & 0x7FFFFF)
                if bits[j] & 0x7F800000:
                    size |= 0x800000
                size = size << (fraction - 23) if fraction >= 23 else size >> (23 - fraction)
                size >>= min(largest[j] - _own_exponent(bits[j]), 31)
                low[j] = -size if bits[j] < 0 else size
                high[j] = 0
            # Two sums: 16 products of nearly 2^27 each would not fit into 32 bits.
            for step in range(k0, k0 + products, 2):
                _add(a[step, i], ea[step, i], b[step], eb[step], largest, left, low)
                _add(a[step + 1, i], ea[step + 1, i], b[step + 1], eb[step + 1], largest, left, high)
            for j in range(n):
                if bits[j] & 0x7F800000 != 0x7F800000:  # an infinity stays
                    total64 = np.float64(np.int64(low[j]) + np.int64(high[j]))
                    value = math.ldexp(total64, int(largest[j] - fraction))
                    near = np.float32(value)
                    row[j] = near
                    if abs(np.float64(near)) > abs(value) and abs(value) < 2.0**128:
                        bits[j] -= 1
                    bits[j] = 0 if bits[j] & 0x7FFFFFFF == 0 else bits[j] & drop


@njit(cache=True, inline="always")
def _own_exponent(bits):
    """The exponent of an fp32 accumulator: subnormals keep the smallest, a zero has one of its own."""
    if bits & 0x7FFFFFFF == 0:
        return np.int32(ZERO_EXPONENT)
    return np.int32(max((bits >> 23) & 255, 1) - 127)


@njit(cache=True, inline="always")
def _add(a, e, b, eb, largest, left, total):
    """Adds the products a * b, aligned to the largest exponents and cut toward zero."""
    for j in range(len(total)):
        product = a * b[j]
        size = abs(product) << left
        size >>= min(largest[j] - e - eb[j], 31)
        total[j] += -size if product < 0 else size
