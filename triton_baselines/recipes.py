"""The activation recipes on the device, operation by operation as `fused_swiglu.activations` declares them."""

import triton
import triton.language as tl
from triton import knobs

# log2(e) as a sum of two fp32 numbers, and the minimax polynomial of 2^f on [-1/2, 1/2], constant term 1.
LOG2_E = (1.4426950216293335, 1.925963033500011e-08)
EXP2_DEGREE_6 = (
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353360504377633,
)
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_LOG2_E_HIGH, _LOG2_E_LOW = (tl.constexpr(v) for v in LOG2_E)
_C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in EXP2_DEGREE_6)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_SCALE = tl.constexpr(2.0**-40)  # keeps the divisor, and its reciprocal, normal for every gate that matters
_SCALE_BITS = tl.constexpr((127 - 40) << 23)


@triton.jit
def silu(gate, RECIPE: tl.constexpr):
    """silu of fp32 gates by the recipe."""
    if RECIPE == "ieee":
        return _silu_ieee(gate)
    else:
        return _silu_ex2(gate)


@triton.jit
def _silu_ieee(gate):
    """gate / (1 + exp(-gate)): fma exp of degree 6, correctly rounded division, both sides scaled by 2^-40."""
    g = tl.maximum(gate, -110.0)  # below, the result rounds to -0
    shifted = tl.math.fma(g, -_LOG2_E_HIGH, _ROUND)
    n = shifted - _ROUND
    f = tl.math.fma(g, -_LOG2_E_HIGH, -n)
    f = tl.math.fma(g, -_LOG2_E_LOW, f)
    p = tl.math.fma(f, _C6, _C5)
    p = tl.math.fma(f, p, _C4)
    p = tl.math.fma(f, p, _C3)
    p = tl.math.fma(f, p, _C2)
    p = tl.math.fma(f, p, _C1)
    p = tl.math.fma(f, p, 1.0)
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + _SCALE_BITS).to(tl.float32, bitcast=True)
    quotient = _divide(g, tl.math.fma(p, power, _SCALE))
    # gate * 0 is NaN for an infinite gate, and makes silu(-inf) NaN as torch has it.
    scaled = tl.math.fma(quotient, _SCALE, gate * 0.0)
    return tl.where(gate < 20.0, scaled, gate)  # from 20 on 1 + exp(-gate) is 1; NaN passes


@triton.jit
def _divide(a, b):
    """a / b, correctly rounded for the recipe's operands: a seed, one Newton step, Markstein's correction."""
    if INTERPRETED:
        return a / b
    else:
        seed = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
        r = tl.math.fma(tl.math.fma(-b, seed, 1.0), seed, seed)
        q = a * r
        return tl.math.fma(tl.math.fma(-b, q, a), r, q)


@triton.jit
def _silu_ex2(gate):
    """gate * rcp.approx(1 + ex2.approx(-gate * log2 e)): two special-function instructions."""
    if INTERPRETED:
        return gate * (1.0 / (1.0 + tl.exp2(gate * -_LOG2_E_HIGH)))
    else:
        # Flushing is harmless here: a subnormal power of two leaves 1 + e as it is. It would not be in the reciprocal.
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [gate * -_LOG2_E_HIGH], dtype=tl.float32, is_pure=True, pack=1
        )
        r = tl.inline_asm_elementwise(
            "rcp.approx.f32 $0, $1;", "=f,f", [e + 1.0], dtype=tl.float32, is_pure=True, pack=1
        )
        return gate * r
