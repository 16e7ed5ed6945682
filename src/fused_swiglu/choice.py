"""choice: which kernels and configs may compute a problem under an arithmetic, and which of them does.

All that may are of one declared arithmetic, so that the choice never changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from . import registry, tuned
from .arithmetic import Arithmetic
from .config import Config
from .errors import ArgumentError
from .kernel import Kernel
from .problem import Problem

DEFAULT = "sm90:ieee:out"
# For few tokens the weights' bytes are what takes time: cutlass.decode streams them once, its products as narrow as the
# tokens are few. It would stream them once more for every 64 tokens, so that for more of them it comes last, and the
# quickest of the kernels with wide tiles first (README, "What an H200 gives"). triton.fused takes what they refuse: any
# size and stride, and machines where nothing can be built. Kernels that are not named come behind.
FEW = 64
WIDE = ("cutlass.interleaved", "cutlass.evt", "cutlass.pingpong")
PREFERENCE = {True: ("cutlass.decode", *WIDE, "triton.fused"), False: (*WIDE, "triton.fused", "cutlass.decode")}
"""By whether there are at most FEW rows."""


def declared(arithmetic: Arithmetic | str, activation: str) -> Arithmetic:
    """The arithmetic asked for; relu's recipe is `none`. Raises ArgumentError for one that leaves bits open."""
    if not isinstance(arithmetic, Arithmetic | str):
        wrong = f"is of type {type(arithmetic).__name__}"
        raise ArgumentError("arithmetic", wrong, f"give an Arithmetic, or its str, such as {DEFAULT}")
    wanted = Arithmetic.parse(arithmetic) if isinstance(arithmetic, str) else arithmetic
    if not wanted.complete:
        raise ArgumentError("arithmetic", f"{wanted} leaves bits open", f"give a complete one, such as {DEFAULT}")
    return replace(wanted, recipe="none") if activation == "relu" else wanted


def choose(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> tuple[Kernel, Config]:
    """What `swiglu` runs: what was tuned for the problem, or the heuristic's pick. Builds nothing.
    Raises ArgumentError where no kernel of that arithmetic takes the problem."""
    for pick in picks(problem, arithmetic, device):
        return pick
    raise refused(problem, arithmetic, device)


def picks(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> Iterator[tuple[Kernel, Config]]:
    """What was tuned, if that fits, and then all candidates."""
    known = tuned.find(problem, arithmetic, device)
    for name in registry.kernel_names() if known else ():
        if known and name == known.kernel and (kernel := _fused(name)) is not None:
            with suppress(ArgumentError):  # a config that another version had
                config = kernel.config_type.parse(known.config)
                if fits(kernel, problem, config, arithmetic, device):
                    yield kernel, config
    yield from candidates(problem, arithmetic, device)


def candidates(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> Iterator[tuple[Kernel, Config]]:
    """Every kernel and config that may run: fused, of exactly this complete arithmetic, reading weights in place and
    writing where it is told, within a graph or not. What needs no tuning to be preferred comes first; a kernel is
    imported when its turn comes."""
    known, preferred = registry.kernel_names(), PREFERENCE[problem.m <= FEW]
    for name in (*(name for name in preferred if name in known), *(name for name in known if name not in preferred)):
        kernel = _fused(name)
        for config in kernel.configs(problem) if kernel else ():
            if kernel and fits(kernel, problem, config, arithmetic, device):
                yield kernel, config


def fits(kernel: Kernel, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> bool:
    """Whether it takes the problem, to the bit as declared."""
    return (
        arithmetic.complete
        and kernel.capturable(config)
        and arithmetic in tuple(kernel.arithmetics(problem))
        and kernel.why_not(problem, config, arithmetic, device) is None
    )


def _fused(name: str) -> Kernel | None:
    """The kernel, if it is one of those that may be picked; None also where its package is not installed."""
    try:
        kernel = registry.get_kernel(name)
    except ImportError:
        return None
    in_place = type(kernel).prepare is Kernel.prepare and not kernel.allocates
    return kernel if kernel.role == "fused" and kernel.computes == "swiglu" and in_place else None


def refused(problem: Problem, arithmetic: Arithmetic, device: torch.device) -> ArgumentError:
    """Says of each kernel why."""
    kernels = [kernel for name in registry.kernel_names() if (kernel := _fused(name)) is not None]
    offered = {str(a): None for kernel in kernels for a in kernel.arithmetics(problem) if a.complete}
    if str(arithmetic) not in offered:
        return ArgumentError("arithmetic", f"no kernel offers {arithmetic}", f"choose from {', '.join(offered)}")
    reasons: dict[str, list[str]] = {}
    for kernel in kernels:
        reason = kernel.why_not(problem, next(iter(kernel.configs(problem))), arithmetic, device)
        if reason and arithmetic in tuple(kernel.arithmetics(problem)):
            reasons.setdefault(reason, []).append(kernel.name)
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
    return ArgumentError(
        "w_gate", f"no kernel takes this problem ({told})", "pad n and k to multiples of 8, or call fallback"
    )


def has_kernels(device: torch.device) -> bool:
    """Whether declared arithmetics hold on the device: it is an SM90 GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
