"""The strategies draw what they promise; the assertions fail when they should, and say where."""

import math

import pytest
import torch
from hypothesis import given, settings

from fused_swiglu import UNDECLARED, ArgumentError, Arithmetic, Problem
from fused_swiglu.inputs import FAMILIES, make_inputs, make_out
from fused_swiglu.reference import Exact
from fused_swiglu.sm90 import execute
from fused_swiglu.testing import (
    apply_edits,
    assert_batch_invariant,
    assert_bits_equal,
    assert_holds,
    assert_padding_poisoned,
    assert_within_ulps,
    cases,
    edits,
    families,
    implied_by,
    lengths,
    problems,
    seeds,
    sizes,
    strides,
)


def drawn(strategy, count=600):
    """That many examples, the same in every run."""
    found = []

    @settings(max_examples=count, database=None, derandomize=True, deadline=None)
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


def test_sizes_hit_the_boundaries():
    found = drawn(sizes(129))
    assert {1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129} <= set(found)
    assert 1 <= min(found) <= max(found) == 129
    assert (
        set(found)
        - {1, 2, 3, 5, 7, 11, 13, 17, 31, 61, 67, 127}
        - {t + s for t in (16, 32, 64, 128) for s in (-1, 0, 1)}
    )


def test_lengths_leave_every_kind_of_tail():
    found = drawn(lengths(193))
    for step, tails in ((8, range(8)), (16, range(16)), (64, (0, 1, 7, 8, 15, 16, 32, 33, 63))):
        assert set(tails) <= {k % step for k in found}
    assert {1, 8, 16, 64, 65, 127, 128, 192, 193} <= set(found)
    assert max(found) <= 193


def test_small_bounds_are_kept():
    assert set(drawn(sizes(3), 50)) == {1, 2, 3}
    assert set(drawn(sizes(1), 10)) == {1}
    assert set(drawn(sizes(2, 0), 50)) == {0, 1, 2}
    assert set(drawn(lengths(200, 199), 50)) == {199, 200}
    with pytest.raises(ArgumentError, match="largest"):
        sizes(0)


def test_strides_are_aligned_and_not():
    for row in (1, 7, 8, 64, 65):
        found = set(drawn(strides(row), 100))
        assert min(found) == row
        assert any(s % 2 for s in found if s > row)
        assert any(s % 8 == 0 for s in found if s > row)


def test_problems_cover_their_choices():
    found = drawn(problems(bias=True, activations=("silu", "relu")))
    assert {p.dtype for p in found} == {"bf16", "fp16"}
    assert {p.activation for p in found} == {"silu", "relu"}
    assert {p.layout for p in found} == {"stacked", "separate"}
    assert {p.bias for p in found} == {True, False}
    assert {p.alignment for p in found} == {16, 8, 4, 2}
    assert {p.row_alignment for p in found} == {16, 8, 4, 2}
    for stride, row in (("x_stride", "k"), ("gate_stride", "k"), ("up_stride", "k"), ("out_stride", "n")):
        kinds = {(getattr(p, stride) > getattr(p, row), getattr(p, stride) % 8 == 0) for p in found}
        assert kinds == {(a, b) for a in (True, False) for b in (True, False)}
    assert any(p.gate_stride != p.up_stride for p in found)
    assert all(p.gate_stride == p.up_stride for p in found if p.layout == "stacked")
    assert any(p.m > p.n for p in found)
    assert any(p.k % 16 and p.k > 64 for p in found)
    assert any(p.n % 8 and p.n > 64 and p.alignment == 16 for p in found)
    assert all(1 <= p.m <= 129 and 1 <= p.n <= 129 and 1 <= p.k <= 193 for p in found)


def test_problems_keep_their_bounds():
    found = drawn(
        problems(
            max_m=4, max_n=5, max_k=6, min_m=0, dtypes=("fp16",), layouts=("separate",), strided=False, alignments=(16,)
        ),
        200,
    )
    assert {p.m for p in found} == {0, 1, 2, 3, 4}
    assert max(p.n for p in found) == 5
    assert max(p.k for p in found) == 6
    assert {(p.dtype, p.layout, p.alignment, p.bias) for p in found} == {("fp16", "separate", 16, False)}
    assert all(p == Problem(p.m, p.n, p.k, dtype="fp16", layout="separate") for p in found)


def test_families_and_seeds():
    assert set(drawn(families(), 100)) == set(FAMILIES)
    assert len(set(drawn(seeds(), 50))) > 20


def bf16(*values):
    return torch.tensor([values, values], dtype=torch.bfloat16)


def test_bits_equal_reports_how_many_where_and_how_far():
    a, b = bf16(1.0, 2.0, math.nan), bf16(1.0, 2.0, math.nan)
    assert_bits_equal(a, b)
    b[0, 1], b[1, 0] = 2.015625, 1.5
    with pytest.raises(AssertionError) as failure:
        assert_bits_equal(a, b)
    assert str(failure.value).splitlines() == [
        "2 of 6 outputs (33.333%) differ",
        "in 2 rows (0 to 1) and 2 columns (0 to 1), first (0, 1), (1, 0)",
        "first at (0, 1): 2 (0x4000), expected 2.015625 (0x4001), 1 ulps",
        "worst at (1, 0): 1 (0x3f80), expected 1.5 (0x3fc0), 64 ulps",
    ]


@pytest.mark.parametrize(
    ("a", "b", "words"), [(0.0, -0.0, "0 (0x0000), expected -0 (0x8000)"), (math.nan, 1.0, "nan (0x")]
)
def test_bits_equal_sees_signed_zeros_and_nan(a, b, words):
    with pytest.raises(AssertionError, match="2 of 2 outputs") as failure:
        assert_bits_equal(bf16(a), bf16(b))
    assert words in str(failure.value)


def test_bits_equal_refuses_other_shapes_and_dtypes():
    with pytest.raises(ArgumentError, match="shape"):
        assert_bits_equal(bf16(1.0), bf16(1.0, 1.0))
    with pytest.raises(ArgumentError, match="dtype"):
        assert_bits_equal(bf16(1.0), bf16(1.0).half())


def test_within_ulps():
    rounded = bf16(1.0, 1.0, 1.0, 1.0)
    result = Exact(rounded.double(), rounded, 0)
    out = rounded.clone()
    assert_within_ulps(out, result, 0)
    out[1, 2] = 1.0234375
    assert_within_ulps(out, result, 3)
    assert_within_ulps(out, result, 2, max_share=0.125)
    for max_ulps, share in ((2, 0.0), (2, 0.124), (0, 0.1)):
        with pytest.raises(AssertionError) as failure:
            assert_within_ulps(out, result, max_ulps, share)
        lines = str(failure.value).splitlines()
        assert lines[0].startswith(f"1 of 8 outputs (12.500%) are over {max_ulps} ulps off")
        assert lines[1] == "in 1 rows (1 to 1) and 1 columns (2 to 2), first (1, 2)"
        assert lines[2] == "first at (1, 2): 1.0234375 (0x3f83), expected 1 (0x3f80), 3 ulps"
    out[0, 0] = math.nan
    with pytest.raises(AssertionError, match=r"worst at \(0, 0\): nan"):
        assert_within_ulps(out, result, 1000)


@pytest.mark.parametrize("m", [0, 1, 3])
def test_padding(m):
    out = make_out(Problem(m, 5, 8, out_stride=9))
    out.fill_(1.0)
    assert_padding_poisoned(out)
    assert_padding_poisoned(make_out(Problem(m, 5, 8)))
    if m:
        out.as_strided((m, 9), (9, 1))[m - 1, 6:8] = 0.0
        with pytest.raises(AssertionError, match=f"2 elements of padding written, first 2 past the end of row {m - 1}"):
            assert_padding_poisoned(out)


def test_no_more_than_a_few_coordinates_are_named():
    a = torch.zeros(4, 5, dtype=torch.bfloat16)
    with pytest.raises(AssertionError) as failure:
        assert_bits_equal(a, a + 1)
    named = str(failure.value).splitlines()[1]
    assert named == "in 4 rows (0 to 3) and 5 columns (0 to 4), first (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), ..."


def test_batch_invariance():
    x = torch.arange(1.0, 101.0)[:, None].expand(100, 3).bfloat16()
    assert_batch_invariant(lambda rows: rows * 2, x)

    def narrow(rows):
        """A kernel for few rows that gets the last column wrong."""
        out = rows * 2
        out[:, 2] += 64 * (len(rows) == 7)
        return out

    with pytest.raises(AssertionError) as failure:
        assert_batch_invariant(narrow, x)
    lines = str(failure.value).splitlines()
    assert lines[:2] == [
        "3 of 9 outputs (33.333%) of rows 0, 50, 99 change where only 7 of 100 rows are computed",
        "in 3 rows (0 to 99) and 1 columns (2 to 2), first (0, 2), (50, 2), (99, 2)",
    ]
    assert lines[2].startswith("first at (0, 2): 66 (0x4284), expected 2 (0x4000)")
    assert_batch_invariant(narrow, x, sizes=(1, 64))
    with pytest.raises(ArgumentError, match=r"^x: has 1 rows"):
        assert_batch_invariant(narrow, x[:1])


def test_edits_are_inside_and_reach_what_they_may():
    problem = Problem(5, 6, 7)
    found = [one for many in drawn(edits(problem), 200) for one in many]
    sizes_of = {"x": 5, "gate": 6, "up": 6}
    assert {operand for operand, *_ in found} == set(sizes_of)
    assert {value for *_, value in found} == {"nan", "inf", "-inf", "huge"}
    assert all(0 <= row < sizes_of[operand] and 0 <= column < 7 for operand, row, column, _ in found)
    assert {column for _, _, column, _ in found} == set(range(7))
    inputs = make_inputs(problem, "normal", 1)
    reached, spoilt = apply_edits(inputs, [("x", 2, 6, "nan"), ("up", 3, 0, "huge")])
    assert bool(inputs.x[2, 6].isnan())
    assert inputs.weights.up[3, 0] == torch.finfo(torch.bfloat16).max
    assert {tuple(place) for place in reached.nonzero().tolist()} == {(2, j) for j in range(6)} | {
        (i, 3) for i in range(5)
    }
    assert {tuple(place) for place in spoilt.nonzero().tolist()} == {(2, j) for j in range(6)}


def test_what_a_declaration_implies():
    opened, chain = implied_by(Arithmetic(UNDECLARED, "ieee")), implied_by(Arithmetic())
    assert {"small integers", "sparse edits", "near exact"} < set(opened) < set(chain)
    assert "order probes" in chain
    assert "order probes" not in implied_by(Arithmetic(split_k=2))
    assert "as predicted" in implied_by(Arithmetic(), "cuda")
    with pytest.raises(ArgumentError, match=r"^relation: undeclared:ieee:out does not imply 'order probes'"):
        drawn(cases("order probes", Arithmetic(UNDECLARED, "ieee")), 1)


@pytest.mark.parametrize("relation", implied_by(Arithmetic()))
def test_a_function_that_does_what_it_declares_obeys_all_that_implies(relation):
    for case in drawn(cases(relation, Arithmetic(), max_m=9, max_n=20, max_k=70), 5):
        assert_holds(case, lambda out, x, weights: out.copy_(execute(Arithmetic(), x, weights)))


def test_a_function_that_does_not_is_told_so():
    case = drawn(cases("order probes", Arithmetic(), max_m=9, max_n=70), 20)[-1]
    with pytest.raises(AssertionError, match="contradict 'order probes', which sm90:ieee:out implies"):
        assert_holds(case, lambda out, x, weights: out.fill_(1.0))

    def past_the_end(out, x, weights):
        out.copy_(execute(Arithmetic(), x, weights))
        out[-1:].as_strided((1, out.shape[1] + 1), out.stride())[0, -1] = 0

    with pytest.raises(AssertionError, match="1 elements were written outside"):
        assert_holds(case, past_the_end)
