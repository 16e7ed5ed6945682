"""plan: what a comparison will run, worked out and validated before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

import torch

from . import registry
from .arithmetic import Arithmetic
from .config import Config
from .errors import ArgumentError
from .inputs import FAMILIES
from .kernel import Kernel
from .operands import Weights
from .problem import DTYPES, Problem


@dataclass(frozen=True, eq=False)
class Case:
    """A problem and where its operands come from.

    x[m, k] and weights (gate[n, k], up[n, k]) in the problem's dtype, on any device and in any layout: those given are
    copied as the problem's layout wants them, those that are None are drawn from `family`. source: what rows call
    the operands; the family's name if empty. Raises ArgumentError where a tensor or the family does not fit.
    """

    problem: Problem
    family: str = "normal"
    x: torch.Tensor | None = None
    weights: Weights | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ArgumentError("inputs", f"unknown {self.family!r}", f"choose from {', '.join(FAMILIES)}")
        p = self.problem
        if (self.x is not None and p.x_stride != p.k) or (
            self.weights is not None and {p.gate_stride, p.up_stride} != {p.k}
        ):
            raise ArgumentError("x_stride", "given operands are copied without padding", "leave the strides contiguous")
        _fits("x", self.x, (p.m, p.k), p.dtype)
        if self.weights is not None:
            _fits("w_gate", self.weights.gate, (p.n, p.k), p.weight_dtype)
            _fits("w_up", self.weights.up, (p.n, p.k), p.weight_dtype)


def _fits(name: str, tensor: torch.Tensor | None, shape: tuple[int, int], dtype: str) -> None:
    if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != DTYPES[dtype]):
        wrong = f"is {tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ArgumentError(name, wrong, f"the problem wants {DTYPES[dtype]} of shape {shape}")


@dataclass(frozen=True)
class Candidate:
    """One kernel under one config and arithmetic; or, without them, a kernel that could not be asked, and why:
    a package that is `missing`, or another `error`."""

    name: str
    kernel: Kernel | None = None
    config: Config | None = None
    arithmetic: Arithmetic | None = None
    missing: str | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        return f"{self.name}|{self.config}|{self.arithmetic}"


Plan = list[tuple[Case, list[Candidate]]]


def plan(
    cases: Problem | Case | Iterable[Problem | Case],
    kernels: Sequence[str] = ("*",),
    configs: Sequence[str] = (),
    arithmetics: Sequence[str] = (),
    *,
    inputs: str = "normal",
    device: torch.device,
) -> Plan:
    """What a comparison will run; nothing is computed yet.

    kernels: globs over the registry's names. configs: globs over `str(config)` of each kernel's configs, or a config
    written out. arithmetics: globs over `str(arithmetic)`. A kernel that no config (or arithmetic) given fits keeps
    its default, so that baselines stay in. inputs: the family of cases that are bare Problems.

    Raises ArgumentError for a glob that matches no kernel, and for a config or arithmetic that no chosen kernel reads.
    """
    if isinstance(cases, Problem | Case):
        cases = [cases]
    cases = [case if isinstance(case, Case) else Case(case, inputs) for case in cases]
    names = registry.match(list(kernels))
    choice = _Choice(configs, arithmetics, device)
    work = [(case, [c for name in names for c in choice.candidates(name, case.problem)]) for case in cases]
    choice.raise_unread()
    return work


class _Choice:
    """The configs and arithmetics asked for, and which of them some kernel could read."""

    def __init__(self, configs: Sequence[str], arithmetics: Sequence[str], device: torch.device) -> None:
        self.configs, self.arithmetics, self.device = configs, arithmetics, device
        self.read: set[str] = set()
        self.errors: dict[str, ArgumentError] = {}
        self.offered: dict[str, None] = {}

    def candidates(self, name: str, problem: Problem) -> list[Candidate]:
        try:
            kernel = registry.get_kernel(name)
            return [Candidate(name, kernel, *pair) for pair in self._pairs(kernel, problem)]
        except ModuleNotFoundError as error:
            return [Candidate(name, missing=error.name)]
        except (Exception, SystemExit) as error:
            return [Candidate(name, error=first_line(error))]

    def _pairs(self, kernel: Kernel, problem: Problem) -> list[tuple[Config, Arithmetic]]:
        defaults = list(kernel.defaults(problem, self.device))
        configs, arithmetics = self._configs(kernel, problem), self._arithmetics(kernel, problem)
        if not configs and not arithmetics:
            return defaults
        configs = configs or list(dict.fromkeys(config for config, _ in defaults))
        return [
            (config, arithmetic)
            for config in configs
            for arithmetic in arithmetics or [self._default_arithmetic(kernel, problem, config)]
        ]

    def _configs(self, kernel: Kernel, problem: Problem) -> list[Config]:
        found: dict[Config, None] = {}
        for text in self.configs:
            fits = [config for config in kernel.configs(problem) if fnmatchcase(str(config), text)]
            if not fits and not re.search(r"[*?\[]", text):
                fits = self._written_out(kernel, text)
            if fits:
                self.read.add(text)
            found |= dict.fromkeys(fits)
        return list(found)

    def _written_out(self, kernel: Kernel, text: str) -> list[Config]:
        try:
            return [kernel.config_type.parse(text)]
        except ArgumentError as error:
            names = {f.name for f in fields(kernel.config_type)}
            if {pair.partition("=")[0] for pair in text.split(",")} <= names:
                self.errors[text] = error
            return []

    def _arithmetics(self, kernel: Kernel, problem: Problem) -> list[Arithmetic]:
        found = []
        for arithmetic in kernel.arithmetics(problem):
            self.offered[str(arithmetic)] = None
            fits = [text for text in self.arithmetics if fnmatchcase(str(arithmetic), text)]
            self.read.update(fits)
            found += [arithmetic] if fits else []
        return found

    def _default_arithmetic(self, kernel: Kernel, problem: Problem, config: Config) -> Arithmetic:
        offered = list(kernel.arithmetics(problem))
        fitting = (a for a in offered if kernel.why_not(problem, config, a, self.device) is None)
        return next(fitting, offered[0])

    def raise_unread(self) -> None:
        for text in self.configs:
            if text not in self.read:
                remedy = "see the configs of a run without --config, or choose the kernel it is of with --kernels"
                error = self.errors.get(text, ArgumentError("config", f"no chosen kernel reads {text!r}", remedy))
                raise ArgumentError("config", error.wrong, error.remedy)
        for text in self.arithmetics:
            if text not in self.read:
                remedy = f"choose from {' '.join(self.offered)}"
                raise ArgumentError("arithmetic", f"no chosen kernel offers {text!r}", remedy)


def first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
