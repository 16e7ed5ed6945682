"""fallback: SwiGLU by torch, for devices that have no kernel of a declared arithmetic."""

from __future__ import annotations

import torch

from .activations import get_activation
from .operands import Weights


def fallback(
    x: torch.Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    out: torch.Tensor | None = None,
    preactivations: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(x @ gate.T + bias_gate) * (x @ up.T + bias_up), [m, n] in x's dtype, into `out` where it is given.

    x[m, k], weights [n, k], biases [n]: of one floating dtype, on one device. Products are summed by torch in fp32 (in
    fp64 for fp64), in an order of its own; biases and activation in the same precision, and one rounding at the end. So
    the accuracy is that of the kernels, the bits are not a declared arithmetic's.
    preactivations[m, 2n]: takes gate beside up, before the activation. Not differentiable; fp32 copies come and go.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):  # which would take the fp32 products to bf16
        gate = _product(x, weights.gate, weights.bias_gate)
        up = _product(x, weights.up, weights.bias_up)
        if preactivations is not None:
            n = gate.shape[1]
            preactivations[:, :n].copy_(gate)
            preactivations[:, n:].copy_(up)
        value = get_activation(activation).torch(gate).mul_(up)
        return value.to(x.dtype) if out is None else out.copy_(value)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[0]:
        product = torch.mm(x, weight.T, out_dtype=torch.float32)
    else:
        product = x.to(wide) @ weight.to(wide).T
    return product if bias is None else product.add_(bias.to(wide))
