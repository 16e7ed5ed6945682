"""The property suite: every relation on every registered kernel. What is drawn, how it is checked, and what is kept.

`check` demands that nothing contradicts a relation where the subject's declaration implies it, and elsewhere only
measures the rate. Both are rows for `--mismatch-rows`; a case that fails is saved for `--replay`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Arithmetic, Kernel, Problem, get_kernel, kernel_names
from fused_swiglu.numerics import ulp_distance
from fused_swiglu.pytest_plugin import record, save
from fused_swiglu.results import Row
from fused_swiglu.testing import problems, raise_where, seeds
from fused_swiglu.testing.relations import RELATIONS, Finding
from fused_swiglu.testing.subjects import MODEL, Case, Subject

# Compile or tune for every problem anew. The last three call other projects' kernels, and have tests of their own.
LEFT_OUT = ("torch.compile", "quack.gated", "liger.silu_mul", "flashinfer.silu_mul")


def pairs(device: str) -> list[Any]:
    """Each relation with each subject, for `pytest.mark.parametrize`: every registered kernel that computes SwiGLU, and
    on a CPU the model. What cannot be loaded is marked to skip."""
    return [
        pytest.param(relation, name, marks=marks, id=f"{relation}-{name}")
        for relation, rule in RELATIONS.items()
        for name, marks in subjects(device)
        if (MODEL if name == MODEL else device) in rule.on
    ]


@cache
def subjects(device: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [(MODEL, ())] if device == "cpu" else []
    for name in kernel_names():
        try:
            if get_kernel(name).computes == "swiglu" and name not in LEFT_OUT:
                found.append((name, ()))
        except ImportError as error:
            found.append((name, pytest.mark.skip(reason=f"{name}: {error}")))
    return found


@cache
def modelled(activation: str) -> tuple[Arithmetic, ...]:
    """The complete arithmetics that registered kernels declare."""
    found: dict[Arithmetic, None] = {}
    for name in kernel_names():
        try:
            kernel = get_kernel(name)
        except ImportError:
            continue
        if kernel.computes == "swiglu" and activation in kernel.activations:
            offered = kernel.arithmetics(Problem(64, 64, 64, activation=activation))
            found |= dict.fromkeys(a for a in offered if a.complete)
    return tuple(found)


def prebuilt(kernel: Kernel | None, device: str) -> bool:
    """Whether nvcc compiles the kernel, for each config, dtype, activation and recipe anew: minutes for all of them."""
    return device == "cuda" and hasattr(kernel, "units")


def units(name: str) -> list[Any]:
    """What the cases of a kernel that nvcc compiles run on a GPU: its whole table, in bf16, silu and its first
    arithmetic. Of another kernel, nothing."""
    kernel: Any = get_kernel(name)
    if not prebuilt(kernel, "cuda"):
        return []
    problem = Problem(64, 64, 64)
    return [kernel.unit(problem, config, next(iter(kernel.arithmetics(problem)))) for config in kernel.table()]


@st.composite
def cases(draw: st.DrawFn, relation: str, name: str, device: str, **largest: int) -> Case:
    """A case for a subject: the drawn problem, or where the kernel refuses that one without biases, then one with
    aligned rows. Skips the test, with the reason, where it refuses this too. largest: max_m, max_n, max_k.
    On a GPU, of a kernel that nvcc compiles, a case that `units` has."""
    rule = RELATIONS[relation]
    kernel = None if name == MODEL else get_kernel(name)
    activations = [a for a in rule.activations if kernel is None or a in kernel.activations] or list(rule.activations)
    dtypes, bias = ("bf16", "fp16") if kernel is None else kernel.dtypes, rule.bias
    if prebuilt(kernel, device):
        dtypes, activations, bias = ("bf16",), ["silu"], False
    problem = draw(problems(dtypes=dtypes, activations=activations, bias=bias, **largest))
    if kernel is None:
        config, arithmetic = "default", draw(st.sampled_from(modelled(problem.activation)))
    else:
        problem, config, arithmetic = _supported(draw, kernel, problem, torch.device(device))
    return Case(
        relation,
        name,
        str(config),
        str(arithmetic),
        problem,
        draw(st.sampled_from(rule.families)),
        draw(seeds()),
        draw(rule.params(problem)),
        device,
    )


def _supported(draw: st.DrawFn, kernel: Kernel, problem: Problem, device: torch.device):
    choice = draw(st.integers(0, 63))
    plain = replace(problem, bias=False)
    n, k = -(-problem.n // 8) * 8, -(-problem.k // 8) * 8
    aligned = Problem(problem.m, n, k, problem.dtype, activation=problem.activation, layout=problem.layout)
    reason = ""
    for attempt in dict.fromkeys((problem, plain, aligned)):
        try:
            offered = list(kernel.arithmetics(attempt))[: 1 if prebuilt(kernel, device.type) else None]
            arithmetic = offered[choice % len(offered)]
            able = []
            for config in kernel.configs(attempt):
                refused = kernel.why_not(attempt, config, arithmetic, device)
                able += [] if refused else [config]
                reason = refused or reason
        except ArgumentError as error:
            able, reason = [], str(error)
        if able:
            return attempt, able[choice // len(offered) % len(able)], arithmetic
    pytest.skip(f"{kernel.name}: {reason}")


def check(case: Case) -> None:
    """Runs the case's relation; raises AssertionError where words contradict it that its declaration forbids to.

    Measures either way. A case that fails, by whatever error, is saved.
    """
    relation = RELATIONS[case.relation]
    try:
        subject = Subject(case)
        finding = relation.find(subject, case)
        implied = relation.holds(subject.declared, case.family)
        failed = implied and bool(finding.wrong.any())
        record(_row(case, subject, finding, failed))
        if failed:
            distance = ulp_distance(finding.actual, finding.expected)
            what = f"contradict '{case.relation}', which {subject.declared} implies"
            raise_where(finding.wrong, what, distance, finding.actual, finding.expected)
    except Exception:
        save(case.to_dict())
        raise


def _row(case: Case, subject: Subject, finding: Finding, failed: bool) -> Row:
    p = case.problem
    described = {name: getattr(p, name) for name in ("m", "n", "k", "dtype", "activation", "bias", "layout")}
    measured = {"outputs": finding.wrong.numel(), **finding.measured}
    return Row(
        kernel=case.kernel,
        config=case.config,
        arithmetic=str(subject.declared),
        role=subject.kernel.role if subject.kernel else None,
        ran_on=subject.ran_on,
        status="failed" if failed else "ok",
        reason=f"contradicts '{case.relation}'" if failed else None,
        inputs=case.family,
        seed=case.seed,
        relation=case.relation,
        contradicted=float(finding.wrong.double().mean()) if finding.wrong.numel() else 0.0,
        **described,
        **measured,
    )
