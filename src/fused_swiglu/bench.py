"""The bench: one case on one device, on which candidates are built, run and checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from . import timing
from .arithmetic import Arithmetic
from .config import Config
from .inputs import make_inputs, make_out
from .kernel import Bound, Compiled, Kernel
from .numerics import TOLERANCES, Mismatch, Tolerances, mismatch
from .operands import Operands, Weights
from .plan import Candidate, Case, first_line
from .problem import DTYPES, Problem
from .reference import Exact, exact
from .results import Environment, Row

POISON = 0x7FD5  # a NaN in bf16 and in fp16, with a payload that no arithmetic makes
CHECKED_OUTPUTS = {"cpu": 2**19, "cuda": 2**22}

Progress = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what comes now)."""


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Steps:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def next(self, what: str) -> None:
        if self.progress:
            self.progress(self.done, self.total, what)
        self.done += 1


@dataclass(frozen=True, slots=True)
class Built:
    """A candidate that was compiled, and bound to the first set of operands."""

    kernel: Kernel
    config: Config
    arithmetic: Arithmetic
    compiled: Compiled
    bound: Bound


Test = Callable[[Built], dict[str, Any]]
"""Runs what was built, and gives fields for its row."""


class Bench:
    """One case on one device: operands, outputs and exact result, each made once, when first needed."""

    def __init__(
        self,
        case: Case,
        seed: int,
        device: torch.device,
        environment: Environment,
        sets: int | None = None,
        tolerances: Tolerances = TOLERANCES,
    ) -> None:
        self.case, self.problem, self.seed, self.device = case, case.problem, seed, device
        self.environment, self.tolerances = environment, tolerances
        self.sets = timing.buffer_sets(self.problem, device) if sets is None else sets
        self.rows = sampled_rows(self.problem, CHECKED_OUTPUTS.get(device.type, 2**19), seed)
        self._operands: list[tuple[torch.Tensor, Weights]] = []
        self._outs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._exact: dict[str, Exact] = {}

    def operands(self) -> list[tuple[torch.Tensor, Weights]]:
        """x and weights of every buffer set; the first is the one that is checked, the others rotate with it."""
        if not self._operands:
            self._operands = [_operands(self.case, self.seed + i, self.device) for i in range(self.sets)]
        return self._operands

    def outs(self, shape: tuple[int, int]) -> list[torch.Tensor]:
        """One output per buffer set, shared by all kernels that write this shape."""
        if shape not in self._outs:
            self._outs[shape] = [make_out(self.problem, shape, device=self.device) for _ in self.operands()]
        return self._outs[shape]

    def exact(self, computes: str) -> Exact:
        if computes not in self._exact:
            x, weights = self.operands()[0]
            self._exact[computes] = exact(
                x,
                weights,
                self.problem.activation,
                out_dtype=DTYPES[self.problem.out_dtype],
                rows=self.rows,
                computes=computes,
            )
        return self._exact[computes]

    def attempt(self, candidate: Candidate, test: Test) -> tuple[Row, timing.Variant | None]:
        """Builds, binds and tests a candidate: its row, and if that is ok what is to be timed.

        Whatever is raised, but KeyboardInterrupt, becomes the row's reason.
        """
        kernel, config, arithmetic = candidate.kernel, candidate.config, candidate.arithmetic
        if kernel is None or config is None or arithmetic is None:
            if candidate.missing:
                reason = f"needs {candidate.missing}: pip install {candidate.missing}"
                return self._row(candidate, "unsupported", reason=reason), None
            return self._row(candidate, "failed", reason=candidate.error), None
        known: dict[str, Any] = {}
        try:
            if reason := kernel.why_not(self.problem, config, arithmetic, self.device):
                return self._row(candidate, "unsupported", reason=reason), None
            compiled = kernel.compile(self.problem, config, arithmetic, self.device)
            known = {"arithmetic": str(compiled.arithmetic), "ran_on": compiled.ran_on or _device_name(self.device)}
            bounds = [self._bind(kernel, config, compiled, 0)]
            known["arithmetic"] = str(compiled.arithmetic)  # what a library chose may be known only now
            known |= test(Built(kernel, config, arithmetic, compiled, bounds[0]))
            bounds += [self._bind(kernel, config, compiled, i) for i in range(1, self.sets)]
        except (Exception, SystemExit) as error:
            return self._row(candidate, "failed", reason=first_line(error), **known), None
        variant = timing.Variant(candidate.key, bounds, kernel.capturable(config), kernel.owns_graph(config))
        return self._row(candidate, "ok", **known), variant

    def check(self, built: Built) -> dict[str, Any]:
        """Runs into a poisoned output and compares. Raises RuntimeError for a result that is none."""
        return self.checked(built)[1]

    def checked(self, built: Built) -> tuple[torch.Tensor, dict[str, Any]]:
        """`check`, with the output that was checked."""
        kernel, bound = built.kernel, built.bound
        shape, dtype = kernel.output_shape(self.problem), DTYPES[self.problem.out_dtype]
        wanted = self.exact(kernel.computes) if self.problem.m else None
        _words(self.outs(shape)[0]).fill_(POISON)
        before = self._fingerprint()
        out = bound.run()
        synchronize(self.device)
        if self._fingerprint() != before:
            self._operands = []  # drawn anew for the others
            raise RuntimeError("overwrote its operands")
        if tuple(out.shape) != shape or out.dtype != dtype:
            raise RuntimeError(f"returned {out.dtype} of shape {tuple(out.shape)}, not {dtype} of shape {shape}")
        if wanted is None:
            return out, {"outputs": 0}
        # The interpreter's output is rounded by torch, which keeps no payload: any NaN counts where none is due.
        interpreted = built.compiled.ran_on == "interpreter" and bool(wanted.value.isfinite().all())
        unwritten = int((out.isnan() if interpreted else _words(out) == POISON).sum())
        if unwritten:
            raise RuntimeError(f"left {unwritten} of {out.numel()} outputs unwritten")
        return out, _fields(
            mismatch(out if self.rows is None else out[self.rows.to(out.device)], wanted, self.tolerances)
        )

    def _fingerprint(self) -> tuple[int, ...]:
        x, weights = self.operands()[0]
        return tuple(int(_words(t).sum()) for t in (x, weights.gate, weights.up))

    def launch(self, built: Built) -> dict[str, Any]:
        """One launch after a warm-up, in an NVTX range on a GPU."""
        built.bound.run()
        synchronize(self.device)
        with torch.cuda.nvtx.range(built.kernel.name) if self.device.type == "cuda" else nullcontext():
            built.bound.run()
            synchronize(self.device)
        return {}

    def timed(self, row: Row, result: timing.Timing | Exception) -> Row:
        """The row with its times; with rates too where it ran on a GPU."""
        if isinstance(result, Exception):
            return replace(row, status="failed", reason=f"timing: {first_line(result)}")
        known = _fields(result) | {"ratios": result.ratios or None, "rounds": result.rounds or None}
        known |= {"cache": timing.cache_state(self.problem, self.sets, self.device)}
        if row.is_result:
            tflops, peak = self.problem.flops / result.time_us / 1e6, self.environment.peak_tflops
            known |= {"tflops": tflops, "gbs": self.problem.bytes / result.time_us / 1e3}
            known |= {"peak": tflops / peak if peak else None}
        return replace(row, **known)

    def _bind(self, kernel: Kernel, config: Config, compiled: Compiled, index: int) -> Bound:
        x, weights = self.operands()[index]
        out = self.outs(kernel.output_shape(self.problem))[index]
        return compiled.bind(Operands(x, kernel.prepare(weights, self.problem, config), out))

    def _row(self, candidate: Candidate, status: str, **known: Any) -> Row:
        described = {
            "kernel": candidate.name,
            "role": candidate.kernel.role if candidate.kernel else None,
            "config": None if candidate.config is None else str(candidate.config),
            "arithmetic": None if candidate.arithmetic is None else str(candidate.arithmetic),
            "inputs": self.case.source or self.case.family,
            "seed": self.seed,
            "run": self.environment.run,
        }
        problem = {name: getattr(self.problem, name) for name in _PROBLEM}
        return Row(**{**described, **problem, **known}, status=status)


_PROBLEM = ("m", "n", "k", "dtype", "activation", "bias", "layout")


def _fields(measured: Mismatch | timing.Timing) -> dict[str, Any]:
    """Its fields, which a Row has under the same names."""
    return {field.name: getattr(measured, field.name) for field in fields(measured)}


def sampled_rows(problem: Problem, limit: int, seed: int) -> torch.Tensor | None:
    """The rows of out to compare, ascending: about `limit` outputs' worth, drawn by `seed`, with the first and the
    last; None for all of them."""
    m, count = problem.m, max(2, limit // problem.n)
    if m <= count:
        return None
    drawn = random.Random(seed).sample(range(1, m - 1), count - 2)
    return torch.tensor([0, *sorted(drawn), m - 1])


def _operands(case: Case, seed: int, device: torch.device) -> tuple[torch.Tensor, Weights]:
    """One buffer set: given tensors are copied, so that no two sets share memory."""
    x, weights = case.x, case.weights
    if x is None or weights is None:
        drawn = make_inputs(case.problem, case.family, seed, device)
        x, weights = drawn.x if x is None else x, drawn.weights if weights is None else weights
    x = x.to(device, copy=True) if x is case.x else x
    return x, _placed(weights, case.problem.layout, device) if weights is case.weights else weights


def _placed(weights: Weights, layout: str, device: torch.device) -> Weights:
    """A copy on the device, in that layout."""
    if layout == "stacked":
        return Weights.from_stacked(torch.cat((weights.gate.to(device), weights.up.to(device))))
    return Weights(weights.gate.to(device, copy=True), weights.up.to(device, copy=True))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
