"""For tests of kernels: hypothesis strategies that draw problems, and assertions that say how much differs, and where.

    @given(problems(max_k=256), families(), seeds())
    def test_my_kernel(problem, family, seed):
        inputs, out = make_inputs(problem, family, seed, "cuda"), make_out(problem, device="cuda")
        my_kernel(out, inputs.x, inputs.weights)
        assert_within_ulps(out, exact(inputs.x, inputs.weights, out_dtype=out.dtype), 1, max_share=0.01)
        assert_padding_poisoned(out)

Strategies draw shapes, layouts and seeds, never matrices. Needs hypothesis (the `test` extra).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from .errors import ArgumentError
from .inputs import FAMILIES
from .numerics import differing, ulp_distance, ulps
from .problem import LAYOUTS, Problem
from .reference import Exact

TILES = (16, 32, 64, 128)
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 61, 67, 127, 131)
_STEPS = (8, 16, 64)  # what k is a multiple of where loads, tensor-core steps and tiles have no tail


def sizes(largest: int, smallest: int = 1) -> st.SearchStrategy[int]:
    """Rows or columns: 1, primes, tile sizes and their neighbours, or any between smallest and largest."""
    around = {tile + step for tile in TILES for step in (-1, 0, 1)}
    return _favouring({1, *_PRIMES, *around}, smallest, largest)


def lengths(largest: int, smallest: int = 1) -> st.SearchStrategy[int]:
    """k: multiples of 8, 16 and 64, these with a tail of 1, of all but 1 and of half, or any up to the largest."""
    starts = {step * i for step in _STEPS for i in (0, 1, 2, 3, largest // step)}
    tails = {tail for step in _STEPS for tail in (0, 1, step // 2, step - 1)}
    return _favouring({start + tail for start in starts for tail in tails}, smallest, largest)


def _favouring(values: set[int], smallest: int, largest: int) -> st.SearchStrategy[int]:
    if not 0 <= smallest <= largest:
        raise ArgumentError("largest", f"{largest} with smallest {smallest}", "give 0 <= smallest <= largest")
    inside = sorted(value for value in values if smallest <= value <= largest)
    anything = st.integers(smallest, largest)
    return st.sampled_from(inside) | anything if inside else anything


def strides(row: int) -> st.SearchStrategy[int]:
    """Distance between rows of `row` elements: contiguous, the next multiple of 8 and beyond, or odd and unaligned."""
    aligned = -(-row // 8) * 8
    return st.sampled_from([row, aligned, aligned + 8, aligned + 64, row + 1, row + 3, (row | 1) + 2])


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_m: int = 129,
    max_n: int = 129,
    max_k: int = 193,
    min_m: int = 1,
    dtypes: Sequence[str] = ("bf16", "fp16"),
    activations: Sequence[str] = ("silu",),
    layouts: Sequence[str] = LAYOUTS,
    bias: bool = False,
    strided: bool = True,
    alignments: Sequence[int] = (16, 8, 4, 2),
) -> Problem:
    """Problems at the boundaries where kernels fail, all of them valid.

    max_m, max_n, max_k: bounds that keep one example quick where the kernel runs slowly, as in an interpreter.
    min_m: 0 for problems without rows, too. bias: whether some have biases.
    strided: whether some have rows longer than their contents. alignments: of every base address, in bytes.
    """
    m, n, k = draw(sizes(max_m, min_m)), draw(sizes(max_n)), draw(lengths(max_k))
    layout = draw(st.sampled_from(layouts))
    x_stride, gate_stride, up_stride, out_stride = (
        draw(strides(row)) if strided and draw(st.booleans()) else row for row in (k, k, k, n)
    )
    return Problem(
        m,
        n,
        k,
        dtype=draw(st.sampled_from(dtypes)),
        activation=draw(st.sampled_from(activations)),
        layout=layout,
        bias=bias and draw(st.booleans()),
        x_stride=x_stride,
        gate_stride=gate_stride,
        up_stride=gate_stride if layout == "stacked" else up_stride,
        out_stride=out_stride,
        alignment=draw(st.sampled_from(alignments)),
    )


def families() -> st.SearchStrategy[str]:
    """A family of `inputs.FAMILIES`."""
    return st.sampled_from(sorted(FAMILIES))


def seeds() -> st.SearchStrategy[int]:
    """A seed for `inputs.make_inputs`."""
    return st.integers(0, 2**32 - 1)


def assert_bits_equal(actual: Tensor, expected: Tensor) -> None:
    """Every word of two bf16, fp16 or fp32 tensors is the same; NaN equals NaN, -0 differs from +0.

    Raises AssertionError saying how many differ, where first, how far at most, and the values there; ArgumentError if
    shapes, dtypes or devices differ.
    """
    distance = ulp_distance(actual, expected)
    raise_where(differing(actual, expected), "differ", distance, actual, expected)


def assert_within_ulps(actual: Tensor, exact: Exact, max_ulps: float, max_share: float = 0.0) -> None:
    """At most a share (0..1) of outputs is further than max_ulps from the correctly rounded exact result.

    The distance is M1's (`numerics.ulps`). Raises as `assert_bits_equal` does.
    """
    distance = ulps(actual, exact)
    far = distance > max_ulps
    if far.sum() > max_share * far.numel():
        allowed = f" ({max_share:.3%} may)" if max_share else ""
        raise_where(far, f"are over {max_ulps:g} ulps off{allowed}", distance, actual, exact.rounded)


def assert_padding_poisoned(out: Tensor) -> None:
    """Nothing was written past the rows of an `out` from `make_out`: its padding is all NaN still.

    Raises AssertionError naming the first place that was written.
    """
    rows, columns = out.shape
    shape = rows, out.stride(0) - columns
    padding = out.as_strided(shape, out.stride(), out.storage_offset() + columns) if rows else out
    written = (~padding.isnan()).nonzero().tolist()
    if written:
        row, past = written[0]
        raise AssertionError(f"{len(written)} elements of padding written, first {past + 1} past the end of row {row}")


def raise_where(wrong: Tensor, what: str, distance: Tensor, actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError where any output is wrong: that so many `what`, where first, and where farthest.

    wrong: bool; distance: in ulps; both of the shape of actual and expected (bf16, fp16 or fp32).
    """
    places = wrong.nonzero()
    if not len(places):
        return
    first = tuple(places[0].tolist())
    worst = tuple(places[distance[wrong].argmax()].tolist())
    lines = [f"{len(places)} of {wrong.numel()} outputs ({len(places) / wrong.numel():.3%}) {what}"]
    for name, place in (("first", first), ("worst", worst)):
        values = f"{_show(actual[place])}, expected {_show(expected[place])}"
        lines.append(f"{name} at {place}: {values}, {distance[place].item():g} ulps")
    raise AssertionError("\n".join(lines))


def _show(value: Tensor) -> str:
    word = value.view({2: torch.int16, 4: torch.int32}[value.itemsize]).item()
    digits = 2 * value.itemsize
    return f"{value.item():.9g} (0x{int(word) % 16**digits:0{digits}x})"
