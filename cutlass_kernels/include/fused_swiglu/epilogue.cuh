// Steps on finished accumulators, which finish.cuh puts together: dump, bias, store.
#pragma once

#include "mainloop.cuh"
#include "store.cuh"

namespace fused_swiglu {

// Adds the biases in fp32, before all else. sum(s, j, i) is a reference to an accumulator.
template <class Sum>
__device__ __forceinline__ void add_bias(Element const* bias, int column, int n, Sum sum) {
  if constexpr (BIAS) {
    CUTE_UNROLL
    for (int j = 0; j < BN / 8; ++j) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int at = column + j * 8 + threadIdx.x % 4 * 2 + i;
        float add = at < n ? float(bias[at]) : 0.0f;
        CUTE_UNROLL
        for (int s = 0; s < SLABS; ++s) {
          sum(s, j, i) = sum(s, j, i) + add;
          sum(s, j, i + 2) = sum(s, j, i + 2) + add;
        }
      }
    }
  }
}

// Row of the output at which slab s of this warpgroup begins.
__device__ __forceinline__ int slab_row(Tile tile, int consumer, int s) {
  return tile.row + (s * TEAM + (PINGPONG ? 0 : consumer)) * 64;
}

// For debug builds: the accumulators as they are, columns from `column` on of a [m, 2n] matrix.
template <class Sum>
__device__ __forceinline__ void dump(Params const& params, Tile tile, int consumer, int offset, Sum sum) {
  if constexpr (DUMP) {
    int thread = threadIdx.x % GROUP;
    CUTE_UNROLL
    for (int s = 0; s < SLABS; ++s) {
      CUTE_UNROLL
      for (int e = 0; e < BN / 2; ++e) {
        int row = slab_row(tile, consumer, s) + thread / 32 * 16 + thread % 32 / 4 + e % 4 / 2 * 8;
        int column = tile.column + e / 4 * 8 + thread % 4 * 2 + e % 2;
        if (row < params.m && column < params.n)
          params.sums[int64_t(row) * 2 * params.n + offset + column] = sum(s, e / 4, e % 4);
      }
    }
  }
}

// values(s, j, v): fills v with what to store of slab s, column blocks j and j + 1, four elements each.
template <class Values>
__device__ __forceinline__ void store_tile(Shared& shared, int consumer, CUtensorMap const& map, Tile tile, Values values) {
  CUTE_UNROLL
  for (int s = 0; s < SLABS; ++s) {
    CUTE_UNROLL
    for (int c = 0; c < BN; c += CHUNK)
      store_chunk(shared, consumer, map, slab_row(tile, consumer, s), tile.column + c,
                  [&](int j, float (&v)[8]) { values(s, c / 8 + j, v); });
  }
}

}  // namespace fused_swiglu
