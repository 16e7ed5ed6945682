"""Fused SwiGLU GEMMs for NVIDIA Hopper, compared kernel by kernel and checked bit by bit.

    out[m, n] = silu(x[m, k] @ w_gate[n, k].T) * (x[m, k] @ w_up[n, k].T)

- `swiglu`: computes it, by the kernel that fits.
- `patch`: the MLPs of a transformers model computed so; `fused_swiglu.nn.GatedMLP`; `fused_swiglu.torch_ops`.
- `Problem`: what is computed. `Arithmetic`: what the bits are. `Config`: how, in ways that never change the bits.
- `Kernel`, `Compiled`, `Bound`: one way to compute it, built, and with its tensors; `get_kernel`, `register`.
- `fused_swiglu.compare`: kernels side by side, a `Row` each; `fused-swiglu compare` on the command line.
- `fused_swiglu.inputs`, `.checkpoints`: operands by family, or from files. `.reference`, `.numerics`: the exact result,
  and how far an output is from it. `.testing`: hypothesis strategies and assertions for tests of kernels.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arithmetic import UNDECLARED as UNDECLARED
    from .arithmetic import Arithmetic as Arithmetic
    from .config import Config as Config
    from .errors import ArgumentError as ArgumentError
    from .kernel import Bound as Bound
    from .kernel import Compiled as Compiled
    from .kernel import Kernel as Kernel
    from .operands import Operands as Operands
    from .operands import Weights as Weights
    from .operands import problem_of as problem_of
    from .patching import patch as patch
    from .patching import unpatch as unpatch
    from .problem import DTYPES as DTYPES
    from .problem import MODELS as MODELS
    from .problem import Problem as Problem
    from .registry import get_kernel as get_kernel
    from .registry import kernel_names as kernel_names
    from .registry import register as register
    from .select import swiglu as swiglu

__version__ = "0.1.0"
_MODULES = {
    "arithmetic": ("UNDECLARED", "Arithmetic"),
    "config": ("Config",),
    "errors": ("ArgumentError",),
    "kernel": ("Bound", "Compiled", "Kernel"),
    "operands": ("Operands", "Weights", "problem_of"),
    "patching": ("patch", "unpatch"),
    "problem": ("DTYPES", "MODELS", "Problem"),
    "registry": ("get_kernel", "kernel_names", "register"),
    "select": ("swiglu",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "DTYPES",
    "MODELS",
    "UNDECLARED",
    "ArgumentError",
    "Arithmetic",
    "Bound",
    "Compiled",
    "Config",
    "Kernel",
    "Operands",
    "Problem",
    "Weights",
    "get_kernel",
    "kernel_names",
    "patch",
    "problem_of",
    "register",
    "swiglu",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that the command line's help does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
