"""The recipes in NumPy: fma against fractions, accuracy and tails, and the device's code in the interpreter."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_swiglu import ArgumentError
from fused_swiglu.activations import get_activation
from fused_swiglu.recipes import activate, fma
from triton_baselines.interpreter import interpreted

WORDS = st.integers(0, 2**32 - 1)
ALL_BF16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def single(word: int) -> np.float32:
    return np.uint32(word).view(np.float32)


def rounded(value: Fraction) -> np.float32:
    """To fp32, to nearest even, by comparing with the two neighbours."""
    guess = (
        np.float32(float(value)) if abs(value) < Fraction(2) ** 129 else np.float32(np.inf if value > 0 else -np.inf)
    )
    limit = Fraction(2) ** 128 - Fraction(2) ** 103
    if abs(value) >= limit:
        return np.float32(np.inf if value > 0 else -np.inf)
    if np.isinf(guess):
        guess = np.float32(np.copysign(np.finfo(np.float32).max, guess))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    near = [v for v in near if np.isfinite(v)]
    return min(near, key=lambda v: (abs(Fraction(float(v)) - value), int(v.view(np.uint32)) & 1))


@given(WORDS, WORDS, WORDS)
def test_fma_is_rounded_once(x, y, z):
    a, b, c = single(x), single(y), single(z)
    if not all(map(np.isfinite, (a, b, c))):
        return
    with np.errstate(all="ignore"):
        got = fma(np.array([a]), np.array([b]), np.array([c]))[0]
    assert got == rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


@given(st.integers(-(2**24), 2**24), st.integers(-(2**24), 2**24), st.integers(-3, 3), st.integers(-60, 10))
def test_fma_near_ties_and_cancellation(x, y, offset, exponent):
    a, b = np.float32(x), np.float32(y) * np.float32(2.0**exponent)
    exact = Fraction(float(a)) * Fraction(float(b))
    c = np.nextafter(rounded(-exact), np.float32(offset))
    got = fma(np.array([a]), np.array([b]), np.array([c]))[0]
    assert got == rounded(exact + Fraction(float(c)))


def farthest(gates, activation):
    """The most that `ieee` is off over these gates, in ulps. NaN and infinities must be torch's."""
    got = activate(gates, activation, "ieee")
    wanted = get_activation(activation).torch(torch.tensor(gates).double()).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        single_wanted = wanted.astype(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    assert np.array_equal(np.isinf(got), np.isinf(single_wanted))
    usual = np.isfinite(single_wanted)
    unit = np.spacing(np.maximum(np.abs(single_wanted[usual]), np.float32(2.0**-126)))
    return (np.abs(got[usual].astype(np.float64) - wanted[usual]) / unit).max(initial=0)


# gelu_tanh's argument has three roundings and is up to 89 where the function is not yet subnormal: 3 * 89 half ulps.
ULPS = {"silu": 2.5, "sigmoid": 2.5, "gelu_tanh": 270, "relu": 0}


@pytest.mark.parametrize("activation", sorted(ULPS))
def test_ieee_over_every_bf16_gate(activation):
    assert farthest(ALL_BF16, activation) <= ULPS[activation]


@pytest.mark.parametrize("activation", sorted(ULPS))
def test_ieee_over_fp32_gates_densely(activation):
    """10^7 bit patterns for silu, 10^6 for the others, evenly spaced; under the profile `deep` all 2^32, in an hour."""
    step = 1 if settings().max_examples > 1000 else 429 if activation == "silu" else 4293  # odd: every last bit occurs
    span = 2**16 * step  # a chunk's temporaries stay in the second-level cache

    def chunk(start):
        words = np.arange(start, min(start + span, 2**32), step, dtype=np.uint64)
        return farthest(words.astype(np.uint32).view(np.float32), activation)

    with ThreadPoolExecutor() as pool:
        assert max(pool.map(chunk, range(0, 2**32, span))) <= ULPS[activation]


@pytest.mark.parametrize("recipe", ["ex2", "tanh", "poly3"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid"])
def test_the_approximations_follow_torch_for_nan_and_infinity_and_come_close(activation, recipe):
    got = activate(ALL_BF16, activation, recipe)
    wanted = get_activation(activation).torch(torch.tensor(ALL_BF16).double()).numpy()
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    usual = np.isfinite(wanted) & (np.abs(ALL_BF16) < 1e4)
    assert np.abs(got[usual] - wanted[usual]).max() <= 2e-3 * np.abs(ALL_BF16[usual]).max()
    near = np.abs(ALL_BF16) < 30
    assert np.abs(got[near] - wanted[near]).max() < 2e-3


@pytest.mark.parametrize("recipe", ["ieee", "ex2", "tanh", "poly3"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "sigmoid", "relu"])
def test_the_device_code_agrees_in_the_interpreter(activation, recipe):
    """Its fma rounds twice there, so not to the bit."""
    gates = torch.cat((torch.linspace(-130, 130, 1021), torch.tensor([torch.nan, torch.inf, -torch.inf])))
    out = torch.empty_like(gates)
    with np.errstate(all="ignore"):
        interpreted("model")._activate[(1,)](gates, out, len(gates), ACTIVATION=activation, RECIPE=recipe, BLOCK=1024)
    wanted = torch.from_numpy(activate(gates.numpy(), activation, recipe))
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=1e-6, equal_nan=True)


def test_unknown_names():
    with pytest.raises(ArgumentError, match="recipe"):
        activate(ALL_BF16, "silu", "fast")
    with pytest.raises(ArgumentError, match="activation"):
        activate(ALL_BF16, "swish", "ieee")
