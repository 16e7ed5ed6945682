"""Relations that the outputs of correct kernels obey, each with the declarations that imply it.

A relation is a function of a `Subject` and a `Case`: it runs the subject, on the case's inputs or on ones that it
builds, and gives a `Finding`, which says what words contradict it.
"""

from __future__ import annotations

import math
import unittest
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from hypothesis import currently_in_test_context, target
from hypothesis import strategies as st
from torch import Tensor

from ..arithmetic import Arithmetic
from ..bounds import error_bound, within_bound
from ..check import executor
from ..errors import ArgumentError
from ..inputs import FAMILIES, Inputs
from ..numerics import differing, mismatch, ulp_distance
from ..problem import DTYPES, Problem
from ..recipes import activate, is_exact
from ..reference import exact, round_to, twin
from ..sm90 import execute, predict
from .assertions import raise_where
from .editing import apply_edits
from .strategies import edits, problems, seeds
from .subjects import BITS, FUNCTION, Case, Function, Subject, blank, drawn, exact_type, fill, rng_of


@dataclass(frozen=True)
class Finding:
    """wrong: which words contradict the relation. actual, expected: for the report. measured: fields for the row."""

    wrong: Tensor
    actual: Tensor
    expected: Tensor
    measured: dict[str, Any]


def same(actual: Tensor, expected: Tensor, where: Tensor | None = None, **measured: Any) -> Finding:
    """Every word must be the same, where asked."""
    wrong = differing(actual, expected)
    return Finding(wrong if where is None else wrong & where, actual, expected, measured)


def equal(actual: Tensor, expected: Tensor) -> Finding:
    """Every number must be the same: for kernels of which nothing is known, -0 is 0."""
    return Finding(ulp_distance(actual, expected) > 0, actual, expected, {})


def any_kernel(arithmetic: Arithmetic, family: str) -> bool:
    return True


def declared(arithmetic: Arithmetic, family: str) -> bool:
    return arithmetic.complete


def one_chain(arithmetic: Arithmetic, family: str) -> bool:
    return arithmetic.complete and arithmetic.split_k == 1


def declared_or_usual(arithmetic: Arithmetic, family: str) -> bool:
    """A library may flush subnormals."""
    return arithmetic.complete or family in FAMILIES


@dataclass(frozen=True)
class Relation:
    """find: the relation. holds: which declarations imply it, by the family of inputs. families: that a case may have.
    params: what else is drawn. activations: those that it is about. bias: whether it allows biases. on: where it says
    something: on the model itself, on kernels on a CPU, on a GPU."""

    find: Callable[[Subject, Case], Finding]
    holds: Callable[[Arithmetic, str], bool] = declared
    families: tuple[str, ...] = ("normal",)
    params: Callable[[Problem], st.SearchStrategy[dict[str, Any]]] = lambda problem: st.just({})
    activations: tuple[str, ...] = ("silu",)
    bias: bool = False
    on: tuple[str, ...] = ("model", "cpu", "cuda")


# Logic: exact in every order, so that they hold for every kernel


def small_integers(run: Subject, case: Case) -> Finding:
    """All sums are exact, so only the activation may err; where that is declared too, every bit is known."""
    inputs, p = drawn(case), case.problem
    out, a = run(inputs), run.declared

    def sums(x: Tensor, w: Tensor) -> Tensor:
        return (x.double() @ w.double().T + 0.0).float()  # -1 * 0 alone is -0, on tensor cores +0

    def act(gate: Tensor) -> Tensor:
        return torch.from_numpy(activate(gate.cpu().numpy(), p.activation, a.recipe)).to(gate.device)

    if a.complete and is_exact(p.activation, a.recipe):
        return same(out, predict(a, inputs.x, inputs.weights, p.activation, out.dtype, sums, act))
    wanted = twin(inputs.x, inputs.weights, p.activation, rounds=a.rounds)
    size = (sums(inputs.x, inputs.weights.gate) * sums(inputs.x, inputs.weights.up)).abs()
    off = {"tanh": 2.0**-10, "poly3": 2.0**-12}.get(a.recipe, 0.0) * size
    slack = wanted.double().abs() * torch.finfo(out.dtype).eps * (2 if "act" in a.rounds else 1) + off + 1e-30
    return Finding(~((out.double() - wanted.double()).abs() <= slack), out, wanted, {})


def all_ones(run: Subject, case: Case) -> Finding:
    """x and weights are 1 but for the first, which keeps every sum s between 64 and 255: to the last column of k each
    counts for more than an ulp. Even columns give s * 1, odd ones 64 * s."""
    p = case.problem
    first = 64 if p.k <= 128 else -128 * ((p.k - 1) // 128 - 1)
    row = torch.ones(p.k, **exact_type(case))
    row[0] = first
    inputs = blank(case)
    inputs.x.fill_(1)
    inputs.weights.gate[::2], inputs.weights.up[::2, -1] = row, 1
    inputs.weights.gate[1::2, 0], inputs.weights.up[1::2] = 64, row
    wanted = torch.full((p.m, p.n), float(first + p.k - 1), **exact_type(case))
    wanted[:, 1::2] *= 64
    return equal(run(inputs), wanted)


def one_hot(run: Subject, case: Case) -> Finding:
    """Each row of x selects one column of the weights: the output is a weight, at its place."""
    p, rng = case.problem, rng_of(case)
    chosen = torch.from_numpy(rng.integers(0, p.k, p.m)).to(case.device)
    inputs = blank(case)
    inputs.x[torch.arange(p.m, device=case.device), chosen] = 1
    value = rng.choice([-1.0, 1.0], (p.n, p.k)) * (1 + rng.random((p.n, p.k))) * 2.0 ** rng.integers(-4, 4, (p.n, p.k))
    codes = torch.from_numpy(value).to(**exact_type(case))
    inputs.weights.gate[::2], inputs.weights.up[::2] = 64, codes[::2]
    inputs.weights.gate[1::2], inputs.weights.up[1::2] = codes[1::2].abs() * 1024, 1
    wanted = codes[:, chosen].T.contiguous()
    wanted[:, ::2] *= 64
    wanted[:, 1::2] = wanted[:, 1::2].abs() * 1024
    return equal(run(inputs), wanted)


def column_codes(run: Subject, case: Case) -> Finding:
    """The output encodes its column (modulo the largest prime that bf16 and the tiles leave room for)."""
    codes = 1 + torch.arange(case.problem.n, device=case.device) % 251
    inputs = blank(case)
    inputs.x[:, 0], inputs.weights.gate[:, 0], inputs.weights.up[:, 0] = 1, 64, codes
    return equal(run(inputs), (64 * codes).to(inputs.x.dtype).expand(case.problem.m, -1).contiguous())


def ties(run: Subject, case: Case) -> Finding:
    """up is halfway between two outputs, or 2^-18 of it off, as a sum of three: rounded to nearest, ties to even."""
    p, rng = case.problem, rng_of(case)
    eps = torch.finfo(DTYPES[p.dtype]).eps
    parts = np.stack(
        (1 + rng.integers(0, round(1 / eps), p.n) * eps, np.full(p.n, eps / 2), rng.integers(-1, 2, p.n) * 2.0**-18)
    )[: p.k]
    places = torch.from_numpy(rng.permutation(p.k)[: len(parts)]).to(case.device)
    inputs = blank(case)
    inputs.x[:, places] = 1
    inputs.weights.gate[:, places[0]] = 64
    inputs.weights.up[:, places] = torch.from_numpy(parts.T).to(**exact_type(case))
    wanted = 64 * round_to(torch.from_numpy(parts.sum(0)), inputs.x.dtype)
    return equal(run(inputs), wanted.to(case.device).expand(p.m, -1).contiguous())


def edited(run: Subject, case: Case) -> Finding:
    """A NaN, an infinity or a huge value in a row of x reaches that row only, in a row of a weight that column only;
    NaN and infinities reach all of it."""
    before = run(drawn(case))
    inputs = drawn(case)
    reached, spoilt = apply_edits(inputs, case.params["edits"])
    out = run(inputs)
    elsewhere = differing(out, before) if run.declared.complete else ~out.isfinite()
    return Finding((elsewhere & ~reached) | (out.isfinite() & spoilt), out, before, {})


def _edits(p: Problem) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"edits": edits(p)})


# Metamorphic relations: the same bits from other inputs


def scaled_up(run: Subject, case: Case) -> Finding:
    """w_up times 2^s gives the output times 2^s, where neither leaves the normal range."""
    power = 2.0 ** case.params["s"]
    inputs = _without_subnormals(drawn(case), case.params["s"])
    plain = run(inputs)
    scaled = run(fill(inputs, up=inputs.weights.up.double() * power))
    least = 128 * torch.finfo(plain.dtype).tiny
    normal = (plain.double().abs() > least) & (scaled.double().abs() > least)
    return same(scaled, (plain.double() * power).to(plain.dtype), normal)


def scaled_x(run: Subject, case: Case) -> Finding:
    """x times 2^s with both weights times 2^-s gives the same output."""
    power = 2.0 ** case.params["s"]
    inputs = _without_subnormals(drawn(case), case.params["s"])
    plain = run(inputs)
    w = inputs.weights
    return same(run(fill(inputs, inputs.x.double() * power, w.gate.double() / power, w.up.double() / power)), plain)


def _without_subnormals(inputs: Inputs, s: int) -> Inputs:
    for tensor in (inputs.x, inputs.weights.gate, inputs.weights.up):
        tensor[tensor.abs() < torch.finfo(tensor.dtype).tiny * 2.0 ** abs(s)] = 0
    return inputs


def _powers(p: Problem) -> st.SearchStrategy[dict[str, Any]]:
    most = 20 if p.dtype == "bf16" else 4
    return st.fixed_dictionaries({"s": st.integers(-most, most).filter(bool)})


def permuted_inside_steps(run: Subject, case: Case) -> Finding:
    """Order inside 16 neighbouring columns of k does not matter."""
    k, rng = case.problem.k, rng_of(case)
    steps = [start + rng.permutation(min(16, k - start)) for start in range(0, k, 16)]
    order = torch.from_numpy(np.concatenate(steps)).to(case.device)
    inputs = drawn(case)
    plain, w = run(inputs), inputs.weights
    return same(run(fill(inputs, inputs.x[:, order], w.gate[:, order], w.up[:, order])), plain)


def permuted_rows(run: Subject, case: Case) -> Finding:
    """Permuting the rows of x permutes the output's."""
    order = torch.from_numpy(rng_of(case).permutation(case.problem.m)).to(case.device)
    inputs = drawn(case)
    plain = run(inputs)
    return same(run(fill(inputs, inputs.x[order])), plain[order])


def permuted_columns(run: Subject, case: Case) -> Finding:
    """Permuting the rows of both weights permutes the output's columns."""
    order = torch.from_numpy(rng_of(case).permutation(case.problem.n)).to(case.device)
    inputs = drawn(case)
    plain, w = run(inputs), inputs.weights
    return same(run(fill(inputs, gate=w.gate[order], up=w.up[order])), plain[:, order])


def row_alone(run: Subject, case: Case) -> Finding:
    """A row of the output is the same whatever M is, by whatever config the kernel takes for so few rows."""
    inputs, row = drawn(case), case.params["row"]
    whole = run(inputs)
    alone = replace(case.problem, m=1)
    return same(run(fill(drawn(case, alone), inputs.x[row : row + 1]), alone), whole[row : row + 1])


def another_config(run: Subject, case: Case) -> Finding:
    """All configs of a kernel under one arithmetic give the same bits."""
    assert run.kernel
    inputs = drawn(case)
    plain = run(inputs)
    able = [
        c
        for c in run.kernel.configs(case.problem)
        if run.kernel.why_not(case.problem, c, run.arithmetic, run.device) is None
    ]
    return same(run(inputs, config=str(able[case.params["other"] % len(able)])), plain)


def _rows(p: Problem) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"row": st.integers(0, p.m - 1) | st.just(p.m - 1)})


def _others(p: Problem) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"other": st.integers(0, 63)})


def again(run: Subject, case: Case) -> Finding:
    """The same inputs give the same bits."""
    inputs = drawn(case)
    plain = run(inputs)
    return same(run(inputs), plain)


def order_probes(run: Subject, case: Case) -> Finding:
    """Triples 2^e, 1 and -2^e anywhere in k: what is left of the 1 tells the order of the sums, where they are cut, and
    to how many bits. Expected from a chain in Python's integers."""
    p, rng = case.problem, rng_of(case)
    inputs = blank(case)
    inputs.x.fill_(4096)
    inputs.weights.gate[:, 0] = 64 / 4096
    wanted = torch.zeros(p.n, dtype=torch.float64)
    for column in range(p.n):
        e, places = int(rng.integers(23, 28)), rng.permutation(p.k)[:3]
        signs = int(rng.choice([-1, 1])), int(rng.choice([-1, 1]))
        terms = dict(zip(places.tolist(), (signs[0] << e, signs[1], -signs[0] << e), strict=False))
        for place, term in terms.items():
            inputs.weights.up[column, place] = term / 4096
        wanted[column] = 64 * _chain(terms, p.k)
    return equal(run(inputs), round_to(wanted, inputs.x.dtype).to(case.device).expand(p.m, -1).contiguous())


def _chain(terms: dict[int, int], k: int) -> int:
    """Steps of 16 whose terms are cut to 25 bits below the largest's first, sums to fp32's 24 bits, toward zero."""
    total = 0
    for start in range(0, k, 16):
        here = [total, *(terms.get(place, 0) for place in range(start, start + 16))]
        total = sum(_cut(term, max(abs(t).bit_length() for t in here) - 26) for term in here)
        total = _cut(total, abs(total).bit_length() - 24)
    return total


def _cut(value: int, bits: int) -> int:
    """The value with so many of its last bits set to zero."""
    size = abs(value) >> max(bits, 0) << max(bits, 0)
    return size if value >= 0 else -size


# Distances from the exact result, and from the model


def near_exact(run: Subject, case: Case) -> Finding:
    """Every output is within the error that the declared rounding points allow; how far it is, is measured."""
    inputs, p = drawn(case), case.problem
    out, a = run(inputs), run.declared
    wanted = exact(inputs.x, inputs.weights, p.activation, out_dtype=out.dtype)
    bound = error_bound(inputs.x, inputs.weights, p.activation, rounds=a.rounds, recipe=a.recipe)
    found = mismatch(out, wanted)
    if math.isfinite(found.m1_max) and currently_in_test_context():  # it is not where a case is replayed
        target(float(found.m1_max), label="ulps")
    measured = {f.name: getattr(found, f.name) for f in fields(found)}
    return Finding(~within_bound(out, wanted.value, bound), out, wanted.rounded, measured)


def as_predicted(run: Subject, case: Case) -> Finding:
    """M0: the bits are those of the declared arithmetic, by the device's own executor of the rule."""
    inputs, a = drawn(case), run.declared
    out = run(inputs)
    if not a.complete:
        raise unittest.SkipTest(f"{case.kernel} declares {a}: nothing to predict")
    predicted = (executor(run.device.type) or execute)(a, inputs.x, inputs.weights, case.problem.activation)
    wrong = differing(out, predicted.to(out.device))
    return same(out, predicted.to(out.device), m0=float(wrong.float().mean()))


ANY = (*sorted(FAMILIES), *BITS)
ALL_ACTIVATIONS = ("silu", "gelu_tanh", "relu", "sigmoid")
RELATIONS: dict[str, Relation] = {
    "small integers": Relation(small_integers, any_kernel, ("integers",), activations=ALL_ACTIVATIONS),
    "all ones": Relation(all_ones, any_kernel),
    "one-hot rows": Relation(one_hot, any_kernel),
    "column codes": Relation(column_codes, any_kernel),
    "ties to even": Relation(ties, any_kernel),
    "sparse edits": Relation(edited, any_kernel, params=_edits),
    "near exact": Relation(
        near_exact, declared_or_usual, (*sorted(FAMILIES), "subnormal"), activations=ALL_ACTIVATIONS, bias=True
    ),
    "as predicted": Relation(as_predicted, declared, ANY, activations=ALL_ACTIVATIONS, bias=True, on=("cuda",)),
    "w_up scaled": Relation(scaled_up, params=_powers, activations=ALL_ACTIVATIONS),
    "x and weights scaled": Relation(scaled_x, params=_powers, activations=ALL_ACTIVATIONS),
    "k permuted inside steps": Relation(permuted_inside_steps, families=ANY),
    "rows of x permuted": Relation(permuted_rows, families=ANY, bias=True),
    "rows of weights permuted": Relation(permuted_columns, families=ANY),
    "a row alone": Relation(row_alone, families=ANY, params=_rows, bias=True),
    "another config": Relation(another_config, families=ANY, params=_others, bias=True, on=("cpu", "cuda")),
    "run again": Relation(again, families=ANY, bias=True, on=("cpu", "cuda")),
    "order probes": Relation(order_probes, one_chain),
}


def implied_by(declared: Arithmetic, device: str = "cpu") -> list[str]:
    """The relations that a function of that declaration must obey, on `cpu` or `cuda`."""
    names = [name for name, rule in RELATIONS.items() if device in rule.on and rule.find is not another_config]
    return [name for name in names if _families(RELATIONS[name], declared)]


@st.composite
def cases(draw: st.DrawFn, relation: str, declared: Arithmetic, *, device: str = "cpu", **options: Any) -> Case:
    """A case of the relation, of those `implied_by` the declaration, for `assert_holds`.

    options: as `problems` takes them, for what the function takes. Raises ArgumentError for another relation.
    """
    if relation not in implied_by(declared, device):
        known = ", ".join(implied_by(declared, device))
        raise ArgumentError("relation", f"{declared} does not imply {relation!r}", f"choose from {known}")
    rule = RELATIONS[relation]
    problem = draw(problems(**options))
    family = draw(st.sampled_from(_families(rule, declared)))
    params = draw(rule.params(problem))
    return Case(relation, FUNCTION, "", str(declared), problem, family, draw(seeds()), params, device)


def _families(rule: Relation, declared: Arithmetic) -> list[str]:
    return [family for family in rule.families if rule.holds(declared, family)]


def assert_holds(case: Case, function: Function) -> None:
    """The function obeys the case's relation, and writes nothing outside the rows of out.

    function(out, x, weights) writes out[m, n]; it may be called several times, with fewer rows, too. Raises
    AssertionError as `raise_where` does.
    """
    finding = RELATIONS[case.relation].find(Subject(case, function), case)
    what = f"contradict '{case.relation}', which {case.arithmetic} implies"
    distance = ulp_distance(finding.actual, finding.expected)
    raise_where(finding.wrong, what, distance, finding.actual, finding.expected)
