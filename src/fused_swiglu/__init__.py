"""Fused SwiGLU GEMMs for NVIDIA Hopper, compared kernel by kernel and checked bit by bit.

    out[m, n] = silu(x[m, k] @ w_gate[n, k].T) * (x[m, k] @ w_up[n, k].T)

- `Problem`: what is computed. `Arithmetic`: what the bits are. `Config`: how, in ways that never change the bits.
- `Kernel`, `Compiled`, `Bound`: one way to compute it, built, and with its tensors; `get_kernel`, `register`.
- `compare` runs kernels side by side and yields a `Row` each; so does `fused-swiglu compare` on the command line.
"""

from .arithmetic import UNDECLARED, Arithmetic
from .config import Config
from .errors import ArgumentError
from .kernel import Bound, Compiled, Kernel
from .operands import Operands, Weights, problem_of
from .problem import DTYPES, MODELS, Problem
from .registry import get_kernel, kernel_names, register

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
    "problem_of",
    "register",
]
__version__ = "0.1.0"
