"""The one-instruction harness tests/gpu/wgmma.cu: how it is built and launched, and the operands it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cutlass_kernels.unit import Unit
from fused_swiglu.sm90_rule import STEPS, Step

UNIT = Unit(str(Path(__file__).parent / "gpu" / "wgmma.cu"), ctypes=True)
ROWS = 64  # of a wgmma's accumulator


@dataclass(frozen=True, slots=True)
class Format:
    """An operand format: its name in PTX, its rule, and the unbiased exponent of its largest finite number."""

    ptx: str
    dtype: torch.dtype
    rule: Step
    largest: int

    @property
    def words(self) -> torch.dtype:
        return torch.int16 if self.dtype.itemsize == 2 else torch.int8


FORMATS = {
    "bf16": Format("bf16", torch.bfloat16, STEPS["bf16"], 127),
    "fp16": Format("f16", torch.float16, STEPS["fp16"], 15),
    "e4m3": Format("e4m3", torch.float8_e4m3fn, STEPS["fp8_e4m3"], 8),
    "e5m2": Format("e5m2", torch.float8_e5m2, STEPS["fp8_e5m2"], 15),
}
WIDTHS = (8, 256)
SOURCES_OF_A = ("shared", "registers")


def launch(
    library: ctypes.CDLL, name: str, source: str, a: torch.Tensor, b: torch.Tensor, c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """a[count, 64, k] @ b[count, n, k].T + c[count, 64, n], each count one instruction on the current GPU."""
    count, n = b.shape[:2]
    here = [t.cuda().contiguous() for t in (a, b, torch.from_numpy(c))]
    out = torch.full(c.shape, torch.nan, device="cuda")
    function = getattr(library, f"wgmma_{FORMATS[name].ptx}_n{n}_{source}")
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*here, out)]
    status = function(*pointers, ctypes.c_uint(count), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    assert status == 0, f"the launch failed with CUDA error {status}"
    return out.cpu().numpy()


Drawn = tuple[torch.Tensor, torch.Tensor, NDArray[np.float32]]


def draw(kind: str, name: str, count: int, n: int, seed: int) -> Drawn:
    """Operands of that kind (`KINDS`) for `count` instructions: a [count, 64, k], b [count, n, k], c [count, 64, n]."""
    form, rng = FORMATS[name], np.random.default_rng(seed)
    k = form.rule.products
    return KINDS[kind](form, rng, (count, ROWS, k), (count, n, k), (count, ROWS, n))


Shape = tuple[int, int, int]


def _words(form: Format, rng: np.random.Generator, shape: Shape) -> torch.Tensor:
    info = torch.iinfo(form.words)
    return torch.from_numpy(rng.integers(info.min, info.max + 1, shape)).to(form.words).view(form.dtype)


def _accumulator_words(rng: np.random.Generator, shape: Shape) -> NDArray[np.float32]:
    return rng.integers(0, 2**32, shape, np.uint32).view(np.float32)


def _numbers(form: Format, rng: np.random.Generator, exponents: NDArray[np.int64]) -> torch.Tensor:
    """Random signs and significands with these exponents; below the normal ones, subnormals."""
    significands = 1 + rng.integers(0, 2**form.rule.digits, exponents.shape) / 2**form.rule.digits
    signs = rng.choice([-1.0, 1.0], exponents.shape)
    return torch.from_numpy(np.ldexp(signs * significands, exponents)).float().to(form.dtype)


def _accumulators(rng: np.random.Generator, exponents: NDArray[np.int64]) -> NDArray[np.float32]:
    """Random signs and fractions with these exponents; from -127 on down subnormals of that size."""
    significands = 1 + rng.integers(0, 2**23, exponents.shape) / 2**23
    return np.ldexp(rng.choice([-1.0, 1.0], exponents.shape) * significands, exponents).astype(np.float32)


def _any_bits(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    return _words(form, rng, a), _words(form, rng, b), _accumulator_words(rng, c)


def _finite_bits(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    left, right = (
        torch.where(t.float().isfinite(), t.float(), 1.0).to(form.dtype)
        for t in (_words(form, rng, a), _words(form, rng, b))
    )
    added = _accumulator_words(rng, c)
    return left, right, np.where(np.isfinite(added), added, np.float32(1))


def _normal(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    left, right = (torch.from_numpy(rng.standard_normal(shape)).to(form.dtype) for shape in (a, b))
    return left, right, rng.standard_normal(c).astype(np.float32)


def _cancelling(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    left, right, _ = _normal(form, rng, a, b, c)
    return left, right, -(left.float() @ right.float().transpose(1, 2)).numpy()


def _aligned(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    """One product of 2^8, all others where the last bits kept are cut, some bits above and below; the accumulator
    there too, or as large, or 0."""
    count, _, k = a
    far = form.rule.fraction + rng.integers(-5, 4, (count, k))
    far[np.arange(count), rng.integers(0, k, count)] = 0
    left, right = 4 - far // 2, 4 - (far - far // 2)
    distance = rng.choice([0, 1, *range(form.rule.fraction - 5, form.rule.fraction + 4)], c)
    added = _accumulators(rng, 8 - distance) * rng.integers(0, 2, c).astype(np.float32)
    spread = [np.broadcast_to(e[:, None], shape) for e, shape in ((left, a), (right, b))]
    return *(_numbers(form, rng, e) for e in spread), added  # type: ignore[return-value]


def _tiny(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    """Products around fp32's smallest, or as small as the format allows; subnormal accumulators."""
    middle = max(-68, form.rule.min_exponent - form.rule.digits // 2)
    left, right = (_numbers(form, rng, rng.integers(middle - 8, middle + 9, shape)) for shape in (a, b))
    return left, right, _accumulators(rng, rng.integers(-155, -110, c))


def _zeros(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    """Tiny numbers, of which most operands, and half of the accumulators, are zeros of their sign."""
    left, right, added = _tiny(form, rng, a, b, c)
    sign = torch.iinfo(form.words).min
    for operand in (left, right):
        operand.view(form.words)[torch.from_numpy(rng.random(operand.shape) < 0.7)] &= sign
    return left, right, added * rng.integers(0, 2, c).astype(np.float32)


def _overflowing(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    """Products and accumulators whose sum lies about the largest number."""
    middle = min(form.largest - 1, 62)
    left, right = (_numbers(form, rng, rng.integers(middle - 1, middle + 2, shape)) for shape in (a, b))
    return left, right, _accumulators(rng, rng.integers(126, 128, c))


def _special(form: Format, rng: np.random.Generator, a: Shape, b: Shape, c: Shape) -> Drawn:
    """Normal numbers among which are few infinities, NaN, zeros and numbers near the largest."""
    left, right, added = _normal(form, rng, a, b, c)
    values = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.5 * 2.0**form.largest, -1.5 * 2.0**form.largest]
    for operand in (left, right):
        chosen = torch.tensor(values).to(form.dtype)[torch.from_numpy(rng.integers(0, len(values), operand.shape))]
        at = torch.from_numpy(rng.random(operand.shape) < 1 / 64)
        operand.view(form.words)[at] = chosen.view(form.words)[at]
    odd = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, -0.0], np.float32)[rng.integers(0, 6, c)]
    return left, right, np.where(rng.random(c) < 0.3, odd, added)


KINDS: dict[str, Callable[..., Drawn]] = {
    "any bits": _any_bits,
    "finite bits": _finite_bits,
    "normal": _normal,
    "cancelling": _cancelling,
    "aligned": _aligned,
    "tiny": _tiny,
    "zeros": _zeros,
    "overflowing": _overflowing,
    "special": _special,
}
