"""check: a declaration that is kept, and each way of breaking one."""

from __future__ import annotations

import importlib

import pytest
import torch

from fused_swiglu import Operands, Problem, registry
from fused_swiglu.check import broken, check
from fused_swiglu.cli import main
from fused_swiglu.plan import plan
from fused_swiglu.results import Environment, Row

CPU = torch.device("cpu")
MODULE = importlib.import_module("fused_swiglu.check")


def rows_of(*names: str, problem: Problem) -> list[Row]:
    work = plan(problem, names, device=CPU)
    return list(check(work, device=CPU, environment=Environment.collect(CPU), repeats=2))


def test_a_kept_declaration(kernels: None) -> None:
    (row,) = rows_of("fake.good", problem=Problem(10, 24, 16))
    assert (row.status, row.run_to_run, row.batch, row.m0) == ("ok", 0.0, 0.0, None)
    assert not broken(row)


def test_a_word_that_changes_from_run_to_run(kernels: None) -> None:
    (row,) = rows_of("odd.changes", problem=Problem(10, 24, 16))
    assert row.run_to_run == pytest.approx(1 / 240)
    assert broken(row)


def test_rows_that_depend_on_their_batch(kernels: None) -> None:
    (row,) = rows_of("odd.batch", problem=Problem(10, 24, 16))
    assert row.batch is not None
    assert row.batch > 0.9
    assert broken(row)


@pytest.mark.parametrize("wrong", [0, 1])
def test_bits_are_compared_with_the_prediction(kernels: None, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    def predict(arithmetic, x, weights, activation, *, out_dtype):
        out = torch.empty(len(x), len(weights.gate), dtype=out_dtype)
        registry.get_kernel("fake.good").body(Operands(x, weights, out))
        out.view(torch.int16)[:wrong, 0] ^= 1
        return out

    monkeypatch.setattr(MODULE, "executor", lambda device_type: predict)
    (row,) = rows_of("fake.good", problem=Problem(10, 24, 16))
    assert row.m0 == pytest.approx(wrong / 240)
    assert row.outputs == 240
    assert broken(row) == bool(wrong)


def test_the_command_exits_with_1_where_a_declaration_is_broken(kernels: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "--shape", "10,16,24", "--kernels", "fake.good", "--device", "cpu", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["check", "--shape", "10,16,24", "--kernels", "odd.changes", "--device", "cpu", "--quiet"]) == 1
    assert "odd.changes" in capsys.readouterr().err


def test_what_is_undeclared_may_change(kernels: None) -> None:
    (row,) = rows_of("torch.eager", problem=Problem(10, 24, 16))
    assert not broken(row)
    assert row.run_to_run is not None
