"""Input families: x and weights drawn for a problem, in its layout, strides and alignment; and poisoned outputs.

Everything between rows (where a stride is longer than a row) is NaN, so that a kernel that reads it is caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError
from .operands import Weights
from .problem import DTYPES, Problem

FAMILIES: dict[str, str] = {
    "normal": "x ~ N(0, 1), weights ~ N(0, 0.02^2)",
    "outliers": "as in language models: a few channels of x 30 to 100 times the others, rare massive tokens, "
    "weights with slightly heavy tails",
    "integers": "small integers, every partial sum under 256 in magnitude: exact in fp32 and bf16 in any order",
    "wide": "random signs and exponents over tens of octaves, no output beyond out_dtype's range",
}
_BIAS = 3  # the largest bias of the integers family
_CHUNK = 2**24  # fp32 numbers drawn at a time: 64 MiB


@dataclass(frozen=True, slots=True)
class Inputs:
    """x[m, k] and the weights of a problem."""

    x: Tensor
    weights: Weights


def make_inputs(problem: Problem, family: str, seed: int, device: torch.device | str = "cpu") -> Inputs:
    """Inputs of a family (`FAMILIES`), with the problem's dtypes (bf16 or fp16), layout, strides and alignment.

    Drawn on the device, the same values for the same (problem, family, seed) on every device of one model; layout,
    strides and alignment do not change them, nor m the weights'. torch's global generators are left alone.
    Biases, where the problem has them, are N(0, 0.5^2), or small integers in that family.

    Raises ArgumentError for an unknown family, another dtype, scales, or stacked weights with two strides.
    """
    if family not in FAMILIES:
        raise ArgumentError("family", f"unknown {family!r}", f"choose from {', '.join(FAMILIES)}")
    for field in ("dtype", "weight_dtype"):
        if getattr(problem, field) not in ("bf16", "fp16"):
            raise ArgumentError(field, f"no inputs in {getattr(problem, field)}", "choose bf16 or fp16")
    if problem.scaling != "none":
        raise ArgumentError("scaling", f"no scales for {problem.scaling!r}", "choose none")
    if problem.layout == "stacked" and problem.gate_stride != problem.up_stride:
        raise ArgumentError("up_stride", f"{problem.up_stride} in stacked weights", "make it equal to gate_stride")
    if not 0 <= seed < 2**60:
        raise ArgumentError("seed", f"{seed}", "give 0 or more, less than 2^60")
    n, k, weight_dtype = problem.n, problem.k, DTYPES[problem.weight_dtype]
    device = torch.device(device)

    def generator(stream: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(8 * seed + stream)

    x = _matrix(problem.m, k, problem.x_stride, DTYPES[problem.dtype], device, problem.alignment)
    if problem.layout == "stacked":
        both = Weights.from_stacked(_matrix(2 * n, k, problem.gate_stride, weight_dtype, device, problem.alignment))
        gate, up = both.gate, both.up
    else:
        gate = _matrix(n, k, problem.gate_stride, weight_dtype, device, problem.alignment)
        up = _matrix(n, k, problem.up_stride, weight_dtype, device, problem.alignment)
    draws = _DRAWS[family](problem, generator(0))
    for stream, (matrix, draw) in enumerate(zip((x, gate, up), draws, strict=True), start=1):
        _fill(matrix, draw, generator(stream))
    biases = [None, None]
    if problem.bias:
        biases = [_bias(problem, family, generator(stream)).to(weight_dtype) for stream in (4, 5)]
    return Inputs(x, Weights(gate, up, *biases))


def make_out(
    problem: Problem, shape: tuple[int, int] | None = None, device: torch.device | str = "cpu", poison: bool = True
) -> Tensor:
    """An output in out_dtype: [m, n] with the problem's out_stride and alignment, all NaN, the padding too.

    shape: another, such as [m, 2n] (`Kernel.output_shape`); its padding is as wide as the problem's.
    poison: False leaves the memory as it comes.
    """
    rows, columns = shape or (problem.m, problem.n)
    stride = columns + problem.out_stride - problem.n
    dtype = DTYPES[problem.out_dtype]
    return _matrix(rows, columns, stride, dtype, torch.device(device), problem.alignment, poison)


def _matrix(
    rows: int, columns: int, stride: int, dtype: torch.dtype, device: torch.device, alignment: int, poison: bool = True
) -> Tensor:
    """[rows, columns] with that row stride, at an address that is a multiple of `alignment` bytes and of no more (up to
    16); NaN throughout its storage."""
    skip = 0 if alignment >= 16 else max(1, alignment // dtype.itemsize)
    storage = torch.empty(skip + rows * stride, dtype=dtype, device=device)
    if poison:
        storage.fill_(math.nan)
    return storage[skip:].view(rows, stride)[:, :columns]


Draw = Callable[[int, torch.Generator], Tensor]  # so many rows of a matrix, drawn with that generator


def _fill(matrix: Tensor, draw: Draw, generator: torch.Generator) -> None:
    """Draws the matrix some rows at a time: no fp32 copy of it all."""
    rows, columns = matrix.shape
    step = max(1, _CHUNK // columns)
    for top in range(0, rows, step):
        matrix[top : top + step] = draw(min(step, rows - top), generator)


def _bias(problem: Problem, family: str, generator: torch.Generator) -> Tensor:
    if family == "integers":
        return torch.randint(-_BIAS, _BIAS + 1, (problem.n,), generator=generator, device=generator.device)
    return 0.5 * torch.randn(problem.n, generator=generator, dtype=torch.float32, device=generator.device)


def _normal(problem: Problem, common: torch.Generator) -> tuple[Draw, Draw, Draw]:
    def draw(sigma: float) -> Draw:
        return lambda rows, g: torch.randn(rows, problem.k, generator=g, dtype=torch.float32, device=g.device) * sigma

    return draw(1), draw(0.02), draw(0.02)


def _outliers(problem: Problem, common: torch.Generator) -> tuple[Draw, Draw, Draw]:
    """Outlier channels as Dettmers et al. 2022 (arXiv:2208.07339) describe them, the same for every token; and tokens
    on which these are larger still, as in Sun et al. 2024, "Massive Activations" (arXiv:2402.17762)."""
    k, device = problem.k, common.device
    count = math.ceil(k / 512)
    channels = torch.randperm(k, generator=common, device=device)[:count]
    sizes = 30 * (100 / 30) ** torch.rand(count, generator=common, dtype=torch.float32, device=device)

    def x(rows: int, g: torch.Generator) -> Tensor:
        values = torch.randn(rows, k, generator=g, dtype=torch.float32, device=device)
        massive = torch.rand(rows, 1, generator=g, dtype=torch.float32, device=device) < 1 / 64
        values[:, channels] *= sizes * torch.where(massive, 8, 1)
        return values

    def w(rows: int, g: torch.Generator) -> Tensor:
        # A normal whose scale is log-normal, of variance 0.02^2; kurtosis 3 exp(4 * 0.25^2) = 3.85.
        spread = torch.randn(rows, k, generator=g, dtype=torch.float32, device=device).mul_(0.25).sub_(0.25**2).exp_()
        return spread.mul_(torch.randn(rows, k, generator=g, dtype=torch.float32, device=device)).mul_(0.02)

    return x, w, w


def _integers(problem: Problem, common: torch.Generator) -> tuple[Draw, Draw, Draw]:
    """sum(|x w|) + |bias| <= 255. Up to k = 252 every weight may be other than 0; beyond, one in each of up to 252
    groups of neighbouring columns is, at a random place, so that every column counts in some row."""
    k, budget = problem.k, 255 - _BIAS
    width = math.ceil(k / budget)
    groups = math.ceil(k / width)
    largest = min(8, math.isqrt(budget // groups))

    def x(rows: int, g: torch.Generator) -> Tensor:
        return torch.randint(-largest, largest + 1, (rows, k), generator=g, device=g.device, dtype=torch.float32)

    def w(rows: int, g: torch.Generator) -> Tensor:
        shape = (rows, groups)
        starts = torch.arange(0, k, width, device=g.device)
        places = (starts + torch.randint(0, width, shape, generator=g, device=g.device)).clamp_(max=k - 1)
        low = -largest if width == 1 else 0  # where most weights are 0, these are -1 or 1
        values = torch.randint(low, largest + 1, shape, generator=g, device=g.device, dtype=torch.float32)
        if width > 1:
            values = 2 * values - 1
        return torch.zeros(rows, k, dtype=torch.float32, device=g.device).scatter_(1, places, values)

    return x, w, w


def _wide(problem: Problem, common: torch.Generator) -> tuple[Draw, Draw, Draw]:
    """Significands in [1, 2], exponents uniform over `octaves`. The gate's end where its sums have a standard deviation
    of about 4, where the activation bends; the up terms' end where out cannot overflow were all terms the largest."""
    k, device = problem.k, common.device
    top_x, octaves = {"bf16": (16, 32), "fp16": (0, 12)}[problem.dtype]
    top_gate = round(math.log2(4 / 3 * octaves / math.sqrt(k)))  # of the products x * w_gate
    out = torch.finfo(DTYPES[problem.out_dtype])
    room = math.floor(math.log2(out.max)) - 2 * math.ceil(math.log2(k)) - 4 - top_gate
    weight = torch.finfo(DTYPES[problem.weight_dtype])
    least = round(math.log2(weight.tiny * weight.eps))  # the smallest subnormal's

    def draw(top: int) -> Draw:
        top = max(top, least)
        bottom = max(top - octaves, least)

        def rows_of(rows: int, g: torch.Generator) -> Tensor:
            exponents = torch.randint(bottom, top + 1, (rows, k), generator=g, device=device)
            values = torch.rand(rows, k, generator=g, dtype=torch.float32, device=device).add_(1)
            signs = torch.randint(0, 2, (rows, k), generator=g, device=device).mul_(2).sub_(1)
            return torch.ldexp(values, exponents).mul_(signs)

        return rows_of

    return draw(top_x), draw(top_gate - top_x), draw(min(top_x, room - top_x))


# family: draws for x, w_gate and w_up, sharing what `common` decides
_DRAWS = {"normal": _normal, "outliers": _outliers, "integers": _integers, "wide": _wide}
