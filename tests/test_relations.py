"""The relations can fail: each rejects a kernel that is wrong in the way it is about, and none the honest one."""

from __future__ import annotations

import itertools

import planted
import properties
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis.errors import Flaky
from test_mutants import MUTANTS

from fused_swiglu import Operands, Problem, Weights, register, registry
from fused_swiglu.testing.relations import RELATIONS
from fused_swiglu.testing.subjects import Case


def mutant(name):
    return lambda operands, config: MUTANTS[name](operands.x, operands.weights)


def neighbours_swapped(operands: Operands, config):
    """Columns of x come in the wrong order from shared memory."""
    k = operands.x.shape[1]
    order = [i ^ 1 if i ^ 1 < k else i for i in range(k)]
    return planted.honestly(Operands(operands.x[:, order], operands.weights, operands.out))


def nan_spreads(operands: Operands, config):
    return planted.honestly(operands) + 0 * operands.x.sum()


def small_up_lost(operands: Operands, config):
    up = torch.where(operands.weights.up.abs() < 2.0**-8, 0, operands.weights.up)
    return planted.honestly(Operands(operands.x, Weights(operands.weights.gate, up), operands.out))


def large_x_clamped(operands: Operands, config):
    return planted.honestly(Operands(operands.x.clamp(-1, 1), operands.weights, operands.out))


def depends_on_m(operands: Operands, config):
    return planted.honestly(operands) * (1 + len(operands.x) % 2)


def depends_on_config(operands: Operands, config):
    return planted.honestly(operands) * (1 + config.shade)


calls = itertools.count()


def changes(operands: Operands, config):
    out = planted.honestly(operands)
    out[0, 0] = next(calls)
    return out


def writes_past_the_end(operands: Operands, config):
    out = planted.honestly(operands)
    operands.out.as_strided((1, out.shape[1] + 1), operands.out.stride())[:] = 0
    return out


def writes_before_the_start(operands: Operands, config):
    out = operands.out
    out.as_strided((1, 1), (1, 1), out.storage_offset() - 1)[:] = 0
    return planted.honestly(operands)


FAULTS = [
    ("small integers", mutant("gate and up swapped")),
    ("small integers", writes_past_the_end),
    ("small integers", writes_before_the_start),
    ("all ones", mutant("dropped k tail")),
    ("one-hot rows", neighbours_swapped),
    ("column codes", mutant("half-width store, full-width tiler")),
    ("ties to even", mutant("truncating store")),
    ("sparse edits", nan_spreads),
    ("near exact", mutant("activation before the last k block")),
    ("w_up scaled", small_up_lost),
    ("x and weights scaled", large_x_clamped),
    ("k permuted inside steps", neighbours_swapped),
    ("rows of x permuted", mutant("stale output")),
    ("rows of weights permuted", mutant("missing mask")),
    ("a row alone", depends_on_m),
    ("another config", depends_on_config),
    ("run again", changes),
    ("order probes", mutant("24 fraction bits")),
    ("order probes", mutant("26 fraction bits")),
    ("order probes", mutant("fp32 fma chain")),
    ("order probes", mutant("split-k")),
]


@pytest.fixture
def plant(monkeypatch):
    """Registers a kernel of that body in place of the last; what it does is neither recorded nor saved."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(properties, "record", lambda row: None)
    monkeypatch.setattr(properties, "save", lambda problem: None)

    def register_only(body):
        registry._registered.clear()
        return register(planted.Planted("planted", body))

    return register_only


def rejects(relation: str, examples: int = 200) -> bool:
    """Whether the relation rejects one of so many examples."""

    @settings(max_examples=examples, phases=[Phase.generate], database=None, derandomize=True)
    @given(properties.cases(relation, "planted", "cpu", max_m=40, max_n=140, max_k=193))
    def run(case):
        properties.check(case)

    try:
        run()
    except (AssertionError, Flaky):  # the latter where a kernel is right when asked again
        return True
    return False


@pytest.mark.parametrize(("relation", "body"), FAULTS)
def test_a_fault_is_rejected(relation, body, plant):
    plant(body)
    assert rejects(relation)


def test_every_relation_rejects_something():
    """The one that needs a GPU is M0, which tests/test_check.py makes fail."""
    assert {name for name, r in RELATIONS.items() if "cpu" in r.on} == {name for name, _ in FAULTS}


@pytest.mark.parametrize("relation", sorted({name for name, _ in FAULTS}))
def test_the_honest_kernel_is_not(relation, plant):
    plant(lambda operands, config: planted.honestly(operands))
    assert not rejects(relation, examples=10)


def test_what_is_not_implied_is_only_measured(plant, monkeypatch):
    """A library's GEMM may depend on M: a rate, no failure."""
    rows = []
    monkeypatch.setattr(properties, "record", rows.append)
    kernel = plant(depends_on_m)
    built = kernel.compile(Problem(1, 1, 1), planted.Shade(), None, None)
    monkeypatch.setattr(type(built), "arithmetic", registry.get_kernel("torch.eager").arithmetics(None)[0])
    assert not rejects("a row alone", examples=10)
    assert max(row.contradicted for row in rows) > 0.5
    assert {row.status for row in rows} == {"ok"}


def test_refusals_skip_with_the_reason(plant, monkeypatch):
    monkeypatch.setattr(planted.Planted, "why_not", lambda *_: "needs a machine that nobody has")
    plant(planted.honestly)
    with pytest.raises(pytest.skip.Exception, match="planted: needs a machine that nobody has"):
        rejects("all ones")


def test_a_case_survives_json():
    case = Case("w_up scaled", "model", "default", "sm90:ieee:out", Problem(2, 3, 4), "normal", 5, {"s": 2}, "cpu")
    assert Case.from_dict(case.to_dict()) == case


def test_table(plant):
    """Prints which relation rejects which mutant of tests/test_mutants.py within a few examples; each is rejected."""
    relations = sorted({name for name, _ in FAULTS} - {"another config", "run again"})  # of a kernel, not of its values
    killed = {}
    for name in MUTANTS:
        plant(mutant(name))
        killed[name] = [rejects(relation, examples=10) for relation in relations]
    print("\n| mutant |", " | ".join(relations), "|\n|", "--- | " * (len(relations) + 1))
    for name, row in killed.items():
        print(f"| {name} |", " | ".join("rejects" if k else "" for k in row), "|")
    assert all(map(any, killed.values()))
