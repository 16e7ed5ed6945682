"""The catalogue: every unit that the registered kernels can be built from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from fused_swiglu.registry import get_kernel, match

from .unit import Unit


@runtime_checkable
class Built(Protocol):
    """What a kernel that is built from units has."""

    def units(self) -> Iterable[tuple[str, Unit]]:
        """Every config, as text, with its unit; for whichever problem."""
        ...


def catalogue(kernels: list[str] | None = None) -> dict[tuple[str, str], Unit]:
    """(kernel, config) -> unit, of the kernels that match the globs, by default `cutlass.*`.
    Raises ArgumentError for a glob without a match."""
    found = {}
    for name in match(kernels or ["cutlass.*"]):
        kernel = get_kernel(name)
        if isinstance(kernel, Built):
            found |= {(name, config): unit for config, unit in kernel.units()}
    return found
