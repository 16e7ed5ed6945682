"""What relations run: a case, all that was drawn; its inputs; a function, a kernel or a model that is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arithmetic import Arithmetic
from ..inputs import FAMILIES, Inputs, make_inputs
from ..operands import Operands, Weights
from ..problem import DTYPES, Problem
from ..registry import get_kernel
from ..sm90 import execute

MODEL = "model"  # the name of a subject that is no kernel: the CPU model of an arithmetic
FUNCTION = "function"  # the name of one that is a function of out, x and weights
BITS = ("subnormal", "bits")  # families drawn here: subnormal operands, and any bit patterns
GUARD = 256  # elements on both sides of an output that nothing may write
POISON = 0x7FD5  # a NaN in bf16 and in fp16, with a payload that no arithmetic makes


@dataclass(frozen=True)
class Case:
    """One problem for one relation and subject; with the seed it says everything."""

    relation: str
    kernel: str
    config: str
    arithmetic: str
    problem: Problem
    family: str
    seed: int
    params: dict[str, Any]
    device: str

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        problem = values["problem"]
        return cls(**{**values, "problem": Problem(**{**problem, "outputs": tuple(problem["outputs"])})})


Function = Callable[[Tensor, Tensor, Weights], Any]
"""Writes act(x @ w_gate.T) * (x @ w_up.T) to out[m, n], for x[m, k] and weights [n, k]."""


class Subject:
    """What a case runs. declared: the arithmetic that its build declares; ran_on: as in a row.

    function: what it runs instead of the kernel, or model, that the case names."""

    def __init__(self, case: Case, function: Function | None = None) -> None:
        self.case, self.device, self.function = case, torch.device(case.device), function
        self.arithmetic = Arithmetic.parse(case.arithmetic)
        self.kernel = None if function or case.kernel == MODEL else get_kernel(case.kernel)
        self.declared, self.ran_on = self.arithmetic, MODEL
        if self.kernel:
            compiled = self.kernel.compile(case.problem, self._config(case.problem), self.arithmetic, self.device)
            gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
            self.declared, self.ran_on = compiled.arithmetic, compiled.ran_on or gpu

    def _config(self, problem: Problem):
        """The case's config for its own problem; for another (fewer rows) what the kernel takes by default."""
        assert self.kernel
        if problem == self.case.problem:
            return self.kernel.config_type.parse(self.case.config)
        return next(iter(self.kernel.configs(problem)))

    def __call__(self, inputs: Inputs, problem: Problem | None = None, config: str | None = None) -> Tensor:
        """The output of a run; fails if anything outside its rows was written."""
        problem = problem or self.case.problem
        if not self.kernel and not self.function:
            return execute(self.arithmetic, inputs.x, inputs.weights, problem.activation)
        out, outside = _guarded(problem, self.device)
        if self.function:
            self.function(out, inputs.x, inputs.weights)
            result = out.clone()
        else:
            result = self._launched(inputs, problem, config, out)
        written = int((outside() != POISON).sum())
        assert not written, f"{written} elements were written outside the output's rows"
        return result

    def _launched(self, inputs: Inputs, problem: Problem, config: str | None, out: Tensor) -> Tensor:
        assert self.kernel
        chosen = self.kernel.config_type.parse(config) if config else self._config(problem)
        compiled = self.kernel.compile(problem, chosen, self.arithmetic, self.device)
        bound = compiled.bind(Operands(inputs.x, self.kernel.prepare(inputs.weights, problem, chosen), out))
        return bound.run().clone()


def _guarded(problem: Problem, device: torch.device) -> tuple[Tensor, Callable[[], Tensor]]:
    """An output of the problem's stride and alignment, poisoned; and the words around its rows."""
    dtype = DTYPES[problem.out_dtype]
    before = GUARD + (0 if problem.alignment >= 16 else max(1, problem.alignment // dtype.itemsize))
    span = problem.m * problem.out_stride
    words = torch.full((before + span + GUARD,), POISON, dtype=torch.int16, device=device)
    out = words.view(dtype)[before : before + span].view(problem.m, problem.out_stride)[:, : problem.n]
    return out, lambda: torch.cat(
        (
            words[:before],
            words[before : before + span].view(problem.m, problem.out_stride)[:, problem.n :].flatten(),
            words[before + span :],
        )
    )


def drawn(case: Case, problem: Problem | None = None) -> Inputs:
    """The case's inputs, in its layout, strides and alignment."""
    problem = problem or case.problem
    if case.family in FAMILIES:
        return make_inputs(problem, case.family, case.seed, case.device)
    inputs = make_inputs(problem, "normal", case.seed, case.device)
    rng, dtype = np.random.default_rng(case.seed), DTYPES[problem.dtype]
    w, x = (problem.n, problem.k), (problem.m, problem.k)
    if case.family == "bits":
        gate, up = (_words(rng.integers(0, 2**16, w), dtype) for _ in range(2))  # before x: they do not depend on m
        return fill(inputs, _words(rng.integers(0, 2**16, x), dtype), gate, up)
    # Subnormal x, and weights of many octaves, so large that sums are normal in fp32 or not.
    digits, top = (7, 126) if problem.dtype == "bf16" else (10, 15)
    gate, up = (
        rng.choice([-1, 1], w) * np.ldexp(1 + rng.random(w), top - 1 - rng.integers(0, octaves, w))
        for octaves in (26, 3 * top)
    )
    words = rng.integers(0, 2**digits, x) | rng.choice([0, 2**15], x)
    return fill(inputs, _words(words, dtype), torch.from_numpy(gate), torch.from_numpy(up))


def _words(words: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(words.astype(np.uint16).view(np.int16)).view(dtype)


def fill(inputs: Inputs, x: Tensor | None = None, gate: Tensor | None = None, up: Tensor | None = None) -> Inputs:
    """The same tensors with other contents."""
    for tensor, value in ((inputs.x, x), (inputs.weights.gate, gate), (inputs.weights.up, up)):
        if value is not None:
            tensor.copy_(value)
    return inputs


def blank(case: Case) -> Inputs:
    """Zeros, with NaN between the rows."""
    inputs = drawn(case)
    for tensor in (inputs.x, inputs.weights.gate, inputs.weights.up):
        tensor.zero_()
    return inputs


def rng_of(case: Case) -> np.random.Generator:
    return np.random.default_rng((case.seed, 1))


def exact_type(case: Case) -> dict[str, Any]:
    return {"dtype": DTYPES[case.problem.dtype], "device": case.device}
