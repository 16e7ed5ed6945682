"""SwiGLU as operators of torch: what autograd, torch.compile, torch.export and a CUDA graph see of the kernels.

`torch.ops.fused_swiglu`: `swiglu` (forward), `swiglu_backward` (the elementwise part of its gradient) and `product`
(one GEMM under a declared arithmetic). `swiglu` and `product` below call them, and are what models should call.

bf16 and fp16 go to `select.swiglu`. fp32 and fp64, for which no kernel stands behind, are computed by torch in their
own dtype, under no declared arithmetic: gradients can be checked in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .activations import get_activation
from .errors import ArgumentError
from .operands import Weights
from .problem import ACTIVATIONS
from .sm90 import accumulate

ARITHMETIC = "sm90:ieee:out"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# What runs on a device type in place of torch's own operations: entry points `DEVICE.gated_backward`, `DEVICE.product`.
GROUP = "fused_swiglu.device_functions"
_library = torch.library.Library("fused_swiglu", "DEF")
_library.define(
    "swiglu(Tensor x, Tensor w_gate, Tensor? w_up, Tensor? bias_gate, Tensor? bias_up, str activation, "
    "str arithmetic, bool store) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "swiglu_backward(Tensor grad, Tensor preactivations, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define("product(Tensor x, Tensor w) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def swiglu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None = None,
    *,
    activation: str = "silu",
    bias_gate: Tensor | None = None,
    bias_up: Tensor | None = None,
    arithmetic: str = ARITHMETIC,
    recompute: bool = False,
) -> Tensor:
    """act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up), differentiable: [..., n] in x's dtype.

    x[..., k]; w_gate[n, k], w_up[n, k], or one stacked w_gate[2n, k], gate above up, without w_up; biases [n], both
    or none.
    arithmetic: what the bits are on an SM90 GPU; see `Arithmetic`.
    recompute: what backward reads. False: the pre-activations [..., 2n], rounded to x's dtype, stored only where a
        gradient is wanted; on an SM90 GPU a kernel must be there that writes them (cutlass.*). True: nothing more than
        the inputs; backward computes them anew, by torch's GEMMs.
    Under autocast the operands are cast to its dtype first, as for torch's linear.
    Raises ArgumentError for operands that do not fit together. There is no second derivative, and no vmap: give x
    more rows instead.
    """
    x, w_gate, w_up, bias_gate, bias_up = _autocast(x, w_gate, w_up, bias_gate, bias_up)
    if x.dim() < 1:
        raise ArgumentError("x", "is a scalar", "give [..., k]")
    wants_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, w_gate, w_up, bias_gate, bias_up)
    )
    rows = x.reshape(-1, x.shape[-1])
    store = wants_grad and not recompute
    out, _ = torch.ops.fused_swiglu.swiglu(rows, w_gate, w_up, bias_gate, bias_up, activation, str(arithmetic), store)
    return out.reshape(*x.shape[:-1], out.shape[1])


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias under the arithmetic `sm90:none:out`, differentiable: [..., n] in x's dtype.

    x[..., k], w[n, k], bf16 or fp16. One tensor-core chain over ascending k, rounded once, so that a row's bits do not
    depend on the rows beside it. On an SM90 GPU a persistent Triton GEMM; on a CPU the model of the same arithmetic,
    with the same bits, slowly. bias[n] is added afterwards by torch, which rounds again. Backward is torch's GEMMs.
    Raises ArgumentError for operands that do not fit together, or of another dtype.
    """
    x, w, bias = _autocast(x, w, bias)
    out = torch.ops.fused_swiglu.product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[0])
    return out if bias is None else out + bias


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, where it is on for their device; fp64 stays, as torch leaves it."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


# The operators


def _swiglu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    arithmetic: str,
    store: bool,
) -> tuple[Tensor, Tensor]:
    out, stored = _fake_swiglu(x, w_gate, w_up, bias_gate, bias_up, activation, arithmetic, store)
    if not len(x):
        return out, stored
    if x.dtype in KERNEL_DTYPES:
        from .select import swiglu as run  # here, so that tracing needs no kernels

        run(
            x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous(),
            w_gate,
            w_up,
            activation=activation,
            bias_gate=_aligned(bias_gate),
            bias_up=_aligned(bias_up),
            out=out,
            preactivations=stored if store else None,
            arithmetic=arithmetic,
        )
        return out, stored
    both = _preactivations(x, w_gate, w_up, bias_gate, bias_up)
    gate, up = both.chunk(2, dim=1)
    return get_activation(activation).torch(gate) * up, both if store else stored


def _fake_swiglu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    bias_gate: Tensor | None,
    bias_up: Tensor | None,
    activation: str,
    arithmetic: str,
    store: bool,
) -> tuple[Tensor, Tensor]:
    """Empty outputs. Everything that tracing can check is checked here."""
    if activation not in ACTIVATIONS:
        raise ArgumentError("activation", f"unknown {activation!r}", f"choose from {', '.join(ACTIVATIONS)}")
    for name, tensor in (("x", x), ("w_gate", w_gate), ("w_up", w_up)):
        if tensor is not None and tensor.dim() != 2:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", "give a matrix")
    weights = _weights(w_gate, w_up, bias_gate, bias_up)
    n, k = weights.gate.shape
    if x.shape[1] != k:
        raise ArgumentError("x", f"has {x.shape[1]} columns", f"give as many as w_gate has, {k}")
    if weights.up.shape != weights.gate.shape:
        raise ArgumentError("w_up", f"has shape {tuple(weights.up.shape)}", f"give w_gate's, {(n, k)}")
    for name, tensor in (("w_gate", w_gate), ("w_up", w_up), ("bias_gate", bias_gate), ("bias_up", bias_up)):
        if tensor is None:
            continue
        if name.startswith("bias") and (tensor.dim() != 1 or tensor.shape[0] != n):
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", f"give ({n},)")
        _same_kind(x, name, tensor)
    if (bias_gate is None) != (bias_up is None):
        missing = "bias_gate" if bias_gate is None else "bias_up"
        raise ArgumentError(missing, "is missing, and the other bias is given", "give both; zeros add nothing")
    return x.new_empty(x.shape[0], n), x.new_empty((x.shape[0], 2 * n) if store else (0,))


def _same_kind(x: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.dtype != x.dtype:
        raise ArgumentError(name, f"has dtype {tensor.dtype}", f"convert it to x's {x.dtype}, or use autocast")
    if tensor.device != x.device:
        raise ArgumentError(name, f"is on {tensor.device}, x on {x.device}", "move them to one device")


def _aligned(bias: Tensor | None) -> Tensor | None:
    """The bias where a kernel can read it: half of a stacked one may start anywhere."""
    return None if bias is None else bias.clone() if bias.data_ptr() % 16 else bias.contiguous()


def _weights(w_gate: Tensor, w_up: Tensor | None, bias_gate: Tensor | None, bias_up: Tensor | None) -> Weights:
    if w_up is None:
        return Weights.from_stacked(w_gate, bias_gate=bias_gate, bias_up=bias_up)
    return Weights(w_gate, w_up, bias_gate, bias_up)


def _preactivations(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, bias_gate: Tensor | None, bias_up: Tensor | None
) -> Tensor:
    """[m, 2n], gate beside up, by torch's GEMMs."""
    if w_up is None and bias_gate is None and bias_up is None:
        return linear(x, w_gate)
    weights = _weights(w_gate, w_up, bias_gate, bias_up)
    return torch.cat((linear(x, weights.gate, bias_gate), linear(x, weights.up, bias_up)), dim=1)


def _swiglu_backward(grad: Tensor, preactivations: Tensor, activation: str) -> Tensor:
    """Gradients of the pre-activations, [m, 2n]: in fp32 (fp64 for fp64), rounded once to grad's dtype."""
    fused = device_function(grad.device.type, "gated_backward")
    if fused and grad.dtype in KERNEL_DTYPES:
        return fused(grad, preactivations, activation)
    act, wide = get_activation(activation), torch.promote_types(grad.dtype, torch.float32)
    gate, up = preactivations.to(wide).chunk(2, dim=1)
    wide_grad = grad.to(wide)
    return torch.cat((wide_grad * up * act.derivative(gate), wide_grad * act.torch(gate)), dim=1).to(grad.dtype)


def _product(x: Tensor, w: Tensor) -> Tensor:
    _fake_product(x, w)
    if not len(x):
        return x.new_empty(0, len(w))
    if x.device.type == "cpu":
        return torch.from_numpy(accumulate(x, w)).to(x.dtype)
    fixed = device_function(x.device.type, "product")
    if fixed is None:
        raise ArgumentError("x", f"is on {x.device}, for which no product is installed", "install fused-swiglu by pip")
    return fixed(x, w)


def _fake_product(x: Tensor, w: Tensor) -> Tensor:
    for name, tensor in (("x", x), ("w", w)):
        if tensor.dim() != 2:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}", "give a matrix")
    if x.dtype not in KERNEL_DTYPES:
        raise ArgumentError("x", f"has dtype {x.dtype}", "convert it to bf16 or fp16, or use torch's linear")
    if x.shape[1] != w.shape[1]:
        raise ArgumentError("w", f"has {w.shape[1]} columns", f"give as many as x has, {x.shape[1]}")
    _same_kind(x, "w", w)
    return x.new_empty(x.shape[0], w.shape[0])


@cache
def device_function(device_type: str, name: str) -> Callable[..., Tensor] | None:
    """What the installed packages offer for that device type; None without one."""
    for point in entry_points(group=GROUP, name=f"{device_type}.{name}"):
        return point.load()
    return None


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs inside an operator is in the dtypes that it says, also where the caller's autocast is on."""

    def run(first: Tensor, *rest: Any) -> Any:
        if not torch.is_autocast_enabled(first.device.type):
            return function(first, *rest)
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *rest)

    return run


# Autograd


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_gate, w_up, bias_gate, bias_up, ctx.activation, _, ctx.stored = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, w_gate, w_up, bias_gate, bias_up, output[1] if ctx.stored else None)


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of x, the weights and the biases, by torch's GEMMs: one each where the weights are stacked."""
    x, w_gate, w_up, bias_gate, bias_up, stored = ctx.saved_tensors
    both = stored if ctx.stored else _preactivations(x, w_gate, w_up, bias_gate, bias_up)
    d_both = torch.ops.fused_swiglu.swiglu_backward(grad, both, ctx.activation)
    d_gate, d_up = d_both.chunk(2, dim=1)
    wanted = ctx.needs_input_grad
    d_x = d_w_gate = d_w_up = None
    if w_up is None:
        if wanted[0]:
            d_x = d_both @ w_gate
        if wanted[1]:
            d_w_gate = d_both.t() @ x
    else:
        if wanted[0]:
            d_x = torch.addmm(d_gate @ w_gate, d_up, w_up)
        if wanted[1]:
            d_w_gate = d_gate.t() @ x
        if wanted[2]:
            d_w_up = d_up.t() @ x
    d_bias_gate = d_gate.sum(0) if wanted[3] else None
    d_bias_up = d_up.sum(0) if wanted[4] else None
    return d_x, d_w_gate, d_w_up, d_bias_gate, d_bias_up, None, None, None


def _keep_product(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, w = ctx.saved_tensors
    return (
        grad @ w if ctx.needs_input_grad[0] else None,
        grad.t() @ x if ctx.needs_input_grad[1] else None,
    )


def _no_second(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    raise ArgumentError("create_graph", "swiglu has no second derivative", "compute it from torch's own operations")


def _no_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise ArgumentError("x", "swiglu is not for vmap", "call it with [..., k]: any leading dimensions are rows")


for _name, _function, _fake in (
    ("swiglu", _swiglu, _fake_swiglu),
    ("swiglu_backward", _swiglu_backward, lambda grad, preactivations, activation: torch.empty_like(preactivations)),
    ("product", _product, _fake_product),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _without_autocast(_function), _key)
    torch.library.register_fake(f"fused_swiglu::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"fused_swiglu::{_name}", _no_vmap, lib=_library)
torch.library.register_autograd("fused_swiglu::swiglu", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("fused_swiglu::swiglu_backward", _no_second, lib=_library)
torch.library.register_autograd("fused_swiglu::product", _product_gradients, setup_context=_keep_product, lib=_library)
