// The order in which a persistent grid visits the output tiles.
#pragma once

#include "tile.cuh"

namespace fused_swiglu {

struct Tile {
  int row, column;  // of the output
};

// Clusters of tiles are numbered down bands that are `band` cluster rows high, so that what runs at one time shares
// both its rows of x and its rows of the weights in L2.
struct Raster {
  int rows, columns, band;  // in clusters of tiles

  __host__ __device__ int count() const { return rows * columns; }

  __device__ Tile tile(int index, int rank) const {
    int per_band = band * columns;
    int first = index / per_band * band, within = index % per_band;
    int height = min(band, rows - first);
    int row = first + within % height, column = within / height;
    return {(row * FS_CLUSTER_M + (SHARES_WEIGHTS ? rank : 0)) * BM,
            (column * FS_CLUSTER_N + (SHARES_X ? rank : 0)) * BN};
  }
};

}  // namespace fused_swiglu
