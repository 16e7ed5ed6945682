"""Mutants: kernels that are wrong on purpose, each of which some property must reject, and an honest one that none may.

Each mutant is the model of a fused kernel (`sm90:ieee:out`) with one fault. `pytest tests/test_mutants.py -s -k table`
prints which property rejects which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from fused_swiglu import Arithmetic, Problem, Weights
from fused_swiglu.bounds import error_bound, within_bound
from fused_swiglu.inputs import Inputs, make_inputs
from fused_swiglu.numerics import bits_differ
from fused_swiglu.recipes import activate
from fused_swiglu.reference import exact, twin
from fused_swiglu.sm90 import accumulate, execute
from fused_swiglu.sm90_rule import Step

Kernel = Callable[[torch.Tensor, Weights], torch.Tensor]
BF16 = Step(16, 25, 23, 7, -126)
TILE = 64


def honest(x: torch.Tensor, weights: Weights, **fault) -> torch.Tensor:
    return finish(*sums(x, weights, **fault))


def sums(x: torch.Tensor, weights: Weights, **fault) -> tuple[np.ndarray, np.ndarray]:
    return accumulate(x, weights.gate, **fault), accumulate(x, weights.up, **fault)


def finish(gate: np.ndarray, up: np.ndarray) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(activate(gate, "silu", "ieee") * up).bfloat16()


def swapped(x, weights):
    return honest(x, Weights(weights.up, weights.gate))


def dropped_tail(x, weights):
    k = (x.shape[1] - 1) // 64 * 64 or x.shape[1]
    return honest(x[:, :k], Weights(weights.gate[:, :k], weights.up[:, :k]))


def truncating_store(x, weights):
    gate, up = sums(x, weights)
    words = (activate(gate, "silu", "ieee") * up).view(np.int32) & -65536
    return torch.from_numpy(words.view(np.float32)).bfloat16()


def fp32_chain(x, weights):
    def chain(w):
        total = torch.zeros(len(x), len(w))
        for k in range(x.shape[1]):
            total += x[:, k : k + 1].float() * w[:, k].float()
        return total.numpy()

    return finish(chain(weights.gate), chain(weights.up))


def column_off_by_a_tile(x, weights):
    return torch.roll(honest(x, weights), TILE, 1)


def missing_mask(x, weights):
    """The last tile is stored whole: what lies beyond the row goes into the next one."""
    out = honest(x, weights)
    if out.shape[1] % TILE:
        out[1:, 0] = 0
    return out


def stale_output(x, weights):
    out = honest(x, weights)
    out[-1, :TILE] = out[0, :TILE]
    return out


def flush_to_zero(x, weights):
    def flushed(t):
        return torch.where(t.float().abs() < 2.0**-126, 0.0, t.float()).bfloat16()

    return flushed(honest(flushed(x), Weights(flushed(weights.gate), flushed(weights.up))))


def activation_before_the_last_block(x, weights):
    k = max(x.shape[1] - 64, 0)
    early, _ = sums(x[:, :k], Weights(weights.gate[:, :k], weights.up[:, :k]))
    rest, up = accumulate(x[:, k:], weights.gate[:, k:]), accumulate(x, weights.up)
    return torch.from_numpy((activate(early, "silu", "ieee") + rest) * up).bfloat16()


def half_width_store(x, weights):
    """A half-width store that steps by the full width repeats its first columns."""
    out = honest(x, weights)
    width = out[:, TILE : TILE + 16].shape[1]
    out[:, TILE : TILE + width] = out[:, :width]
    return out


MUTANTS: dict[str, Kernel] = {
    "gate and up swapped": swapped,
    "dropped k tail": dropped_tail,
    "truncating store": truncating_store,
    "split-k": partial(honest, split_k=2),
    "24 fraction bits": partial(honest, step=Step(16, 24, 23, 7, -126)),
    "26 fraction bits": partial(honest, step=Step(16, 26, 23, 7, -126)),
    "8 products a step": partial(honest, step=Step(8, 25, 23, 7, -126)),
    "fp32 fma chain": fp32_chain,
    "column off by a tile": column_off_by_a_tile,
    "missing mask": missing_mask,
    "stale output": stale_output,
    "flush to zero": flush_to_zero,
    "activation before the last k block": activation_before_the_last_block,
    "half-width store, full-width tiler": half_width_store,
}


def normal(m: int = 40, n: int = 100, k: int = 200) -> Inputs:
    return make_inputs(Problem(m, n, k), "normal", 5)


def in_bound(kernel: Kernel) -> bool:
    """Every output is within the error that its rounding points allow."""
    inputs = normal()
    wanted = exact(inputs.x, inputs.weights, out_dtype=torch.bfloat16)
    bound = error_bound(inputs.x, inputs.weights)
    return bool(within_bound(kernel(inputs.x, inputs.weights), wanted.value, bound).all())


def near_twin(kernel: Kernel) -> bool:
    """All but a few words are the low-precision twin's."""
    inputs = normal()
    wanted = twin(inputs.x, inputs.weights, rounds=())
    return float((kernel(inputs.x, inputs.weights) != wanted).float().mean()) < 0.01


def conforms(kernel: Kernel) -> bool:
    """M0: the bits of the declared arithmetic, over enough outputs and a long k."""
    inputs = normal(64, 512, 2048)
    return bits_differ(kernel(inputs.x, inputs.weights), execute(Arithmetic(), inputs.x, inputs.weights)) == 0


def wide_conforms(kernel: Kernel) -> bool:
    """M0 on subnormal operands and outputs."""
    inputs = normal(16, 100, 64)
    x = (inputs.x.float() * 2.0**-126).bfloat16()
    weights = Weights(
        (inputs.weights.gate.float() * 2.0**6).bfloat16(), (inputs.weights.up.float() * 2.0**124).bfloat16()
    )
    return bits_differ(kernel(x, weights), execute(Arithmetic(), x, weights)) == 0


def column_code(kernel: Kernel) -> bool:
    """An output that encodes its column comes out there."""
    n = 130
    x = torch.zeros(5, 64).bfloat16()
    x[:, 0] = 1
    gate, up = torch.zeros(2, n, 64).bfloat16()
    gate[:, 0], up[:, 0] = 64, torch.arange(1, n + 1).bfloat16()
    return torch.equal(kernel(x, Weights(gate, up)), (64 * torch.arange(1, n + 1)).bfloat16().expand(5, n))


def all_ones(kernel: Kernel) -> bool:
    """With all ones gate and up are k: a dropped tail shows at any k."""
    return all(
        torch.equal(
            kernel(torch.ones(2, k).bfloat16(), Weights(*torch.ones(2, 3, k).bfloat16())),
            torch.full((2, 3), float(k * k)).bfloat16(),
        )
        for k in (65, 100, 129)
    )


PROPERTIES = {
    "bound": in_bound,
    "twin": near_twin,
    "M0": conforms,
    "M0, subnormal": wide_conforms,
    "column code": column_code,
    "all ones": all_ones,
}


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_no_property_rejects_the_honest_kernel(name):
    assert PROPERTIES[name](honest)


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_some_property_rejects_every_mutant(name):
    assert not all(check(MUTANTS[name]) for check in PROPERTIES.values())


def test_table():
    """Prints the table; every property rejects something."""
    killed = {name: [not check(mutant) for check in PROPERTIES.values()] for name, mutant in MUTANTS.items()}
    print("\n| mutant |", " | ".join(PROPERTIES), "|\n|", "--- | " * (len(PROPERTIES) + 1))
    for name, row in killed.items():
        print(f"| {name} |", " | ".join("rejects" if k else "" for k in row), "|")
    assert all(any(column) for column in zip(*killed.values(), strict=True))
