"""Hypothesis strategies: problems at the boundaries where kernels fail, families of inputs, seeds, sparse edits."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ..errors import ArgumentError
from ..inputs import FAMILIES
from ..problem import LAYOUTS, Problem
from .editing import VALUES, Edit

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


def edits(problem: Problem, most: int = 3) -> st.SearchStrategy[list[Edit]]:
    """One to `most` places of x, w_gate and w_up, the last row and column often among them, and what to put there: for
    `apply_edits`. The problem has a row of x at least."""
    places = [
        st.tuples(
            st.just(operand),
            st.integers(0, rows - 1) | st.just(rows - 1),
            st.integers(0, problem.k - 1) | st.just(problem.k - 1),
            st.sampled_from(VALUES),
        )
        for operand, rows in (("x", problem.m), ("gate", problem.n), ("up", problem.n))
    ]
    return st.lists(st.one_of(places), min_size=1, max_size=most, unique_by=lambda edit: edit[:3])
