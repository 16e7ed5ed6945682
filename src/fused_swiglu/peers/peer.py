"""Peer: a function of another project's package as a kernel, or the reason why it cannot be one here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from ..arithmetic import Arithmetic
from ..config import Config
from ..kernel import Kernel
from ..plan import first_line
from ..problem import Problem


class Peer(Kernel):
    """function: `module:name` of what computes. distribution: what pip calls its package. remedy: what installs it.
    capability: of the GPUs it is run on; empty for any."""

    function: ClassVar[str]
    distribution: ClassVar[str]
    remedy: ClassVar[str] = "pip install '.[peers]'"
    capability: ClassVar[tuple[int, ...]] = ()

    def load(self) -> Callable[..., Any]:
        """The function; raises whatever its package does when imported, AttributeError where a version lacks it."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(module), name)

    def why_not(self, problem: Problem, config: Config, arithmetic: Arithmetic, device: torch.device) -> str | None:
        if reason := super().why_not(problem, config, arithmetic, device):
            return reason
        needs = []
        if device.type != "cuda" or self.capability not in ((), torch.cuda.get_device_capability(device)):
            needs.append(f"an SM{''.join(map(str, self.capability))} GPU" if self.capability else "a CUDA GPU")
        if find_spec(self.function.partition(".")[0]) is None:
            needs.append(f"{self.distribution} ({self.remedy})")
        if needs:
            return f"needs {' and '.join(needs)}"
        try:
            self.load()
        except (Exception, SystemExit) as error:
            return f"{self.distribution} is installed but does not load ({first_line(error)}): {self.remedy}"
        return None
