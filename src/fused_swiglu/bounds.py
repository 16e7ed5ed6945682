"""How far a correct kernel can be from the exact result, output by output, given where it rounds."""

from __future__ import annotations

import torch

from .activations import get_activation
from .operands import Weights
from .reference import round_to

_FP32 = 2.0**-24


def error_bound(
    x: torch.Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    rounds: tuple[str, ...] = (),
    recipe: str = "ieee",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """fp64 [m, n]: the most by which act(x @ w_gate.T) * (x @ w_up.T) may be off.

    x[m, k], weights [n, k] of finite values. rounds: the intermediates rounded to out_dtype (`Arithmetic.rounds`); the
    output is rounded once more. Sums are in fp32, in any order, by truncation or to nearest: k additions of error
    2^-23 each of at most ||x_i|| ||w_j|| (Higham, Accuracy and Stability of Numerical Algorithms, 3.1 and 4.2, with
    Cauchy-Schwarz). recipe: `tanh` may be off by 2^-10 |gate| (PTX: tanh.approx has a relative error of 2^-11),
    `poly3` by 2^-12 of the activation, the others by 64 fp32 ulps of it, and more than they are.
    """
    act = get_activation(activation)
    dtype = out_dtype or x.dtype
    unit = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # half an ulp among the subnormals, and more

    def rounded(name: str, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        """Rounding may also overflow, and then anything can follow."""
        if name not in rounds:
            return bound
        bound = bound + (value.abs() + bound) * unit + tiny
        return torch.where(value.abs() + bound >= torch.finfo(dtype).max, torch.inf, bound)

    def accumulated(name: str, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = x.double(), w.double()
        value = left @ right.T
        bound = torch.outer(left.norm(dim=1), right.norm(dim=1)) * (x.shape[1] * 2 * _FP32)
        bound += x.shape[1] * 2.0**-149  # products and sums may be cut to subnormals
        if bias is not None:
            value = value + bias.double()
            bound += value.abs() * _FP32
        return value, rounded(name, value, bound)

    gate, gate_bound = accumulated("gate", weights.gate, weights.bias_gate)
    up, up_bound = accumulated("up", weights.up, weights.bias_up)
    activated = act.torch(gate)
    slope = torch.maximum(act.derivative(gate - gate_bound).abs(), act.derivative(gate + gate_bound).abs())
    for point in act.steepest:
        nearest = torch.clamp(torch.full_like(gate, point), gate - gate_bound, gate + gate_bound)
        slope = torch.maximum(slope, act.derivative(nearest).abs())
    approximate = {"tanh": gate.abs().clamp(min=1) * 2.0**-10, "poly3": activated.abs() * 2.0**-12}
    act_bound = slope * gate_bound + approximate.get(recipe, activated.abs() * (128 * _FP32)) + 2.0**-120
    act_bound = rounded("act", activated, act_bound)
    out = activated * up
    bound = act_bound * (up.abs() + up_bound) + activated.abs() * up_bound
    bound = bound + (out.abs() + bound) * unit + tiny
    lost = gate_bound.isinf() | up_bound.isinf() | act_bound.isinf()
    return torch.where(lost, torch.inf, bound)


def within_bound(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Which outputs are as near to the exact fp64 values as they must be; overflow to infinity counts as near where
    the bound reaches beyond the largest number."""
    error = (out.double() - exact).abs()
    overflows = round_to(exact.abs() + bound, out.dtype).isinf() & out.isinf() & (out.sign() == exact.sign())
    return (error <= bound) | overflows | bound.isinf()
