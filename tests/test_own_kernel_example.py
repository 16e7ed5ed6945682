"""A worked example: a Triton kernel of one's own, tested with `fused_swiglu.testing`; planted faults are found by its
relations and explained by the attribution ladder. It runs in Triton's interpreter, without a GPU.

The kernel knows nothing of this library: it is launched by `swiglu(out, x, weights)`. To test your own, put its launch
there, say in `DECLARED` what its author promises, and keep the tests named `test_every_...`.
"""

# What a jitted function iterates over, only Triton's compiler knows.
# pyright: reportGeneralTypeIssues=false

from functools import partial

import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from fused_swiglu import UNDECLARED, Arithmetic, Weights
from fused_swiglu.inputs import make_inputs, make_out
from fused_swiglu.ladder import ladder
from fused_swiglu.problem import Problem
from fused_swiglu.reference import exact
from fused_swiglu.testing import (
    assert_batch_invariant,
    assert_holds,
    assert_padding_poisoned,
    assert_within_ulps,
    cases,
    families,
    implied_by,
    problems,
    seeds,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, of infinities and NaN

# The interpreter adds as NumPy does, so the order of sums is open; expf is the C library's. On an SM90 GPU the same
# kernel could declare accumulation `sm90`, and bits would follow.
DECLARED = Arithmetic(UNDECLARED, UNDECLARED)
SMALL = {"max_m": 33, "max_n": 33, "max_k": 70, "dtypes": ("bf16",), "alignments": (16,)}
QUICK = settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
FIRST = settings(QUICK, phases=[Phase.generate])  # for those that must fail: the first failure will do

# The kernel -----------------------------------------------------------------------------------------------------------

BLOCK, DEPTH = 16, 32


@InterpretedFunction  # what @triton.jit makes of it under TRITON_INTERPRET=1
def _swiglu(
    x, gate, up, out, M, N, K: tl.constexpr, x_stride, gate_stride, up_stride, out_stride,
    B: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, ROUND_GATE: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    g = tl.full((B, B), 0.0, tl.float32)
    u = tl.full((B, B), 0.0, tl.float32)
    for step in tl.static_range(STEPS):
        k = step * D + tl.arange(0, D)
        a = tl.load(x + rows[:, None] * x_stride + k, mask=(rows[:, None] < M) & (k < K), other=0.0)
        in_weights = (columns[:, None] < N) & (k < K)
        wg = tl.load(gate + columns[:, None] * gate_stride + k, mask=in_weights, other=0.0)
        wu = tl.load(up + columns[:, None] * up_stride + k, mask=in_weights, other=0.0)
        g += tl.dot(a.to(tl.float32), wg.to(tl.float32).T)
        u += tl.dot(a.to(tl.float32), wu.to(tl.float32).T)
    if ROUND_GATE:  # to bf16, to nearest even, by its bits
        bits = g.to(tl.int32, bitcast=True)
        g = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    value = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + rows[:, None] * out_stride + columns, value, mask=(rows[:, None] < M) & (columns < N))


def swiglu(out: torch.Tensor, x: torch.Tensor, weights: Weights, *, drop_tail=False, round_gate=False) -> None:
    """Launches the kernel. The last two plant a fault: only whole blocks of k are added; gate is rounded to bf16."""
    (m, k), n = x.shape, out.shape[1]
    steps = k // DEPTH if drop_tail else -(-k // DEPTH)
    x, gate, up = x.float(), weights.gate.float(), weights.up.float()  # the interpreter takes bf16 for integers,
    wide = torch.empty(m, n)  # and truncates when it stores it
    _swiglu[(-(-m // BLOCK), -(-n // BLOCK))](
        x, gate, up, wide, m, n, k, x.stride(0), gate.stride(0), up.stride(0), wide.stride(0),
        B=BLOCK, D=DEPTH, STEPS=steps, ROUND_GATE=round_gate,
    )  # fmt: skip
    out.copy_(wide)


# Its tests ------------------------------------------------------------------------------------------------------------


def relation_holds(kernel, relation, how=QUICK):
    @how
    @given(cases(relation, DECLARED, **SMALL))
    def holds(case):
        assert_holds(case, kernel)

    holds()


def distances_are_small(kernel, how=QUICK):
    """One rounding, after fp32: next to no output is more than an ulp off, and few are off at all."""

    @how
    @given(problems(**{**SMALL, "min_m": 20}), st.just("normal"), seeds())
    def holds(problem, family, seed):
        inputs, out = make_inputs(problem, family, seed), make_out(problem)
        kernel(out, inputs.x, inputs.weights)
        assert_padding_poisoned(out)
        assert_within_ulps(out, exact(inputs.x, inputs.weights, out_dtype=out.dtype), 0, max_share=0.05)

    holds()


@pytest.mark.parametrize("relation", implied_by(DECLARED))
def test_every_relation_that_is_declared_holds(relation):
    relation_holds(swiglu, relation)


def test_every_output_is_near_the_exact_one():
    distances_are_small(swiglu)


@QUICK
@given(problems(**SMALL), families(), seeds())
def test_every_family_of_inputs_stays_inside_its_rows(problem, family, seed):
    inputs, out = make_inputs(problem, family, seed), make_out(problem)
    swiglu(out, inputs.x, inputs.weights)
    assert_padding_poisoned(out)
    assert not bool(out.isnan().any())


def test_every_row_is_the_same_in_any_batch():
    inputs = make_inputs(Problem(40, 24, 64), "normal", 0)

    def kernel(x):
        out = torch.empty(len(x), 24, dtype=x.dtype)
        swiglu(out, x, inputs.weights)
        return out

    assert_batch_invariant(kernel, inputs.x)


# What they say of a faulty one ----------------------------------------------------------------------------------------


def test_a_dropped_tail_of_k_is_found():
    with pytest.raises(AssertionError, match="contradict 'all ones', which undeclared:undeclared:out implies"):
        relation_holds(partial(swiglu, drop_tail=True), "all ones", FIRST)


def test_a_rounding_too_many_is_found_and_explained():
    """No relation of logic sees it, and every output is near. A third of them is off, and the ladder says why."""
    faulty = partial(swiglu, round_gate=True)
    relation_holds(faulty, "small integers")
    with pytest.raises(AssertionError, match=r"are over 0 ulps off \(5.000% may\)"):
        distances_are_small(faulty, FIRST)
    problem = Problem(48, 48, 64)
    inputs, out = make_inputs(problem, "normal", 0), make_out(problem)
    faulty(out, inputs.x, inputs.weights)
    found = ladder(out, inputs.x, inputs.weights, DECLARED)
    assert found.rest > 0.1
    assert found.otherwise is not None
    other, rest = found.otherwise
    assert other.rounds == ("gate",)
    assert rest < 0.002
    assert "it rounds elsewhere than declared" in str(found)
