"""The exact reference against brute force in fractions and mpmath; activations; rounding; the low-precision twin."""

import math
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Problem, Weights, reference
from fused_swiglu.activations import get_activation
from fused_swiglu.inputs import make_inputs
from fused_swiglu.numerics import ulp_distance
from fused_swiglu.problem import ACTIVATIONS
from fused_swiglu.reference import exact, round_to, twin
from fused_swiglu.testing import assert_bits_equal, problems, seeds

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = {BF16: (8, -133, 128), FP16: (11, -24, 16), FP32: (24, -149, 128)}  # digits, least exponent, overflow
INF, NAN = math.inf, math.nan


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def nearest(value, dtype):
    """The float of dtype nearest to a Fraction, ties to even: by definition, without a tensor."""
    digits, least, top = FORMATS[dtype]
    size, exponent = abs(value), least + digits
    while size >= Fraction(2) ** exponent:
        exponent += 1
    quantum = Fraction(2) ** (exponent - digits)
    rounded = round(size / quantum) * quantum  # Fraction rounds half to even
    result = INF if rounded >= Fraction(2) ** top else float(rounded)
    return -result if value < 0 else result


def fraction(v):
    """An mpf as a Fraction."""
    sign, man, exp, _ = v._mpf_
    return (-1) ** sign * Fraction(int(man)) * Fraction(2) ** exp


def brute(x, weights, activation, dtype, computes="swiglu"):
    """The correctly rounded result, element by element, in fractions and 1000-bit mpmath."""

    def sums(w, bias):
        bias = torch.zeros(len(w)) if bias is None else bias
        return [
            [
                sum((Fraction(a) * Fraction(b) for a, b in zip(r, c, strict=True)), Fraction(d))
                for c, d in zip(w.tolist(), bias.tolist(), strict=True)
            ]
            for r in x.tolist()
        ]

    gate, up = sums(weights.gate, weights.bias_gate), sums(weights.up, weights.bias_up)
    if computes == "gate_up":
        rows = [g + u for g, u in zip(gate, up, strict=True)]
    else:
        act = get_activation(activation)
        with mpmath.workprec(1000):
            rows = [
                [fraction(act.mp(mpmath.mpf(g.numerator) / g.denominator)) * u for g, u in zip(gs, us, strict=True)]
                for gs, us in zip(gate, up, strict=True)
            ]
    return torch.tensor([[nearest(v, dtype) for v in row] for row in rows], dtype=torch.float64).to(dtype)


def one(gate, up, dtype=BF16):
    """Operands of a single output whose gate and up are the sums of these terms."""
    k = max(len(gate), len(up))
    w = torch.zeros(2, k, dtype=dtype)
    w[0, : len(gate)] = f64(*gate)
    w[1, : len(up)] = f64(*up)
    assert w[0].double().tolist()[: len(gate)] == list(gate)
    assert w[1].double().tolist()[: len(up)] == list(up)
    return torch.ones(1, k, dtype=dtype), Weights.from_stacked(w)


def settled(gate, up, activation="silu", dtype=BF16):
    result = exact(*one(gate, up), activation, out_dtype=dtype)
    return result.rounded.item(), result.refined


# --- activations


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_accurate_in_fp64_everywhere(name):
    act = get_activation(name)
    points = [
        s * v for s in (1, -1) for v in (0.0, 1e-300, 1e-9, 0.3, 1.278, 2.4, 8.0, 30.0, 89.0, 700.0, 745.0, 1e3, 1e30)
    ]
    points += torch.linspace(-750, 750, 1201, dtype=torch.float64).tolist()
    computed = act.torch(f64(*points)).tolist()
    with mpmath.workprec(200):
        for x, y in zip(points, computed, strict=True):
            true = act.mp(mpmath.mpf(x))
            assert abs(y - true) <= act.ulps * 2.0**-53 * abs(true) + mpmath.ldexp(1, -1060), x


def test_the_declared_accuracy_is_not_slack_beyond_use():
    x = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    with mpmath.workprec(200):
        for name, least in (("silu", 0.8), ("sigmoid", 0.8), ("gelu_tanh", 20)):
            act = get_activation(name)
            y = act.torch(x).tolist()
            pairs = [(v, act.mp(mpmath.mpf(t))) for t, v in zip(x.tolist(), y, strict=True) if t]
            assert max(abs(v / true - 1) for v, true in pairs if true) * 2**53 > least


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_follows_torch_on_special_values(name):
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }
    special = torch.tensor([NAN, -INF, INF, 0.0, -0.0])
    ours, torchs = get_activation(name).torch(special), functions[name](special)
    assert_bits_equal(ours, torchs)
    assert_bits_equal(ours, get_activation(name).torch(special.double()).float())


def test_silu_of_infinities_and_nan():
    assert str(get_activation("silu").torch(f64(-INF, INF, NAN)).tolist()) == "[nan, inf, nan]"


@pytest.mark.parametrize("name", ["silu", "sigmoid"])
def test_fp32_tails_neither_vanish_nor_overflow(name):
    """silu is normal in fp32 down to -91.8; forms through exp(-x) or exp(x) alone fail from -87.3 or -88.7 on."""
    x = torch.cat([torch.linspace(-91.5, -80, 400), torch.linspace(80, 200, 200)])
    if name == "sigmoid":
        x = x[x > -87]
    y = get_activation(name).torch(x)
    true = round_to(get_activation(name).torch(x.double()), FP32)
    assert ulp_distance(y, true).max() <= 4


def test_bf16_gate_of_minus_8_does_not_cancel():
    y = get_activation("sigmoid").torch(torch.tensor([-8.0], dtype=BF16))
    assert y.item() == pytest.approx(3.3535e-4, rel=0.02)
    assert (1 - torch.tensor([8.0], dtype=BF16).sigmoid()).item() == 0  # the form that fails


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "sigmoid"])
def test_derivative(name):
    act = get_activation(name)
    points = torch.linspace(-45, 45, 181, dtype=torch.float64)
    with mpmath.workprec(300):
        true = [mpmath.diff(act.mp, mpmath.mpf(x)) for x in points.tolist()]
        for x, d, t in zip(points.tolist(), act.derivative(points).tolist(), true, strict=True):
            assert abs(d - t) <= 1e-14 * abs(t) + 1e-16 * abs(x), x
    assert act.derivative(f64(-1e300, 1e300)).tolist() == [0, 0 if name == "sigmoid" else 1]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(ACTIVATIONS), st.floats(-6, 6), st.floats(0, 4))
def test_slope_is_steepest_at_an_end_or_a_declared_point(name, low, width):
    act = get_activation(name)
    inside = low + width * torch.linspace(0, 1, 101, dtype=torch.float64)
    low, high = inside[0].item(), inside[-1].item()
    candidates = f64(low, high, *(min(max(p, low), high) for p in act.steepest))
    assert act.derivative(inside).abs().max() <= act.derivative(candidates).abs().max() * (1 + 1e-12)


def test_steepest_points_are_needed():
    """Without them, an interval around one would be given too small a slope."""
    for name in ("silu", "gelu_tanh", "sigmoid"):
        act = get_activation(name)
        for point in act.steepest:
            d = act.derivative(f64(point - 0.5, point, point + 0.5)).abs()
            assert d[1] > d[0]
            assert d[1] > d[2]


def test_unknown_activation():
    with pytest.raises(ArgumentError, match="unknown 'swish'; choose from silu"):
        get_activation("swish")


# --- rounding


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_round_to_exhaustively_at_every_float_and_every_tie(dtype):
    words = torch.arange(0, {BF16: 0x7F80, FP16: 0x7C00}[dtype] + 1, dtype=torch.int16)
    floats = words.view(dtype)
    values = floats.double()
    values[-1] = 2.0 ** FORMATS[dtype][2]  # where the float after the largest would be
    for sign in (1, -1):
        assert_bits_equal(round_to(sign * floats.double(), dtype), sign * floats)
        ties = (values[:-1] + values[1:]) / 2
        even = torch.where(words[:-1] % 2 == 0, floats[:-1], floats[1:])
        assert_bits_equal(round_to(sign * ties, dtype), sign * even)
        below, above = torch.nextafter(ties, f64(0.0)), torch.nextafter(ties, f64(INF))
        assert_bits_equal(round_to(sign * below, dtype), sign * floats[:-1])
        assert_bits_equal(round_to(sign * above, dtype), sign * floats[1:])
        if dtype == BF16:  # the mistake that this catches: two roundings, through fp32
            twice = above.float().to(dtype)
            assert (twice != floats[1:]).sum() > 10_000


@settings(deadline=None, max_examples=200)
@given(
    st.floats(allow_nan=False, allow_infinity=False) | st.floats(2.0**-160, 2.0**-100), st.sampled_from(list(FORMATS))
)
def test_round_to_agrees_with_fractions(value, dtype):
    assert round_to(f64(value), dtype).item() == nearest(Fraction(value), dtype)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_round_to_fp32_is_the_hardwares(seed):
    words = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(seed))
    values = torch.where(words % 2 == 0, words.view(torch.float64), words.int().view(FP32).double() * (1 + 2.0**-24))
    assert_bits_equal(round_to(values, FP32), values.float())


def test_round_to_special_values():
    values = f64(NAN, INF, -INF, 0.0, -0.0, 5e-324, -5e-324, 1.7e308, -1.7e308)
    expected = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 0.0, -0.0, INF, -INF])
    for dtype in FORMATS:
        assert_bits_equal(round_to(values, dtype), expected.to(dtype))


def test_round_to_takes_fp64_and_known_formats_only():
    with pytest.raises(ArgumentError, match="give fp64"):
        round_to(torch.zeros(1), BF16)
    with pytest.raises(ArgumentError, match="float8"):
        round_to(f64(0.0), torch.float8_e4m3fn)


# --- exact


@settings(deadline=None, max_examples=40)
@given(
    problems(max_m=3, max_n=4, max_k=19, activations=ACTIVATIONS, bias=True),
    st.sampled_from(["normal", "outliers", "integers", "wide"]),
    seeds(),
    st.sampled_from(list(FORMATS)),
    st.sampled_from(["swiglu", "gate_up"]),
)
def test_exact_agrees_with_brute_force(problem, family, seed, dtype, computes):
    inputs = make_inputs(problem, family, seed)
    result = exact(inputs.x, inputs.weights, problem.activation, out_dtype=dtype, computes=computes)
    expected = brute(inputs.x, inputs.weights, problem.activation, dtype, computes)
    assert ulp_distance(result.rounded, expected).max() == 0
    assert ulp_distance(round_to(result.value, dtype), expected).max() <= 1


def test_brute_force_can_fail():
    """The comparison sees a swapped gate, a dropped tail and a second rounding."""
    inputs = make_inputs(Problem(3, 40, 19), "normal", 1)
    x, w = inputs.x, inputs.weights
    expected = brute(x, w, "silu", FP32)
    for wrong in (
        exact(x, Weights(w.up, w.gate), out_dtype=FP32).rounded,
        exact(x[:, :-1], Weights(w.gate[:, :-1], w.up[:, :-1]), out_dtype=FP32).rounded,
        exact(x, w, out_dtype=BF16).rounded.float(),
        twin(x, w, rounds=(), out_dtype=FP32),
    ):
        assert ulp_distance(wrong, expected).max() > 0


@settings(deadline=None, max_examples=25)
@given(problems(max_m=3, max_n=4, max_k=35, activations=ACTIVATIONS), st.sampled_from(["normal", "wide"]), seeds())
def test_error_bounds_hold_and_are_small(problem, family, seed):
    inputs = make_inputs(problem, family, seed)
    act = get_activation(problem.activation)
    x, gate, up = (reference._Rows(t, None) for t in (inputs.x, inputs.weights.gate, inputs.weights.up))
    gate, up = reference._Sums(x, gate), reference._Sums(x, up)
    gated = reference._Gated(act, gate, up)
    for i in range(problem.m):
        for j in range(problem.n):
            g, u = gate.exactly(i, j), up.exactly(i, j)
            assert abs(Fraction(gate.value[i, j].item()) - g) <= gate.bound[i, j].item()
            with mpmath.workprec(600):
                true = fraction(act.mp(mpmath.mpf(g.numerator) / g.denominator)) * u
            assert abs(Fraction(gated.value[i, j].item()) - true) <= gated.bound[i, j].item() + 2.0**-1000
    assert (gate.bound <= 1e-13 * torch.outer(x.norm, gate.w.norm)).all()


def sums(values, bound):
    """What _Gated takes of sums that err by up to `bound`."""
    return SimpleNamespace(value=values, bound=torch.full_like(values, bound))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ACTIVATIONS), st.floats(-5, 5), st.floats(1e-3, 2), st.floats(-2, 2), st.floats(0, 0.5))
def test_errors_of_the_sums_reach_no_further_than_the_bound(name, gate, gate_error, up, up_error):
    act = get_activation(name)
    block = reference._Gated(act, sums(f64(gate), gate_error), sums(f64(up), up_error))
    steps = torch.linspace(-1, 1, 41, dtype=torch.float64)
    reached = torch.outer(act.torch(gate + gate_error * steps), up + up_error * steps)
    assert (reached - block.value).abs().max() <= block.bound.item()


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "sigmoid"])
def test_slopes_inside_the_error_count(name):
    """Steeper inside than at both ends: there, the ends' slopes would not do."""
    act = get_activation(name)
    for point in act.steepest:
        block = reference._Gated(act, sums(f64(point), 0.2), sums(f64(1.0), 0.0))
        moved = (act.torch(f64(point + 0.2, point - 0.2)) - act.torch(f64(point))).abs().max()
        assert moved <= block.bound.item() <= 0.2 * 1.13
        assert block.bound.item() == pytest.approx(0.2 * act.derivative(f64(point)).abs().item())


def test_the_activations_own_error_counts():
    gate = torch.linspace(-12, -1, 500, dtype=torch.float64)
    act = get_activation("gelu_tanh")
    block = reference._Gated(act, sums(gate, 0.0), sums(torch.ones_like(gate), 0.0))
    with mpmath.workprec(200):
        errors = [abs(v - act.mp(mpmath.mpf(g))) for g, v in zip(gate.tolist(), block.value.tolist(), strict=True)]
    assert all(e <= b for e, b in zip(errors, block.bound.tolist(), strict=True))
    assert any(e > 3 * 2.0**-53 * abs(v) for e, v in zip(errors, block.value.tolist(), strict=True))


@pytest.mark.parametrize(("side", "expected"), [(-1, 258.0), (0, 260.0), (1, 260.0)])
def test_a_tie_missed_by_less_than_fp64_can_see(side, expected):
    """259 lies between the bf16 numbers 258 and 260, and ties to 260."""
    assert settled([1.0], [256.0, 3.0, side * 2.0**-70], "relu") == (expected, 1)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid"])
@pytest.mark.parametrize("tie", [257, 259])  # ties to 256, to 260
@pytest.mark.parametrize("side", [-1, 1])
def test_a_product_within_2_to_the_minus_120_of_a_tie(activation, tie, side):
    with mpmath.workprec(400):
        rest = tie / get_activation(activation).mp(mpmath.mpf(1)) * (1 + side * mpmath.ldexp(1, -120))
        terms = []
        while abs(rest) > mpmath.ldexp(1, -125):
            term = nearest(fraction(rest), BF16)
            terms.append(term)
            rest -= term
    assert settled([1.0], terms, activation) == (tie + side, 1)


@pytest.mark.parametrize("gate", [2.0**7, 2.0**20, 2.0**100])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid"])
def test_a_saturated_gate_stays_below_its_asymptote(gate, activation):
    """act(gate) is a hair less than gate (or 1), so the product is under the tie and rounds down, not to even."""
    limit = 1.0 if activation == "sigmoid" else gate
    assert settled([gate], [256.0, 3.0], activation) == (258 * limit, 1)
    assert settled([gate], [-256.0, -3.0], activation) == (-258 * limit, 1)
    assert settled([gate], [256.0, 3.0], "relu") == (260 * gate, 1)


def test_rational_values_tie_to_even():
    assert settled([0.0], [256.0, 3.0], "sigmoid") == (130.0, 1)  # 129.5 lies between 129 and 130
    assert settled([0.0], [256.0, 3.0], "silu") == (0.0, 0)
    assert settled([2.0**80, 2.0**-80, -(2.0**80), -(2.0**-80)], [256.0, 3.0], "sigmoid") == (130.0, 1)


def test_cancellation_beyond_fp64():
    value, refined = settled([1.0], [2.0**60, 2.0**-60, -(2.0**60)])
    assert (value, refined) == (nearest(Fraction(2.0**-60) * Fraction(1 / (1 + math.exp(-1))), BF16), 1)
    value, refined = settled([-1.0], [2.0**60, 2.0**-60, -(2.0**60), -(2.0**-60)])
    assert (value, refined) == (0.0, 1)


def test_integers_need_no_refinement():
    """Sums on one grid are free of error: without that, each cancelled output would be refined."""
    inputs = make_inputs(Problem(64, 64, 300), "integers", 3)
    result = exact(inputs.x, inputs.weights, out_dtype=BF16)
    assert (result.value == 0).sum() > 50
    assert result.refined == 0


@pytest.mark.parametrize(
    ("gate", "up"),
    [(-87.5, 2.0**100), (-95.0, 2.0**127), (89.0, 1.0), (-89.0, 2.0**120), (-8.0, 1.0), (1.0, -1.0), (-1.0, 1.0)],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gates_at_which_systems_have_failed(gate, up, dtype):
    with mpmath.workprec(200):
        true = fraction(mpmath.mpf(gate) / (1 + mpmath.exp(-mpmath.mpf(gate))) * up)
    assert settled([gate], [up], dtype=dtype)[0] == nearest(true, dtype) != 0


def test_infinities_and_nan_stay_in_their_row_or_column():
    inputs = make_inputs(Problem(5, 6, 16, layout="separate"), "normal", 0)
    x, w = inputs.x, inputs.weights
    clean = exact(x, w, out_dtype=BF16).rounded
    x[1, 3], x[2, 5], w.gate[4, 2], w.up[3, 7] = NAN, INF, -INF, NAN
    result = exact(x, w, out_dtype=BF16)
    kept = torch.ones(5, 6, dtype=torch.bool)
    kept[[1, 2]], kept[:, [3, 4]] = False, False
    assert_bits_equal(result.rounded[kept], clean[kept])
    assert result.rounded[1].isnan().all()
    assert result.rounded[:, 3].isnan().all()
    gate, up = x.float() @ w.gate.float().T, x.float() @ w.up.float().T
    eager = torch.nn.functional.silu(gate) * up
    assert torch.equal(result.value.isnan(), eager.isnan())
    assert torch.equal(result.value.isinf(), eager.isinf())
    for activation in ACTIVATIONS:
        exact(x, w, activation, out_dtype=FP32)


def test_infinite_gates():
    x = torch.tensor([[1.0, 1.0]], dtype=BF16)
    for gate, up, activation, expected in (
        (INF, [256.0, 3.0], "sigmoid", 260.0),  # a finite product, and a tie
        (-INF, [256.0, 3.0], "sigmoid", 0.0),
        (-INF, [256.0, 3.0], "relu", 0.0),
        (INF, [1.0, 0.0], "silu", INF),
        (INF, [-1.0, 0.0], "silu", -INF),
        (-INF, [1.0, 0.0], "silu", NAN),
        (INF, [0.0, 0.0], "silu", NAN),
    ):
        w = torch.tensor([[gate, 1.0], up], dtype=BF16)
        rounded = exact(x, Weights.from_stacked(w), activation, out_dtype=BF16).rounded
        assert_bits_equal(rounded, torch.tensor([[expected]], dtype=BF16))


def test_overflow_and_underflow_of_the_output():
    assert settled([2.0**100], [2.0**100]) == (INF, 0)
    assert settled([-(2.0**100)], [2.0**100]) == (0.0, 0)
    assert settled([256.0], [256.0], dtype=FP16)[0] == INF
    assert settled([2.0**-70], [2.0**-62])[0] == 2.0**-133  # gate/2 * up, and a hair more


def test_rows_and_chunks_change_nothing():
    inputs = make_inputs(Problem(300, 20, 40, bias=True), "normal", 5)
    x, w = inputs.x, inputs.weights
    whole = exact(x, w, out_dtype=BF16)
    for chunk in (1, 7, 20, 1000):
        assert_bits_equal(exact(x, w, out_dtype=BF16, chunk=chunk).rounded, whole.rounded)
    for rows in ([299, 0, 7], torch.tensor([3, 200]), slice(100, 140)):
        assert_bits_equal(exact(x, w, out_dtype=BF16, rows=rows).rounded, whole.rounded[rows])
    both = exact(x, w, out_dtype=BF16, computes="gate_up", chunk=7)
    alone = exact(x, Weights(w.up, w.gate, w.bias_up, w.bias_gate), out_dtype=BF16, computes="gate_up")
    assert_bits_equal(both.rounded, torch.cat([alone.rounded[:, 20:], alone.rounded[:, :20]], 1))
    assert exact(x[:0], w, out_dtype=BF16).rounded.shape == (0, 20)


def test_chunk_bounds_the_columns_of_a_step(monkeypatch):
    inputs = make_inputs(Problem(3, 20, 16), "normal", 5)
    seen, whole = [], reference._Sums
    monkeypatch.setattr(reference, "_Sums", lambda x, w: seen.append(len(w.values)) or whole(x, w))
    exact(inputs.x, inputs.weights, out_dtype=BF16, chunk=8)
    assert seen == [8, 8, 8, 8, 4, 4]


def test_one_bias_alone():
    inputs = make_inputs(Problem(4, 6, 16, bias=True), "normal", 6)
    x, w = inputs.x, inputs.weights
    for weights in (Weights(w.gate, w.up, bias_up=w.bias_up), Weights(w.gate, w.up, bias_gate=w.bias_gate)):
        assert_bits_equal(exact(x, weights, out_dtype=BF16).rounded, brute(x, weights, "silu", BF16))


def test_operands_that_do_not_fit():
    x, w = one([1.0, 2.0], [3.0, 4.0])
    with pytest.raises(ArgumentError, match="computes"):
        exact(x, w, out_dtype=BF16, computes="down")
    with pytest.raises(ArgumentError, match="chunk"):
        exact(x, w, out_dtype=BF16, chunk=0)
    with pytest.raises(ArgumentError, match="out_dtype"):
        exact(x, w, out_dtype=torch.float64)
    with pytest.raises(ArgumentError, match="w_gate"):
        exact(x[:, :1], w, out_dtype=BF16)
    with pytest.raises(ArgumentError, match="bias_gate"):
        exact(x, Weights(w.gate, w.up, bias_gate=torch.zeros(2)), out_dtype=BF16)
    with pytest.raises(ArgumentError, match="scales"):
        exact(x, Weights(w.gate, w.up, scale_up=torch.ones(())), out_dtype=BF16)
    with pytest.raises(ArgumentError, match="activation"):
        exact(x, w, "swish", out_dtype=BF16)
    with pytest.raises(ArgumentError, match="rounds"):
        twin(x, w, rounds=("out",))


# --- twin


def test_twin_rounds_where_it_says():
    """259 * 1.5 rounds to 388; with 259 rounded to 260 first, it is 390."""
    for gate, up, points in (([256.0, 3.0], [1.5], {"gate", "act"}), ([1.5], [256.0, 3.0], {"up"})):
        x, w = one(gate, up)
        assert twin(x, w, "relu", rounds=()).item() == 388
        assert twin(x, w, "relu", rounds=(), out_dtype=FP32).item() == 388.5
        for point in ("gate", "up", "act"):
            assert twin(x, w, "relu", rounds=(point,)).item() == (390 if point in points else 388)
        assert twin(x, w, "relu").dtype == BF16


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_twin_is_eager_pytorch(dtype):
    """On small integers, sums are the same in every order, so all bits are."""
    inputs = make_inputs(Problem(20, 30, 130, dtype=dtype), "integers", 2)
    x, w = inputs.x, inputs.weights
    eager = torch.nn.functional.silu(x @ w.gate.T) * (x @ w.up.T)
    assert_bits_equal(twin(x, w), eager)
    with pytest.raises(AssertionError):
        assert_bits_equal(twin(x, w, rounds=("gate", "up")), eager)


def test_twin_adds_biases():
    inputs = make_inputs(Problem(4, 6, 16, bias=True), "integers", 2)
    x, w = inputs.x, inputs.weights
    expected = torch.relu(x @ w.gate.T + w.bias_gate) * (x @ w.up.T + w.bias_up)
    assert_bits_equal(twin(x, w, "relu"), expected)
