"""Triton's interpreter, made right: how a Triton kernel of this package runs on a CPU.

Triton decides when `@triton.jit` runs whether a function is compiled or interpreted, so the interpreted kernels are
second copies of this package's modules. The interpreter multiplies bf16 as bit patterns and truncates when it stores
it, so `launching` widens operands to fp32, which is exact, and lets torch round what is written.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

import numpy as np

_ALIAS = "triton_baselines_interpreted"


def interpreted(module: str) -> types.ModuleType:
    """The copy of this package's `module` whose kernels run in the interpreter."""
    if _ALIAS not in sys.modules:
        package = types.ModuleType(_ALIAS)
        package.__path__ = list(sys.modules[__name__.rpartition(".")[0]].__path__)
        sys.modules[_ALIAS] = package
        _accept_new_numpy()
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return importlib.import_module(f"{_ALIAS}.{module}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _accept_new_numpy() -> None:
    """Triton before 3.7 makes loop bounds by int() of one-element arrays, which numpy refuses since 2.4."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, *scope) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(np.squeeze(self.handle.data))

    interpreter._patch_lang_tensor = patch
