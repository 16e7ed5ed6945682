"""Device functions that the Triton GEMMs share: which tile comes next, and how a tile is loaded and stored."""

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of the output tile: GROUP tile rows are swept together, so that their weights are read from L2."""
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    inside = tile % per_group
    return first + inside % rows, inside // rows


@triton.jit
def load_tile(
    source, row, column, rows, columns, stride,
    BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """source[row : row + BR, column : column + BC], zero outside [rows, columns].

    source: a descriptor, or a pointer to rows `stride` elements apart.
    """
    if TMA:
        return source.load([row, column])
    else:
        r = row + tl.arange(0, BR)
        c = column + tl.arange(0, BC)
        at = source + r.to(tl.int64)[:, None] * stride + c[None, :]
        return tl.load(at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)


@triton.jit
def load_pair(
    source, row, column, rows, columns, apart, stride, second_stride,
    BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The same tile of two matrices, one above the other: [2 BR, BC].

    source: a descriptor of both, or a pointer to the first; the second starts `apart` elements further on.
    """
    if TMA:
        return source.load([0, row, column]).reshape(2 * BR, BC)
    else:
        i = tl.arange(0, 2 * BR)
        second = i >= BR
        r = row + i % BR
        c = column + tl.arange(0, BC)
        step = tl.where(second, second_stride, stride).to(tl.int64)
        start = tl.where(second, apart, 0).to(tl.int64)
        at = source + (start + r * step)[:, None] + c[None, :]
        return tl.load(at, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0)


@triton.jit
def store_tile(
    target, value, row, column, rows, columns, stride,
    BR: tl.constexpr, BC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rounds to target's dtype and writes the part of the tile that lies inside [rows, columns]."""
    if TMA:
        target.store([row, column], value.to(target.dtype))
    else:
        r = row + tl.arange(0, BR)
        c = column + tl.arange(0, BC)
        at = target + r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(
            at,
            value.to(target.dtype.element_ty),
            mask=(r < rows)[:, None] & (c < columns)[None, :],
        )
