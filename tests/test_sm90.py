"""The model of the tensor-core chain: against integers, mistaken rules, and one executor against the other."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_swiglu import ArgumentError, Arithmetic, Weights
from fused_swiglu.sm90 import accumulate, execute
from fused_swiglu.sm90_rule import STEPS, Step
from triton_baselines import model

TYPES = {
    "bf16": (torch.bfloat16, torch.int16, 8, 7),
    "fp16": (torch.float16, torch.int16, 5, 10),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.int8, 4, 3),
    "fp8_e5m2": (torch.float8_e5m2, torch.int8, 5, 2),
}


def random_bits(shape: tuple[int, int], name: str, seed: int, sparse: bool = False) -> torch.Tensor:
    dtype, words, _, _ = TYPES[name]
    info = torch.iinfo(words)
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(info.min, info.max + 1, shape, generator=generator).to(words)
    if sparse:
        bits[torch.rand(shape, generator=generator) < 0.3] = 0
    return bits.view(dtype)


def finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.float().isfinite(), tensor.float(), 1.0).to(tensor.dtype)


def fields(value: float, least: int) -> tuple[int, int, int]:
    """Significand as an integer over 2^23, and the exponent it goes with; the third is 1 for a zero."""
    if value == 0:
        return 0, -133, 1
    exponent = np.frexp(value)[1]
    exponent = max(int(exponent) - 1, least)
    return int(value * 2.0 ** (23 - exponent)), exponent, 0


def slow_dot(a: list[float], b: list[float], rule: Step) -> float:
    """The rule in Python's integers, straight from its description; finite values without overflow."""
    c = 0.0
    for k0 in range(0, len(a), rule.products):
        terms = []
        for x, y in zip(a[k0 : k0 + rule.products], b[k0 : k0 + rule.products], strict=True):
            sx, ex, zx = fields(x, rule.min_exponent)
            sy, ey, zy = fields(y, rule.min_exponent)
            terms.append((sx * sy, -133 if zx or zy else ex + ey, 46))
        terms += [(0, -133, 46)] * (rule.products - len(terms))
        sc, ec, _ = fields(c, -126)
        terms.append((sc, ec, 23))
        largest = max(e for _, e, _ in terms)
        total = 0
        for significand, e, digits in terms:
            shift = rule.fraction + e - largest - digits
            size = abs(significand) << shift if shift >= 0 else abs(significand) >> -shift
            total += size if significand >= 0 else -size
        c = toward_zero(total, largest - rule.fraction, rule.kept)
    return c


def toward_zero(total: int, exponent: int, kept: int) -> float:
    size = abs(total)
    drop = max(size.bit_length() - 1 - kept, -149 - exponent, 0)
    return (1 if total >= 0 else -1) * float(size >> drop) * 2.0 ** (exponent + drop) + 0.0


@given(name=st.sampled_from(sorted(TYPES)), k=st.integers(1, 70), seed=st.integers(0, 2**32 - 1), sparse=st.booleans())
def test_the_chain_is_the_rule_in_integers(name, k, seed, sparse):
    a, b = (finite(random_bits((3, k), name, seed + i, sparse)) for i in (0, 1))
    if name == "bf16":  # products around and below the exponent of a zero term, and none that overflows
        a, b = ((t.float().clamp(-1, 1) * 2.0**-40).bfloat16() for t in (a, b))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_swiglu.sm90._compiled", lambda: None)
        got = accumulate(a, b)
    wanted = [[slow_dot(x, y, STEPS[name]) for y in b.float().tolist()] for x in a.float().tolist()]
    same(torch.from_numpy(got), np.array(wanted, np.float32))


@given(name=st.sampled_from(sorted(TYPES)), k=st.integers(1, 70), seed=st.integers(0, 2**32 - 1), sparse=st.booleans())
def test_numba_gives_numpys_bits(name, k, seed, sparse):
    pytest.importorskip("numba")
    a, b = (finite(random_bits((5, k), name, seed + i, sparse)) for i in (0, 1))
    generator = torch.Generator().manual_seed(seed)
    for c in (None, torch.randn(5, 5, generator=generator).numpy()):
        compiled = accumulate(a, b, c=c)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fused_swiglu.sm90._compiled", lambda: None)
            same(torch.from_numpy(compiled), accumulate(a, b, c=c))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_both_executors_give_the_same_bits_on_any_bits(name):
    for seed, k in ((0, 32), (1, 90), (2, 1)):
        a, b = random_bits((20, k), name, seed), random_bits((24, k), name, seed + 50)
        same(model.accumulate(a, b), accumulate(a, b))
        a, b = finite(a), finite(b)
        same(model.accumulate(a, b, split_k=2), accumulate(a, b, split_k=2))


def same(there: torch.Tensor, here: np.ndarray) -> None:
    there = there.numpy()
    differ = (there.view(np.int32) != here.view(np.int32)) & ~(np.isnan(there) & np.isnan(here))
    assert not differ.any()


@pytest.mark.parametrize("recipe", ["ieee"])
@pytest.mark.parametrize("rounds", [(), ("gate", "up"), ("gate", "up", "act")])
def test_execute_rounds_where_the_arithmetic_says(recipe, rounds):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 200, generator=generator).bfloat16()
    weights = Weights(*(torch.randn(2, 30, 200, generator=generator) * 0.1).bfloat16())
    out = execute(Arithmetic("sm90", recipe, rounds), x, weights)
    gate, up = (torch.from_numpy(accumulate(x, w)) for w in (weights.gate, weights.up))
    if rounds:
        gate, up = gate.bfloat16().float(), up.bfloat16().float()
    act = torch.nn.functional.silu(gate)
    if "act" in rounds:
        act = act.bfloat16().float()
    # torch's silu differs from the recipe by an fp32 ulp or two: a bf16 word in thousands may flip.
    assert float((out != (act * up).bfloat16()).float().mean()) < 2e-3


WRONG = {
    "24 bits": Step(16, 24, 23, 7, -126),
    "26 bits": Step(16, 26, 23, 7, -126),
    "8 products": Step(8, 25, 23, 7, -126),
    "fewer bits kept": Step(16, 25, 22, 7, -126),
}


@pytest.mark.parametrize("mistake", sorted(WRONG))
def test_mistaken_rules_show(mistake):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 40, 896, generator=generator)).bfloat16()
    assert (accumulate(a, b) != accumulate(a, b, step=WRONG[mistake])).mean() > 0.4


def test_split_k_and_correct_rounding_show():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 40, 896, generator=generator)).bfloat16()
    chain = accumulate(a, b)
    assert (chain != accumulate(a, b, split_k=2)).mean() > 0.4
    assert (chain != (a.double() @ b.double().T).float().numpy()).mean() > 0.4


def test_special_values():
    one, inf, nan = 1.0, float("inf"), float("nan")
    rows = torch.tensor([[inf, one], [-inf, one], [nan, one], [inf, -inf], [3e38, 3e38], [-0.0, -0.0]]).bfloat16()
    columns = torch.tensor([[one, one], [0.0, one], [4.0, 4.0]]).bfloat16()
    got = accumulate(rows, columns)
    assert got[0].tolist()[0] == inf
    assert got[1].tolist()[0] == -inf
    assert np.isnan(got[2]).all()
    assert np.isnan(got[3]).all()
    assert np.isnan(got[:2, 1]).all()  # inf * 0
    assert got[4].tolist() == [inf, pytest.approx(3e38, rel=0.01), inf]
    assert not np.signbit(got[5]).any()
    assert (got[np.isnan(got)].view(np.uint32) == 0x7FFFFFFF).all()


def test_an_overflow_stays_though_the_next_steps_would_bring_it_back():
    a = torch.full((1, 32), 3e38).bfloat16()
    b = torch.cat((torch.full((1, 16), 4.0), torch.full((1, 16), -4.0)), 1).bfloat16()
    assert accumulate(a, b)[0, 0] == np.inf


def test_an_infinite_product_decides_before_finite_ones_overflow():
    """As an H200 has it: seen on random bits."""
    a = torch.tensor([[2.0**127, -torch.inf] + [0.0] * 30]).bfloat16()
    b = torch.tensor([[4.0, 1.0] + [1.0] * 30]).bfloat16()
    assert accumulate(a, b)[0, 0] == -np.inf
    assert float(model.accumulate(a, b)) == -np.inf
    later = torch.cat((torch.full((1, 16), 3e38), torch.full((1, 16), -torch.inf)), 1).bfloat16()
    four = torch.full((1, 32), 4.0).bfloat16()
    assert np.isnan(accumulate(later, four)[0, 0])
    assert float(model.accumulate(later, four)) != float(model.accumulate(later, four))


def test_an_h200s_infinities():
    """Recorded on an H200 by tests/gpu/test_gpu_wgmma.py's harness: one wgmma m64n16k16 or m64n256k16 on 2^21 random
    bit patterns of bf16 operands and fp32 accumulators; these are the words where infinite products meet an overflow
    the other way."""
    vectors = np.load(Path(__file__).parent / "vectors" / "h200-wgmma-infinities.npz")
    assert len(vectors["out"]) == 820
    for a, b, c, out in zip(vectors["a"], vectors["b"], vectors["c"], vectors["out"], strict=True):
        left, right = (torch.from_numpy(bits)[None].view(torch.bfloat16) for bits in (a, b))
        assert accumulate(left, right, c=np.array([[c]], np.float32))[0, 0] == out


def test_nothing_to_add():
    a, b = torch.zeros(2, 0).bfloat16(), torch.zeros(3, 0).bfloat16()
    assert accumulate(a, b).tolist() == [[0.0] * 3] * 2
    c = np.ones((2, 3), np.float32)
    assert np.array_equal(accumulate(a, b, c=c), c)
    assert accumulate(torch.zeros(0, 4).bfloat16(), torch.zeros(3, 4).bfloat16()).shape == (0, 3)


def test_bad_operands_are_named():
    a = torch.zeros(2, 3, dtype=torch.bfloat16)
    for left, right in ((a.float(), a.float()), (a, a.half()), (a, a[:, :2]), (a[0], a)):
        with pytest.raises(ArgumentError, match="a, b"):
            accumulate(left, right)
    c = np.zeros((2, 2), np.float32)
    for wrong in ({"split_k": 0}, {"split_k": 2, "c": c}, {"c": c[:1]}, {"c": c.astype(np.float64)}):
        with pytest.raises(ArgumentError, match=r"^(split_k|c): "):
            accumulate(a, a, **wrong)
    with pytest.raises(ArgumentError, match="incomplete"):
        execute(Arithmetic("undeclared"), a, Weights(a, a))
