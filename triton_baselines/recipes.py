"""The activation recipes on the device, operation by operation as `fused_swiglu.recipes` has them."""

import triton
import triton.language as tl
from triton import knobs

from fused_swiglu import recipes as declared

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
_HIGH, _LOW = (tl.constexpr(v) for v in declared.LOG2_E)
_C1, _C2, _C3, _C4, _C5, _C6 = (tl.constexpr(c) for c in declared.EXP2_DEGREE_6)
_D1, _D2, _D3 = (tl.constexpr(c) for c in declared.EXP2_DEGREE_3)
_LINEAR, _CUBIC = tl.constexpr(declared.LINEAR), tl.constexpr(declared.CUBIC)
_ROUND = tl.constexpr(declared.ROUND)
_SCALE = tl.constexpr(2.0**declared.SCALE_EXPONENT)
_SCALE_BITS = tl.constexpr((127 + declared.SCALE_EXPONENT) << 23)
_LOWEST, _HIGHEST = tl.constexpr(declared.LOWEST), tl.constexpr(declared.HIGHEST)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr, RECIPE: tl.constexpr):
    """The activation of fp32 gates by the recipe: y / (1 + exp(-z))."""
    if ACTIVATION == "relu":
        return tl.where(gate <= 0.0, 0.0, gate)
    else:
        z = gate
        if ACTIVATION == "gelu_tanh":
            z = gate * tl.math.fma(gate * gate, _CUBIC, _LINEAR)
        y = gate
        if ACTIVATION == "sigmoid":
            y = tl.full(gate.shape, 1.0, tl.float32)
        if RECIPE == "ieee":
            return _ieee(y, z, ACTIVATION == "sigmoid")
        elif RECIPE == "tanh":
            half = y * 0.5
            return tl.math.fma(half, _tanh(z * 0.5), half)
        elif RECIPE == "poly3":
            return y * _rcp(_exp_degree_3(-z) + 1.0)
        else:
            return y * _rcp(_ex2(z * -_HIGH) + 1.0)


@triton.jit
def _ieee(y, z, BOUNDED: tl.constexpr):
    """Both sides of the division scaled by 2^-40. BOUNDED: y is the constant 1."""
    if BOUNDED:
        quotient = _divide(y, _scaled_divisor(tl.where(z < _LOWEST, _LOWEST, z)))  # NaN passes
        return tl.where(z >= _HIGHEST, y, quotient * _SCALE)
    else:
        quotient = _divide(tl.maximum(y, _LOWEST), _scaled_divisor(tl.maximum(z, _LOWEST)))
        # y * 0 is NaN for an infinite gate, and makes silu(-inf) NaN as torch has it.
        return tl.where(z < _HIGHEST, tl.math.fma(quotient, _SCALE, y * 0.0), y)


@triton.jit
def _scaled_divisor(z):
    shifted = tl.math.fma(z, -_HIGH, _ROUND)
    f = _fraction(z, shifted)
    p = tl.math.fma(f, _C6, _C5)
    p = tl.math.fma(f, p, _C4)
    p = tl.math.fma(f, p, _C3)
    p = tl.math.fma(f, p, _C2)
    p = tl.math.fma(f, p, _C1)
    p = tl.math.fma(f, p, 1.0)
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + _SCALE_BITS).to(tl.float32, bitcast=True)
    return tl.math.fma(p, power, _SCALE)


@triton.jit
def _fraction(z, shifted):
    """What is left of -z log2 e once the nearest integer, in the low bits of `shifted`, is taken away."""
    f = tl.math.fma(z, -_HIGH, -(shifted - _ROUND))
    return tl.math.fma(z, -_LOW, f)


@triton.jit
def _exp_degree_3(x):
    """exp(x); 2^-126 or so below -87, infinite above 88; NaN passes."""
    z = -tl.where(x < -87.0, -87.0, x)
    shifted = tl.math.fma(z, -_HIGH, _ROUND)
    f = _fraction(z, shifted)
    p = tl.math.fma(f, _D3, _D2)
    p = tl.math.fma(f, p, _D1)
    p = tl.math.fma(f, p, 1.0)
    bits = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(x > 88.0, float("inf"), bits.to(tl.float32, bitcast=True))


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
def _rcp(x):
    """rcp.approx, which must not flush: silu(-87.5) * 2^100 is no small number."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _ex2(x):
    """ex2.approx; flushing is harmless: a subnormal power of two leaves its sum with 1 as it is."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _tanh(x):
    if INTERPRETED:
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0.0, -t, tl.where(x >= 0.0, t, x))
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
