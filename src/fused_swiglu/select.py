"""swiglu: one call that picks the kernel and its config. No pick changes the bits.

What may be picked and what is: choice.py. What the arguments must be: arguments.py. Here: what is kept between calls,
so that a call costs little more than its launch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from .arguments import Arguments
from .arithmetic import Arithmetic
from .choice import DEFAULT, declared, has_kernels, picks, refused
from .errors import ArgumentError
from .fallback import fallback
from .kernel import Compiled
from .problem import Problem
from .recent import Recent


def swiglu(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    preactivations: torch.Tensor | None = None,
    arithmetic: Arithmetic | str = DEFAULT,
    tune: bool = False,
) -> torch.Tensor:
    """act(x @ w_gate.T + bias_gate) * (x @ w_up.T + bias_up), of shape [..., n] and x's dtype.

    x[..., k], bf16 or fp16; w_gate[n, k] and w_up[n, k], or one w_gate[2n, k], gate above up, without w_up; biases [n],
    both or none: all of x's dtype and device. Rows may be apart; leading dimensions must flatten without a copy.
    activation: silu, gelu_tanh, relu or sigmoid.
    out[..., n]: is written and returned; nothing else is allocated. preactivations[..., 2n]: takes gate beside up.
    arithmetic: what the bits are, an `Arithmetic` or its str. They depend on nothing else: neither on the number of
        rows nor on the pick. (relu has no recipe; for it, any is read as `none`.)
    tune: whether the first call for a problem's size times the candidates that are built, on tensors of its own, and
        keeps the quickest, as `fused-swiglu tune` does ahead. Never within a graph capture.

    Launches on the current stream, without synchronising, from any thread. The first call for a shape may compile:
    before a CUDA-graph capture, call it once. Not differentiable: no gradient flows through it.

    On a CPU, and on GPUs other than SM90, torch computes it as `fallback` says: as accurate, the bits undeclared; a
    warning says so once.
    Raises ArgumentError, before any launch, for an argument that does not fit, and where no kernel of that arithmetic
    takes the problem.
    """
    try:
        addresses = (
            x.data_ptr(), w_gate.data_ptr(), w_up is not None and w_up.data_ptr(), out is not None and out.data_ptr(),
            bias_gate is not None and bias_gate.data_ptr(), bias_up is not None and bias_up.data_ptr(),
            preactivations is not None and preactivations.data_ptr(),
        )  # fmt: skip
        looks = (
            x.shape, x.stride(), x.dtype, x.get_device(), w_gate.shape, w_gate.stride(), w_gate.dtype,
            w_up is not None and _look(w_up), out is not None and _look(out),
            bias_gate is not None and _look(bias_gate), bias_up is not None and _look(bias_up),
            preactivations is not None and _look(preactivations),
            (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15, activation, arithmetic,
        )  # fmt: skip
    except (AttributeError, RuntimeError):
        Arguments(x, w_gate, w_up, bias_gate, bias_up, out, preactivations, activation).pose()  # says what is wrong
        raise
    site = _sites.get(looks)
    if site is not None and site.compiled is not None and (site.tuned or not tune):
        if out is None:
            out = x.new_empty(site.out_shape)
        launch = _launches.get((site, addresses, out.data_ptr()))
        if launch is not None:
            launch()
            return out
    given = Arguments(x, w_gate, w_up, bias_gate, bias_up, out, preactivations, activation)
    return _first(given, arithmetic, looks, addresses, tune)


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Site:
    """What was worked out for all calls whose arguments look alike, wherever they are in memory.

    compiled: None where torch computes it. tuned: whether tuning was asked for."""

    compiled: Compiled | None
    out_shape: torch.Size
    tuned: bool


# Both are bounded. A launch is a handle that holds addresses and no tensor, and its key has all that it holds: whatever
# tensors are at these addresses and look alike are as good as those it was made for. Weights stay where they are, and
# torch's allocator gives the same addresses again and again: 80 layers and a dozen sizes of batch fit.
_sites: Recent[_Site] = Recent(4096)
_launches: Recent[Callable[[], object]] = Recent(2048)
_making = threading.RLock()  # nothing is tuned or built twice; and Triton's compiler may not run in two threads


def _first(
    given: Arguments, arithmetic: Arithmetic | str, looks: Hashable, addresses: tuple[int, ...], tune: bool
) -> torch.Tensor:
    """A call that finds no launch: checks everything, makes what is missing, and keeps it for the next."""
    wanted = declared(arithmetic, given.activation)
    problem, operands, out = given.pose()
    with _making:
        site = _sites.get(looks)
        if site is None or (tune and not site.tuned and not _capturing(out.device)):
            site = _Site(_compiled(problem, wanted, out.device, tune), out.shape, tune)
            _sites.put(looks, site)
        bound = None if site.compiled is None else site.compiled.bind(operands)
    if bound is None:
        fallback(
            operands.x, operands.weights, given.activation, out=operands.out, preactivations=operands.preactivations
        )
    elif (launch := bound.launcher()) is None:
        bound.run()
    else:
        _launches.put((site, addresses, out.data_ptr()), launch)
        launch()
    return out


def _compiled(problem: Problem, arithmetic: Arithmetic, device: torch.device, tune: bool) -> Compiled | None:
    """Of the first pick that does what it declares; None where torch computes it."""
    if not has_kernels(device):
        _say_once(device)
        return None
    if _capturing(device):
        wrong = f"of shape [{problem.m}, {problem.k}] comes for the first time within a graph capture"
        raise ArgumentError("x", wrong, "call swiglu once with these shapes before the capture")
    if tune:
        from .tune import tune as find_quickest  # here: nothing else needs what takes times

        try:
            find_quickest(problem, arithmetic, device)
        except RuntimeError as error:  # out of memory, say
            warnings.warn(f"not tuned: {error}", stacklevel=4)
    for kernel, config in picks(problem, arithmetic, device):
        compiled = kernel.compile(problem, config, arithmetic, device)
        if compiled.arithmetic == arithmetic:
            return compiled
    raise refused(problem, arithmetic, device)


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


_said: set[str] = set()


def _say_once(device: torch.device) -> None:
    """The notice of a device without kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type}"
    if name not in _said:
        _said.add(name)
        wrong = f"swiglu runs by torch on {name}: accurate, but its bits are those of no declared arithmetic"
        warnings.warn(f"{wrong}, which need an SM90 GPU", stacklevel=5)


def forget() -> None:
    """Drops what is kept between calls, so that the next one chooses anew."""
    _sites.clear()
    _launches.clear()
