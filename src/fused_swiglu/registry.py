"""The registry: kernels by name, found through the entry points of installed packages."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .errors import ArgumentError
from .kernel import Kernel

GROUP = "fused_swiglu.kernels"
_registered: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Adds a kernel of this process (a notebook's own, say). Raises ArgumentError for a name that is taken, and for
    something other than an instance of a Kernel with `name` and `role`."""
    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            "kernel", f"{kernel!r} is no Kernel", "derive from fused_swiglu.Kernel, and pass an instance"
        )
    for trait in ("name", "role"):
        if not isinstance(getattr(kernel, trait, None), str):
            raise ArgumentError(
                "kernel", f"{type(kernel).__name__} has no {trait}", f"give the class a {trait}, a string"
            )
    if kernel.name in kernel_names():
        raise ArgumentError("kernel", f"{kernel.name!r} is taken", "choose another name")
    _registered[kernel.name] = kernel
    return kernel


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def kernel_names() -> list[str]:
    """Every known kernel; nothing is imported for it."""
    return [*_installed(), *_registered]


def match(patterns: list[str]) -> list[str]:
    """Names that match any of the globs, in the registry's order. Raises ArgumentError for a glob without a match."""
    names = kernel_names()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names) or "none: install the package with pip, which registers them"
            raise ArgumentError("kernels", f"nothing matches {pattern!r}", f"known kernels are {known}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


@cache
def _load(name: str) -> Kernel:
    return _installed()[name].load()()


def get_kernel(name: str) -> Kernel:
    """The kernel of that exact name. Raises ArgumentError if there is none, ImportError if its package is broken."""
    if name in _registered:
        return _registered[name]
    if name not in _installed():
        match([name])
        raise ArgumentError("kernel", f"{name!r} is a pattern", "give one exact name")
    return _load(name)
