"""The exact result, correctly rounded; and the low-precision torch twin.

Plain torch: it runs wherever its tensors are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import mul
from typing import Any

import mpmath
import torch
from torch import Tensor

from .activations import IDENTITY, Activation, get_activation
from .arithmetic import ROUNDS
from .errors import ArgumentError
from .operands import Weights, problem_of

_UNIT = 2.0**-53  # unit roundoff of fp64
_SCRATCH = 2**26  # fp64 numbers in the temporaries of one block: 512 MiB


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact result of a problem.

    value: fp64 [rows, n], unrounded: what fp64 sums of exact products give, or, where refined, the nearest fp64 number.
    rounded: out_dtype [rows, n], the exact result rounded once, to nearest even.
    refined: how many outputs fp64 could not decide, so that exact sums and a longer activation did.
    """

    value: Tensor
    rounded: Tensor
    refined: int


def exact(
    x: Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    out_dtype: torch.dtype,
    rows: Sequence[int] | Tensor | slice | None = None,
    computes: str = "swiglu",
    chunk: int | None = None,
) -> Exact:
    """act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up), as if computed without error, rounded once to out_dtype.

    x[m, k], weights [n, k], biases [n]: any of `DTYPES`; their products are exact in fp64.
    out_dtype: bf16, fp16 or fp32.
    rows: which rows of x, as an index into its first dimension; all by default.
    computes: `swiglu`; `product` for gate * up without an activation; or `gate_up` for the sums alone (biases
        included), gate beside up: [rows, 2n].
    chunk: columns per step; by default as many as keep temporaries under about 1 GiB.

    fp64 decides an output if no rounding boundary lies within the error bound. The others (for bf16 about one in 10^8
    of normal data) are refined on the CPU: sums as exact fractions, the activation in ever longer precision until one
    float is left. NaN and infinities need no refinement: fp64 follows IEEE 754 as torch does.

    Raises ArgumentError for operands that do not fit together, scaled ones, or another out_dtype.
    """
    act = get_activation(activation)
    problem = problem_of(x, weights, activation=activation)
    _check(x, weights)
    _format(out_dtype)
    if computes not in ("swiglu", "product", "gate_up"):
        raise ArgumentError("computes", f"unknown {computes!r}", "choose swiglu, product or gate_up")
    if computes == "product":
        act = IDENTITY
    if chunk is not None and chunk < 1:
        raise ArgumentError("chunk", f"{chunk} columns", "give 1 or more")
    x = x if rows is None else x[rows]
    m, n, k = len(x), problem.n, problem.k
    height = 128 if x.device.type == "cpu" else 1024  # rows of x in a block; a CPU's caches are small
    chunk = chunk or max(1, _SCRATCH // (6 * k + 24 * min(m, height)))
    value = x.new_empty(m, 2 * n if computes == "gate_up" else n, dtype=torch.float64)
    rounded = x.new_empty(value.shape, dtype=out_dtype)
    refined = 0
    for left in range(0, n, chunk):
        part = slice(left, left + chunk)
        gate_rows, up_rows = (
            _weight_rows(w[part], None if bias is None else bias[part], problem.bias)
            for w, bias in ((weights.gate, weights.bias_gate), (weights.up, weights.bias_up))
        )
        for top in range(0, m, height):
            piece = x[top : top + height]
            x_rows = _Rows(piece, piece.new_ones(len(piece), dtype=torch.float64) if problem.bias else None)
            gate, up = _Sums(x_rows, gate_rows), _Sums(x_rows, up_rows)
            blocks = {left: gate, n + left: up} if computes == "gate_up" else {left: _Gated(act, gate, up)}
            for first, block in blocks.items():
                here = slice(top, top + height), slice(first, first + block.value.shape[1])
                value[here], rounded[here], count = _decide(block, out_dtype)
                refined += count
    return Exact(value, rounded, refined)


def twin(
    x: Tensor,
    weights: Weights,
    activation: str = "silu",
    *,
    rounds: tuple[str, ...] = ROUNDS,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in low precision: fp32 sums, each intermediate in `rounds` rounded to out_dtype, the output once.

    What a kernel with those rounding points (`Arithmetic.rounds`) is compared with where no bit-accurate model runs:
    the order of the sums is torch's. All of `rounds` is what eager PyTorch does; none is one fused kernel.

    x[m, k], weights [n, k], biases [n]; out_dtype is x's by default. Returns out_dtype [m, n].
    Raises ArgumentError for operands that do not fit together or an unknown rounding point.
    """
    act = get_activation(activation)
    problem_of(x, weights, activation=activation)
    _check(x, weights)
    if not set(rounds) <= set(ROUNDS):
        raise ArgumentError("rounds", f"{rounds}", f"give a subset of {ROUNDS}")
    dtype = out_dtype or x.dtype

    def rounded(name: str, value: Tensor) -> Tensor:
        return value.to(dtype).float() if name in rounds else value

    def matmul(w: Tensor, bias: Tensor | None) -> Tensor:
        sums = x.float() @ w.float().T
        return sums if bias is None else sums + bias.float()

    gate = rounded("gate", matmul(weights.gate, weights.bias_gate))
    up = rounded("up", matmul(weights.up, weights.bias_up))
    return (rounded("act", act.torch(gate)) * up).to(dtype)


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 rounded once, to nearest even, to bf16, fp16 or fp32 (torch's own conversion goes through fp32).

    Each value is scaled so that an ulp of the result is 1, rounded to an integer, and scaled back: all but the rounding
    is exact. Subnormals, signed zeros, NaN and overflow to infinity as in IEEE 754. Any shape.
    Raises ArgumentError for another dtype.
    """
    if value.dtype != torch.float64:
        raise ArgumentError("value", f"has dtype {value.dtype}", "give fp64")
    digits, smallest = _format(dtype)
    quantum = (_exponent(value) - digits).clamp(min=smallest)
    return (torch.round(value * _power_of_two(-quantum)) * _power_of_two(quantum)).to(dtype)


def _format(dtype: torch.dtype) -> tuple[int, int]:
    """Significant bits, and the exponent of the least subnormal."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError("out_dtype", f"{dtype}", "choose torch.bfloat16, torch.float16 or torch.float32")
    info = torch.finfo(dtype)
    return 1 - round(math.log2(info.eps)), round(math.log2(info.tiny * info.eps))


def _exponent(value: Tensor) -> Tensor:
    """The int64 e for which |value| < 2^e, the least one where the fp64 value is normal."""
    return (value.view(torch.int64) >> 52 & 0x7FF) - 1022


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, for int64 exponents in [-1022, 1023]; torch's ldexp and exp2 need not be exact."""
    return (exponent + 1023 << 52).view(torch.float64)


def _check(x: Tensor, weights: Weights) -> None:
    if weights.scale_gate is not None or weights.scale_up is not None:
        raise ArgumentError("weights", "have scales", "multiply them in first")
    for name, bias in (("bias_gate", weights.bias_gate), ("bias_up", weights.bias_up)):
        if bias is not None and (tuple(bias.shape) != weights.gate.shape[:1] or bias.device != x.device):
            wanted = f"give shape {tuple(weights.gate.shape[:1])} on {x.device}"
            raise ArgumentError(name, f"has shape {tuple(bias.shape)} on {bias.device}", wanted)


class _Rows:
    """Rows in fp64, as one side of a product; for each its norm, and the grid that its entries lie on.

    A bias is one more product, 1 * b: `last` is one more column.
    """

    def __init__(self, matrix: Tensor, last: Tensor | None) -> None:
        wide = matrix.double()
        self.values = wide if last is None else torch.cat([wide, last.double()[:, None]], 1)
        self.norm = self.values.norm(dim=1)
        self.grid = _grid(self.values)

    def integers(self, i: int) -> tuple[list[int], int]:
        """Integers and the one denominator under which they are row i."""
        ratios = [v.as_integer_ratio() for v in self.values[i].tolist()]
        denominator = max(d for _, d in ratios)  # a power of two, as all are
        return [n * (denominator // d) for n, d in ratios], denominator


def _weight_rows(w: Tensor, bias: Tensor | None, biased: bool) -> _Rows:
    return _Rows(w, w.new_zeros(len(w), dtype=torch.float64) if biased and bias is None else bias)


class _Sums:
    """x[r, k] @ w[c, k].T of fp64 operands whose products are exact: value[r, c] and a bound on its error.

    In any order, k terms sum with an error of at most about (k-1) 2^-53 sum(|x w|) (Higham, Accuracy and Stability of
    Numerical Algorithms, section 4.2), and sum(|x w|) <= ||x|| ||w|| (Cauchy-Schwarz). The error is 0 where all
    products lie on a grid that leaves sums of that size within 53 bits: small integers, selectors.
    """

    def __init__(self, x: _Rows, w: _Rows) -> None:
        self.x, self.w = x, w
        self.value = x.values @ w.values.T
        size = torch.outer(x.norm, w.norm)
        free = size < torch.outer(x.grid, w.grid) * 2.0**52
        self.bound = (size * ((x.values.shape[1] + 4) * _UNIT)).masked_fill_(free | ~self.value.isfinite(), 0)

    def exactly(self, i: int, j: int) -> Fraction:
        (a, a_denominator), (b, b_denominator) = self.x.integers(i), self.w.integers(j)
        return Fraction(sum(map(mul, a, b)), a_denominator * b_denominator)

    def settle(self, i: int, j: int, dtype: torch.dtype) -> tuple[float, float]:
        return _settle(None, self.exactly(i, j), Fraction(1), dtype)


class _Gated:
    """act(gate) * up: value[r, c] and a bound on its error.

    The gate's error goes through the activation by its steepest slope within the error.
    """

    def __init__(self, act: Activation, gate: _Sums, up: _Sums) -> None:
        self.act, self.gate, self.up = act, gate, up
        activated = act.torch(gate.value)
        self.value = activated * up.value
        low, high = gate.value - gate.bound, gate.value + gate.bound
        slope = torch.maximum(act.derivative(low).abs(), act.derivative(high).abs())
        for point in act.steepest:
            slope = torch.maximum(slope, act.derivative(torch.clamp(torch.full_like(low, point), low, high)).abs())
        error = slope * gate.bound + act.ulps * _UNIT * activated.abs()
        self.bound = (error + activated.abs()) * up.bound + error * up.value.abs() + 3 * _UNIT * self.value.abs()

    def settle(self, i: int, j: int, dtype: torch.dtype) -> tuple[float, float]:
        if self.gate.value[i, j].isinf():  # with a finite product: sigmoid(inf) = 1
            return self.up.settle(i, j, dtype)
        return _settle(self.act, self.gate.exactly(i, j), self.up.exactly(i, j), dtype)


def _decide(block: _Sums | _Gated, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """The block's values, correctly rounded ones, and how many had to be settled."""
    value, rounded = block.value, round_to(block.value, dtype)
    unsure = round_to(value - block.bound, dtype) != round_to(value + block.bound, dtype)
    unsure = (unsure & value.isfinite()).nonzero().tolist()
    settled = [block.settle(i, j, dtype) for i, j in unsure]
    for (i, j), (nearest, result) in zip(unsure, settled, strict=True):
        value[i, j], rounded[i, j] = nearest, result
    return value, rounded, len(unsure)


def _settle(act: Activation | None, gate: Fraction, up: Fraction, dtype: torch.dtype) -> tuple[float, float]:
    """act(gate) * up, or gate * up without one, rounded correctly to fp64 and to dtype.

    Precision doubles until the interval around the value holds no rounding boundary. It ends: a value that sits on a
    boundary is rational, and then exact here. (That exp of a rational is not rational but at 0 is Lindemann's theorem;
    for gelu_tanh, whose argument has sqrt(2/pi), it is a safe bet.)
    """
    is_exact = act is None or act.rational or gate == 0
    # Enough bits to hold gate, up and their product exactly.
    precision = 96 + sum(q.numerator.bit_length() + q.denominator.bit_length() for q in (gate, up))
    while True:
        with mpmath.workprec(precision):
            g, u = (mpmath.mpf(q.numerator) / q.denominator for q in (gate, up))
            a = g if act is None else act.mp(g)
            if not is_exact and g > precision:
                # Within 2^-precision below its asymptote, which may be a tie: step below it, by more than the slack.
                a -= mpmath.ldexp(a, 34 - precision)
            v = a * u
            if not v:
                return (zero := float(a) * float(u)), zero
            slack = 0 if is_exact else mpmath.ldexp(abs(v), 32 - precision)
            ends = torch.tensor([_odd(v - slack), _odd(v + slack)], dtype=torch.float64)
            low, high = round_to(ends, dtype).tolist()
            if low == high:
                return float(v), low
        precision *= 2


def _odd(v: Any) -> float:
    """The mpmath.mpf v in fp64, rounded to odd: cut toward zero, the last bit set where anything was cut.

    Rounding that to a format at least two bits shorter is rounding v itself (Boldo & Melquiond 2008, IEEE Transactions
    on Computers 57).
    """
    cut = mpmath.fadd(v, 0, prec=53, rounding="d")
    near = math.copysign(float(cut), mpmath.sign(v))
    (word,) = struct.unpack("<q", struct.pack("<d", near))
    return struct.unpack("<d", struct.pack("<q", word | (near != v)))[0]


def _grid(matrix: Tensor) -> Tensor:
    """For each row of an fp64 matrix, the largest power of two of which all its (finite) entries are multiples."""
    bits = matrix.view(torch.int64)
    significand = bits & (1 << 52) - 1 | 1 << 52
    last = (significand & -significand).double()  # its last one bit, as a value
    grid = last * _power_of_two((_exponent(matrix) - 53).clamp(-1000, 900))
    return grid.masked_fill_(matrix == 0, math.inf).amin(1)
