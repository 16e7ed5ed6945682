"""The rule of one tensor-core step on Hopper, for each input format.

MMA-Sim, arXiv 2511.10909; Khattak & Mikaitis, arXiv 2512.07004: the products of one step and the accumulator are
aligned to the largest exponent among them, each is truncated to `fraction` bits below it, they are added exactly, and
the sum is rounded toward zero. Significands are not normalised: a product's exponent is the sum of its factors'
exponents, and subnormals keep the smallest one. Infinite and NaN products follow IEEE 754 and decide before finite ones
can overflow; a NaN is 0x7FFFFFFF; a zero is +0.
"""

from __future__ import annotations

from dataclasses import dataclass

ZERO_EXPONENT = -133
NO_EXPONENT = -10_000  # of an operand that is zero: below every sum of two exponents


@dataclass(frozen=True, slots=True)
class Step:
    """The rule of a tensor-core step for one input format.

    products: how many are summed at once with the accumulator; fraction: bits kept below the largest exponent;
    kept: fraction bits of the fp32 result; digits: fraction bits of the format's significand; min_exponent: of its
    smallest normal number.
    """

    products: int
    fraction: int
    kept: int
    digits: int
    min_exponent: int


STEPS = {
    "bf16": Step(16, 25, 23, 7, -126),
    "fp16": Step(16, 25, 23, 10, -14),
    "fp8_e4m3": Step(32, 13, 13, 3, -6),
    "fp8_e5m2": Step(32, 13, 13, 2, -14),
}
