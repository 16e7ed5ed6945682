"""The mismatch measures: by their definitions, by planted mistakes, and by an experiment with known shares."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Problem, numerics
from fused_swiglu.inputs import make_inputs
from fused_swiglu.numerics import bits_differ, mismatch, ordered, ulp_distance, ulp_histogram, ulps
from fused_swiglu.reference import Exact, exact, round_to, twin

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = math.inf, math.nan


def bf16(*values):
    return torch.tensor(values, dtype=BF16)


def exactly(*values, dtype=BF16):
    """An Exact of one row with these unrounded values."""
    value = torch.tensor([values], dtype=torch.float64)
    return Exact(value, round_to(value, dtype), 0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_ordered_counts_every_float_once(dtype):
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).short()
    floats = words.view(dtype)
    floats = floats[~floats.isnan()]
    rising = floats.double().sort()
    keys = ordered(floats)[rising.indices]
    zeros = int((rising.values < 0).sum())
    assert keys[zeros].item() == keys[zeros + 1].item() == 0
    steps = keys.diff()
    assert steps[zeros].item() == 0
    steps[zeros] = 1
    assert (steps == 1).all()


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False), st.integers(0, 5))
def test_ordered_fp32_neighbours(value, steps):
    a = torch.tensor(value, dtype=FP32)
    b = a
    for _ in range(steps):
        b = torch.nextafter(b, torch.tensor(INF))
    expected = steps if b < INF else ordered(b) - ordered(a)
    assert ulp_distance(a, b) == ulp_distance(b, a) == expected


def test_ulp_distance_special_values():
    farthest = ulp_distance(bf16(-INF), bf16(INF)).item()
    assert farthest == 2 * 0x7F80
    cases = [
        (0.0, -0.0, 0),
        (NAN, NAN, 0),
        (NAN, 1.0, farthest),
        (-INF, NAN, farthest),
        (INF, INF, 0),
        (INF, torch.finfo(BF16).max, 1),
        (2.0**-133, -(2.0**-133), 2),
        (1.0, -1.0, 2 * 0x3F80),
        (1.0, 1 + 2**-7, 1),
        (1.0, 1 - 2**-8, 1),
    ]
    for a, b, distance in cases:
        assert ulp_distance(bf16(a), bf16(b)).item() == ulp_distance(bf16(b), bf16(a)).item() == distance, (a, b)


def test_bits_differ():
    a, b = bf16(0.0, NAN, 1.0, INF, 1.0, NAN), bf16(-0.0, NAN, 1.0, -INF, 1.0078125, 1.0)
    b.view(torch.int16)[1] = 0x7FC1 if a.view(torch.int16)[1] != 0x7FC1 else 0x7FFF  # another NaN
    assert bits_differ(a, b) == 4
    assert bits_differ(a, a) == 0
    assert bits_differ(a[:, None].expand(6, 3), b[:, None].expand(6, 3)) == 12


def test_m1_counts_ulps():
    result = exactly(1.0, -2.0, 3.0, 4.0)
    assert mismatch(result.rounded, result).m1_max == 0
    found = mismatch(bf16(1.0, -2.0 - 2**-6, 3 + 3 * 2**-6, 4.0)[None], result)
    assert (found.m1_gt0, found.m1_gt1, found.m1_max, found.outputs) == (0.5, 0.25, 3, 4)
    assert (found.plain_gt0, found.plain_gt1, found.plain_max) == (0.5, 0.25, 3)


def test_m1_is_against_the_rounded_exact_result_m2_against_the_unrounded():
    result = exactly(1 + 2**-8 + 2**-20)  # rounds up to 1 + 2^-7
    found = mismatch(bf16(1.0)[None], result, ((0.0, 2.0**-8), (0.0, 2.0**-8 + 2.0**-19)))
    assert found.m1_max == 1
    assert found.m2 == ((0.0, 2.0**-8, 1.0), (0.0, 2.0**-8 + 2.0**-19, 0.0))
    edge = 1 - 1 / (1 + 2**-8 + 2**-20)  # the output's relative error
    found = mismatch(bf16(1.0)[None], result, ((edge - 1e-6, 0.0), (edge + 1e-6, 0.0)))
    assert [share for _, _, share in found.m2] == [1, 0]


def test_m1_has_a_least_ulp_near_zero():
    """RMS just over 256, so the least ulp is that of 1: 2^-7. Plain distance has none."""
    values = [256.0] * 1022 + [512.0, 0.0]
    result = exactly(*values)
    out = result.rounded.clone()
    for y, distance in ((2.0**-7, 1), (2.0**-9, 0.25), (3 * 2.0**-7, 3), (-(2.0**-7), 1), (1 + 2.0**-7, 129)):
        out[0, -1] = y
        assert ulps(out, result)[0, -1] == distance
        assert mismatch(out, result).m1_max == distance
        assert mismatch(out, result).plain_max == ulp_distance(bf16(y), bf16(0.0)).item() > 15000
    out[0, -1], out[0, 0] = 0.0, 258.0  # where ulps are larger than the least, the distance is the plain one
    assert ulps(out, result)[0, 0] == 1
    small = exactly(*[v * 2.0**-100 for v in values])  # and it has no scale of its own
    out = small.rounded.clone()
    out[0, -1] = 2.0**-109
    assert mismatch(out, small).m1_max == 0.25


def test_the_least_ulp_of_zeros_and_of_overflowed_outputs():
    assert mismatch(bf16(2.0**-133, 0.0)[None], exactly(0.0, 0.0)).m1_max == 1
    result = exactly(1e300, 256.0, 0.0)
    assert ulps(bf16(INF, 256.0, 2.0**-9)[None], result).tolist()[0][:2] == [0, 0]
    assert mismatch(bf16(INF, 256.0, 0.0)[None], result).m1_max == 0


def test_infinities_and_nan():
    result = exactly(NAN, NAN, INF, -INF, 1e39, 1.0, 1.0)
    out = bf16(NAN, 0.0, INF, INF, INF, NAN, INF)[None]
    found = mismatch(out, result, ((0.1, 0.1),))
    far = ulp_distance(bf16(-INF), bf16(INF)).item()
    assert ulps(out, result)[0].tolist() == [0, far, 0, far, 0, far, 0x7F80 - 0x3F80]
    assert found.m1_gt0 == found.m1_gt1 == found.plain_gt0 == pytest.approx(4 / 7)
    assert found.m1_max == found.plain_max == far
    assert found.m2 == ((0.1, 0.1, pytest.approx(4 / 7)),)
    assert mismatch(bf16(3e38)[None], exactly(INF), ((0.1, 0.1),)).m2[0][2] == 1  # not |y - inf| > inf, which is never


def test_no_outputs():
    found = mismatch(torch.empty(0, 5, dtype=BF16), Exact(torch.empty(0, 5).double(), torch.empty(0, 5, dtype=BF16), 0))
    assert found.outputs == found.m1_gt0 == found.m1_max == found.plain_max == found.m2[0][2] == 0


def test_chunks_change_nothing(monkeypatch):
    inputs = make_inputs(Problem(50, 30, 64), "outliers", 0)
    result = exact(inputs.x, inputs.weights, out_dtype=BF16)
    padded = torch.full((50, 37), NAN, dtype=BF16)[:, :30]
    padded.copy_(twin(inputs.x, inputs.weights))
    whole = mismatch(padded, result)
    assert whole.m1_gt0 > 0.2
    for chunk in (1, 70, 1000):
        monkeypatch.setattr(numerics, "_CHUNK", chunk)
        assert mismatch(padded, result) == whole


def test_tensors_that_do_not_match():
    result = exactly(1.0, 2.0)
    with pytest.raises(ArgumentError, match="shape"):
        mismatch(bf16(1.0)[None], result)
    with pytest.raises(ArgumentError, match="dtype"):
        mismatch(torch.zeros(1, 2), result)
    with pytest.raises(ArgumentError, match="dtype"):
        ulp_distance(bf16(1.0), torch.zeros(1))
    with pytest.raises(ArgumentError, match="float64"):
        ordered(torch.zeros(1).double())


# --- what is known about these shares (m=256, k=896, n=512, x ~ N(0, 1), weights ~ N(0, 0.02^2))


@pytest.fixture(scope="module")
def experiment():
    inputs = make_inputs(Problem(256, 512, 896), "normal", 0)
    return inputs, exact(inputs.x, inputs.weights, out_dtype=BF16)


# Ranges hold four standard deviations of what other seeds give, around shares found independently of this code.
@pytest.mark.parametrize(
    ("rounds", "gt0", "gt1", "tight"),
    [
        (("gate", "up", "act"), (0.39, 0.44), (0.012, 0.017), (0.04, 0.06)),  # eager PyTorch
        (("gate", "up"), (0.32, 0.365), (0.0025, 0.0045), (0.019, 0.03)),
        ((), (0, 0.0015), (0, 0.0001), (0, 0)),  # one rounding: a fused kernel
    ],
)
def test_shares_by_rounding_points(experiment, rounds, gt0, gt1, tight):
    inputs, result = experiment
    found = mismatch(twin(inputs.x, inputs.weights, rounds=rounds), result)
    assert gt0[0] <= found.m1_gt0 <= gt0[1]
    assert gt1[0] <= found.m1_gt1 <= found.plain_gt1
    assert found.m1_gt1 <= gt1[1]
    assert found.m1_max <= 4
    loose, close = found.m2
    assert loose[2] <= 1e-5
    assert tight[0] <= close[2] <= tight[1]
    assert found.outputs == 256 * 512
    assert result.refined <= 2


@pytest.mark.parametrize(
    ("name", "plant", "least"),
    [
        ("swapped gate and up", lambda x, w: twin(x, type(w)(w.up, w.gate), rounds=()), 0.9),
        ("dropped tail of 16", lambda x, w: twin(x[:, :-16], type(w)(w.gate[:, :-16], w.up[:, :-16]), rounds=()), 0.9),
        (
            "rounded toward zero",
            lambda x, w: (twin(x, w, rounds=(), out_dtype=FP32).view(torch.int32) >> 16).short(),
            0.4,
        ),
        ("a relu", lambda x, w: twin(x, w, "relu", rounds=()), 0.9),
        ("shifted columns", lambda x, w: twin(x, w, rounds=()).roll(1, 1), 0.9),
        ("a zero", lambda x, w: twin(x, w, rounds=()) * 0, 0.9),
    ],
)
def test_a_planted_mistake_shows(experiment, name, plant, least):
    inputs, result = experiment
    out = plant(inputs.x, inputs.weights)
    found = mismatch(out if out.dtype == BF16 else out.view(BF16), result)
    assert found.m1_gt0 > least, name
    assert bits_differ(out if out.dtype == BF16 else out.view(BF16), result.rounded) > least * found.outputs
    if name != "rounded toward zero":
        assert found.m1_gt1 > least / 2
        assert min(share for _, _, share in found.m2) > least / 2


def test_one_wrong_word_shows(experiment):
    _, result = experiment
    out = result.rounded.clone()
    out.view(torch.int16)[200, 300] += 2
    found = mismatch(out, result)
    assert found.m1_gt0 == found.plain_gt0 == found.plain_gt1 == 1 / (256 * 512)
    assert found.plain_max == 2
    assert bits_differ(out, result.rounded) == 1


def test_histogram_counts_each_distance():
    rounded = torch.ones(3, 4).bfloat16()
    exact = Exact(rounded.double(), rounded, 0)
    out = rounded.clone()
    words = out.view(torch.int16)
    words[0, 0] += 1
    words[1, 1] -= 2
    words[2, 2] += 100
    assert ulp_histogram(out, exact, most=3) == [9, 1, 1, 1]
    assert ulp_histogram(out[:0], Exact(rounded.double()[:0], rounded[:0], 0)) == [0] * 9
    with pytest.raises(ArgumentError, match="most"):
        ulp_histogram(out, exact, most=0)
