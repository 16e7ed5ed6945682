// One pass over K: the producer's TMA loads into the ring, and a consumer's wgmmas out of it.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "params.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace fused_swiglu {

using namespace cute;

enum class Operand { gate, up, both };

// Loads `rows` rows of a K-major operand at `row` into `to`; shared by the cluster, each block loads its part for all.
template <int ROWS, bool SHARED>
__device__ __forceinline__ void load_box(CUtensorMap const& map, uint64_t* full, Element* to, int k, int row, int rank) {
  auto hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  if constexpr (SHARED) {
    constexpr int PART = ROWS / CLUSTER;
    SM90_TMA_LOAD_MULTICAST_2D::copy(&map, full, uint16_t((1 << CLUSTER) - 1), hint, to + rank * PART * BK, k,
                                     row + rank * PART);
  } else {
    SM90_TMA_LOAD_2D::copy(&map, full, hint, to, k, row);
  }
}

// By one whole warp: fills the stages of one pass. Its lanes stay together, and one that is elected issues, so that all
// operands of a TMA load are known to be uniform; a branch for one thread alone would make each load a loop.
template <Operand WHICH>
__device__ __forceinline__ void load(Shared& shared, Params const& params, Position& at, Tile tile, int rank) {
  for (int block = 0; block < params.blocks; ++block, at.next()) {
    wait<Empty>(&shared.empty[at.stage], at.emptied());
    if (cute::elect_one_sync()) {
      uint64_t* full = &shared.full[at.stage];
      Full::arrive_and_expect_tx(full, STAGE_BYTES);
      int k = block * BK;
      load_box<BM, SHARES_X>(params.x, full, shared.a[at.stage], k, tile.row, rank);
      Element* b = shared.b[at.stage];
      if constexpr (WHICH != Operand::up) load_box<BN, SHARES_WEIGHTS>(params.gate, full, b, k, tile.column, rank);
      if constexpr (WHICH != Operand::gate)
        load_box<BN, SHARES_WEIGHTS>(params.up, full, WHICH == Operand::up ? b : b + BN * BK, k, tile.column, rank);
    }
  }
}

// Issues the wgmmas of one stage; `fresh`: starts from zero instead of adding. `consumer` says which rows are its own:
// all in the pingpong schedule, every other block of 64 in the cooperative one.
__device__ __forceinline__ void issue(Shared& shared, int consumer, uint32_t stage, bool fresh, Accumulators& sums) {
  uint64_t a = descriptor(shared.a[stage]) + (PINGPONG ? 0 : consumer * STEP_M), b = descriptor(shared.b[stage]);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < BK / 16; ++k) {
    CUTE_UNROLL
    for (int s = 0; s < SLABS; ++s)
      multiply(a + s * TEAM * STEP_M + k * STEP_K, b + k * STEP_K, sums.slab[s], !fresh || k > 0);
  }
  warpgroup_commit_batch();
}

// Blocks `first` to `blocks` of one chain over ascending k. `all_issued` runs once the last wgmma is on its way, before
// it is waited for.
template <class AllIssued>
__device__ __forceinline__ void accumulate(Shared& shared, int consumer, Position& at, int first, int blocks,
                                           Accumulators& sums, AllIssued all_issued) {
  fence(sums);
  uint32_t before = 0;
  for (int block = first; block < blocks; ++block) {
    wait<Full>(&shared.full[at.stage], at.filled());
    issue(shared, consumer, at.stage, block == 0, sums);
    if (block > first) {
      warpgroup_wait<1>();
      release(shared, before);
    }
    before = at.stage;
    at.next();
  }
  all_issued();
  warpgroup_wait<0>();
  fence(sums);
  if (first < blocks) release(shared, before);
}

}  // namespace fused_swiglu
