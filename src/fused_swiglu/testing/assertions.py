"""Assertions on outputs, whose failure says how many are wrong, in which rows and columns, and how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..numerics import differing, ulp_distance, ulps
from ..reference import Exact

SHOWN = 5  # coordinates in a message


def assert_bits_equal(actual: Tensor, expected: Tensor) -> None:
    """Every word of two bf16, fp16 or fp32 tensors is the same; NaN equals NaN, -0 differs from +0.

    Raises AssertionError saying how many differ, where, how far at most, and the values there; ArgumentError if
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


def assert_batch_invariant(
    kernel: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int] = (1, 7, 64, 4096)
) -> None:
    """A row's output words are the same whatever rows are computed beside it.

    kernel: gives the output [m, n] (bf16, fp16 or fp32) for any rows of x[m, k], its weights fixed. sizes: how many
    rows it is then given, each time around the first, the middle and the last; those less than m.
    Raises as `assert_bits_equal` does, naming the size under which most words change; ArgumentError for one row alone.
    """
    m = len(x)
    tried = [size for size in sizes if 0 < size < m]
    if not tried:
        raise ArgumentError("x", f"has {m} rows, of {tuple(sizes)} none is less", "give more rows")
    whole = kernel(x).clone()
    rows = sorted({0, m // 2, m - 1})
    expected = whole[rows]
    found = {}
    for size in tried:
        tops = [min(row, m - size) for row in rows]
        words = [kernel(x[top : top + size])[row - top].clone() for row, top in zip(rows, tops, strict=True)]
        found[size] = torch.stack(words)
    wrong = {size: differing(actual, expected) for size, actual in found.items()}
    worst = max(tried, key=lambda size: int(wrong[size].sum()))
    among = f"of rows {', '.join(map(str, rows))} change where only {worst} of {m} rows are computed"
    distance = ulp_distance(found[worst], expected)
    raise_where(wrong[worst], among, distance, found[worst], expected, rows=rows)


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


def raise_where(
    wrong: Tensor, what: str, distance: Tensor, actual: Tensor, expected: Tensor, rows: Sequence[int] | None = None
) -> None:
    """Raises AssertionError where any output is wrong: how many `what`, within which rows and columns, the first
    coordinates, and the values at the first and at the farthest.

    wrong: bool; distance: in ulps; both of the shape of actual and expected (bf16, fp16 or fp32). rows: what to call
    the rows; their numbers by default.
    """
    places = wrong.nonzero()
    if not len(places):
        return

    def called(place: Sequence[int]) -> tuple[int, ...]:
        return (place[0] if rows is None else rows[place[0]], *place[1:])

    named = [called(place) for place in places[:SHOWN].tolist()]
    ranges = []
    for name, numbers in zip(("rows", "columns"), places.T, strict=False):
        low, high = (called([int(n)])[0] if name == "rows" else int(n) for n in (numbers.min(), numbers.max()))
        ranges.append(f"{len(numbers.unique())} {name} ({low} to {high})")
    lines = [
        f"{len(places)} of {wrong.numel()} outputs ({len(places) / wrong.numel():.3%}) {what}",
        f"in {' and '.join(ranges)}, first {', '.join(map(str, named))}{', ...' if len(places) > SHOWN else ''}",
    ]
    worst = places[distance[wrong].argmax()].tolist()
    for name, place in (("first", places[0].tolist()), ("worst", worst)):
        here = tuple(place)
        values = f"{_show(actual[here])}, expected {_show(expected[here])}"
        lines.append(f"{name} at {called(place)}: {values}, {distance[here].item():g} ulps")
    raise AssertionError("\n".join(lines))


def _show(value: Tensor) -> str:
    word = value.view({2: torch.int16, 4: torch.int32}[value.itemsize]).item()
    digits = 2 * value.itemsize
    return f"{value.item():.9g} (0x{int(word) % 16**digits:0{digits}x})"
