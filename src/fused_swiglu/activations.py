"""The gate functions: each one's formula, its derivative, and its value to any precision.

Infinities follow torch: silu(-inf) and gelu_tanh(-inf) are NaN (-inf * 0), +inf stays inf, NaN stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
from torch import Tensor, where, zeros_like

from .errors import ArgumentError

# The argument of gelu_tanh's logistic is x * (LINEAR + CUBIC * x^2).
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


@dataclass(frozen=True, slots=True)
class Activation:
    """A gate function of gated linear units (Shazeer 2020, arXiv:2002.05202).

    torch: elementwise, in the dtype it gets; finite, and accurate in the tails, wherever the function is.
    derivative: elementwise, in the dtype it gets, for finite x.
    steepest: where the slope's magnitude has its local maxima; on any interval it is largest at an end or there.
    ulps: bound on the relative error of `torch` in fp64, in units of 2^-53 (results below 2^-1022 excepted).
    mp: from mpmath.mpf to mpmath.mpf at the working precision, for finite x.
    rational: whether every value is a rational number, so that a product with it can tie between two floats. The
        others are rational at 0 alone, where `mp` is exact.
    """

    name: str
    torch: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    steepest: tuple[float, ...]
    ulps: int
    mp: Callable[[Any], Any]
    rational: bool = False


def _times_logistic(y: Tensor | float, z: Tensor) -> Tensor:
    """y / (1 + exp(-z)). For z < 0 it is y * exp(z) / (1 + exp(z)), with exp(z) applied one half at a time: no
    overflow, and exp(z) alone, which underflows before y * exp(z) does, is never formed."""
    half = (z.abs() * -0.5).exp()
    whole = 1 + half * half
    return where(z >= 0, y / whole, y * half / whole * half)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), also called Swish (Elfwing, Uchibe & Doya 2017, arXiv:1702.03118)."""
    return _times_logistic(x, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) (Hendrycks & Gimpel 2016, arXiv:1606.08415).

    Computed as x * logistic(2 sqrt(2/pi) * (x + 0.044715 x^3)), the same function without the cancellation.
    """
    return _times_logistic(x, x * (_LINEAR + _CUBIC * x * x))


def relu(x: Tensor) -> Tensor:
    """max(x, 0); the gate of ReGLU (Shazeer 2020)."""
    return x.relu()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); the gate of the first gated linear unit (Dauphin et al. 2016, arXiv:1612.08083)."""
    return _times_logistic(1.0, x)


def _silu_derivative(x: Tensor) -> Tensor:
    return sigmoid(x) * (1 + x * sigmoid(-x))


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    near = x.clamp(-40, 40)  # beyond, logistic(z) * logistic(-z) is 0 even in fp64, while x^3 might overflow
    z = near * (_LINEAR + _CUBIC * near * near)
    return sigmoid(z) + sigmoid(z) * sigmoid(-z) * near * (_LINEAR + 3 * _CUBIC * near * near)


def _relu_derivative(x: Tensor) -> Tensor:
    return where(x > 0, 1.0, zeros_like(x))


def _sigmoid_derivative(x: Tensor) -> Tensor:
    return sigmoid(x) * sigmoid(-x)


def _gelu_tanh_mp(x: Any) -> Any:
    z = mpmath.sqrt(8 / mpmath.pi) * (x + 44715 * x**3 / mpmath.mpf(10**6))
    return x / (1 + mpmath.exp(-z))


# ulps: silu and sigmoid count up to 11 roundings; gelu_tanh's argument carries 6 more, multiplied by its size, under
# 1490 where the result is normal. steepest: the zeros of each second derivative.
_ACTIVATIONS = {
    a.name: a
    for a in (
        Activation(
            "silu",
            silu,
            _silu_derivative,
            steepest=(-2.3993572805205155, 2.3993572805205155),
            ulps=12,
            mp=lambda x: x / (1 + mpmath.exp(-x)),
        ),
        Activation(
            "gelu_tanh",
            gelu_tanh,
            _gelu_tanh_derivative,
            steepest=(-1.4185040087908284, 1.4185040087908284),
            ulps=2**14,
            mp=_gelu_tanh_mp,
        ),
        Activation(
            "relu", relu, _relu_derivative, steepest=(), ulps=0, mp=lambda x: max(x, mpmath.mpf(0)), rational=True
        ),
        Activation(
            "sigmoid",
            sigmoid,
            _sigmoid_derivative,
            steepest=(0.0,),
            ulps=12,
            mp=lambda x: 1 / (1 + mpmath.exp(-x)),
        ),
    )
}


# In place of an activation, for controls that leave it out: gate * up.
IDENTITY = Activation(
    "identity", lambda x: x, lambda x: zeros_like(x) + 1, steepest=(), ulps=0, mp=lambda x: x, rational=True
)


def get_activation(name: str) -> Activation:
    """The activation of that name (`problem.ACTIVATIONS` lists them). Raises ArgumentError if there is none."""
    if name not in _ACTIVATIONS:
        raise ArgumentError("activation", f"unknown {name!r}", f"choose from {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
