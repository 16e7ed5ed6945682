"""Mismatch measures: how far an output is from the exact result, under definitions that are always named.

- M0: bits that differ from a prediction (`bits_differ`).
- M1: distance from the correctly rounded exact result in ulps of the output dtype: P(>0), P(>1), max.
- M2: |y - exact| > atol + rtol * |exact|, with the exact result unrounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError
from .reference import Exact

_WORDS = {2: torch.int16, 4: torch.int32}
_CHUNK = 2**22  # outputs looked at together: temporaries of 32 MiB each
Tolerances = tuple[tuple[float, float], ...]  # pairs (rtol, atol)
TOLERANCES: Tolerances = ((1.6e-2, 1e-5), (5e-3, 1e-4))  # torch.testing's for bf16; a tighter pair


@dataclass(frozen=True, slots=True)
class Mismatch:
    """M1 and M2 of an output; shares in 0..1.

    m1_gt0, m1_gt1, m1_max: shares over 0 and over 1, and the most, of the distance that `ulps` defines.
    plain_gt0, plain_gt1, plain_max: the same of `ulp_distance`, which has no least ulp.
    m2: (rtol, atol, share) for each pair of tolerances.
    outputs: how many were compared.
    """

    m1_gt0: float
    m1_gt1: float
    m1_max: float
    plain_gt0: float
    plain_gt1: float
    plain_max: int
    m2: tuple[tuple[float, float, float], ...]
    outputs: int


def mismatch(out: Tensor, exact: Exact, tolerances: Tolerances = TOLERANCES) -> Mismatch:
    """How `out` [rows, n] differs from the exact result.

    M2 where `out` or the rounded exact result is not finite: they must be equal, NaN to NaN.
    tolerances: pairs (rtol, atol). Raises ArgumentError if shape, dtype or device differ from `exact.rounded`'s.
    """
    _check("out", out, exact.rounded)
    least = _least_ulp(exact)
    over, beyond = torch.zeros(4, dtype=torch.int64), torch.zeros(len(tolerances), dtype=torch.int64)
    m1_max, plain_max = 0.0, 0
    step = max(1, _CHUNK // max(1, out.shape[1]))
    for y, rounded, value in zip(out.split(step), exact.rounded.split(step), exact.value.split(step), strict=True):
        if not y.numel():
            continue
        plain = ulp_distance(y, rounded)
        m1 = _floored(plain, y, rounded, least)
        over += torch.stack([(d > limit).sum() for d in (m1, plain) for limit in (0, 1)]).cpu()
        m1_max, plain_max = max(m1_max, m1.max().item()), max(plain_max, int(plain.max()))
        finite = y.isfinite() & rounded.isfinite()
        for number, (rtol, atol) in enumerate(tolerances):
            far = (y.double() - value).abs() > atol + rtol * value.abs()
            beyond[number] += torch.where(finite, far, plain > 0).sum().cpu()
    outputs = out.numel()
    m1_gt0, m1_gt1, plain_gt0, plain_gt1 = (count / max(1, outputs) for count in over.tolist())
    m2 = tuple((*pair, count / max(1, outputs)) for pair, count in zip(tolerances, beyond.tolist(), strict=True))
    return Mismatch(m1_gt0, m1_gt1, m1_max, plain_gt0, plain_gt1, plain_max, m2, outputs)


def ulps(out: Tensor, exact: Exact) -> Tensor:
    """M1's distance of each output from the correctly rounded exact result: fp64, of out's shape.

    It is `ulp_distance`, or |out - rounded| in ulps of a number of 2^-8 of the exact output's RMS where that is less:
    near 0, where gate and up have cancelled, the ulps of the result itself would count noise that no reader sees.
    So distances near 0 can be fractions; any that is not 0 counts as > 0.
    Raises ArgumentError if shape, dtype or device differ from `exact.rounded`'s.
    """
    _check("out", out, exact.rounded)
    return _floored(ulp_distance(out, exact.rounded), out, exact.rounded, _least_ulp(exact))


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many floats apart a and b are: int64. -0 equals +0 and NaN equals NaN; NaN is as far from anything else as
    -inf from +inf. Takes bf16, fp16 or fp32, both alike, or raises ArgumentError."""
    _check("a", a, b)
    farthest = 2 * ordered(torch.tensor(math.inf, dtype=a.dtype)).item()
    distance = (ordered(a) - ordered(b)).abs()
    return torch.where(a.isnan() | b.isnan(), farthest * (a.isnan() != b.isnan()), distance)


def ordered(t: Tensor) -> Tensor:
    """An int64 for each float, rising by 1 from one float to the next; 0 for both zeros. (NaN lies beyond infinity.)

    Takes bf16, fp16 or fp32, or raises ArgumentError.
    """
    words = _words(t).long()
    sign = -(2 ** (8 * t.itemsize - 1))  # a negative float's word is this, its magnitude added
    return torch.where(words < 0, sign - words, words)


def ulp_histogram(out: Tensor, exact: Exact, most: int = 8) -> list[int]:
    """How many outputs lie 0, 1, ... most - 1 and `most` or more ulps from the correctly rounded exact result (plain
    distance). Raises ArgumentError as `mismatch` does, and for most < 1."""
    _check("out", out, exact.rounded)
    if most < 1:
        raise ArgumentError("most", f"{most}", "give 1 or more")
    step = max(1, _CHUNK // max(1, out.shape[1]))
    counts = torch.zeros(most + 1, dtype=torch.int64)
    for y, rounded in zip(out.split(step), exact.rounded.split(step), strict=True):
        counts += torch.bincount(ulp_distance(y, rounded).flatten().clamp(max=most), minlength=most + 1).cpu()
    return counts.tolist()


def bits_differ(a: Tensor, b: Tensor) -> int:
    """How many words differ (M0 when b is a prediction): -0 differs from +0, any NaN equals any NaN.

    Takes bf16, fp16 or fp32, both alike, or raises ArgumentError.
    """
    _check("a", a, b)
    return int(differing(a, b).sum())


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Where words differ, as `bits_differ` counts them: bool, of their shape."""
    return (_words(a) != _words(b)) & ~(a.isnan() & b.isnan())


def _words(t: Tensor) -> Tensor:
    if t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError("dtype", f"{t.dtype}", "give bf16, fp16 or fp32")
    return t.view(_WORDS[t.itemsize])


def _check(name: str, a: Tensor, b: Tensor) -> None:
    for what, has, wanted in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
        ("device", a.device, b.device),
    ):
        if has != wanted:
            raise ArgumentError(name, f"has {what} {has}", f"what it is compared with has {wanted}")


def _least_ulp(exact: Exact) -> float:
    """The ulp of a number of 2^-8 of the RMS of the exact output, over its finite part."""
    squares, count = 0.0, 0
    for part in exact.rounded.split(max(1, _CHUNK // max(1, exact.rounded.shape[1]))):
        finite = part.isfinite()
        squares += part.double().masked_fill(~finite, 0).square().sum().item()
        count += int(finite.sum())
    info = torch.finfo(exact.rounded.dtype)
    smallest = info.tiny * info.eps
    _, exponent = math.frexp(math.sqrt(squares / max(1, count)) / 256)
    return max(info.eps * 2.0 ** (exponent - 1), smallest) if squares else smallest


def _floored(plain: Tensor, out: Tensor, rounded: Tensor, least: float) -> Tensor:
    coarse = (out.double() - rounded.double()).abs() / least
    return torch.where(coarse.isfinite(), torch.minimum(plain, coarse), plain)
