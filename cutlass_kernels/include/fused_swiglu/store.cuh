// From a warpgroup's registers through shared memory to the output.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "params.cuh"
#include "ring.cuh"

namespace fused_swiglu {

// Rounds once, to nearest even.
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t pair;
  if constexpr (BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Stores 64 x CHUNK outputs at [row, column]. values(j, v) fills v with this thread's elements of column blocks j and
// j + 1 (see Accumulators).
template <class Values>
__device__ __forceinline__ void store_chunk(Shared& shared, int consumer, CUtensorMap const& map, int row, int column,
                                            Values values) {
  constexpr int SPANS = PANEL / 8 - 1;  // TMA's swizzle: 16-byte piece i of span s lies at i ^ s, modulo the pieces
  int thread = threadIdx.x % GROUP, lane = thread % 32;
  char* buffer = reinterpret_cast<char*>(shared.out[consumer]);
  int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  if (warp == 0) cute::tma_store_wait<0>();  // the last chunk has been read
  sync_warpgroup(consumer);
  // A lane gives the address of one row of one of four 8 x 8 matrices: two down, two across.
  int at_row = thread / 32 * 16 + lane % 16;
  CUTE_UNROLL
  for (int j = 0; j < CHUNK / 8; j += 2) {
    int panel = j * 8 / PANEL, across = (j * 8 % PANEL + lane / 16 * 8) * 2;
    int plain = at_row * PANEL * 2 + across;
    int byte = panel * 64 * PANEL * 2 + (plain ^ ((plain >> 7 & SPANS) << 4));
    float v[8];
    values(j, v);
    cute::SM90_U32x4_STSM_N::copy(round_pair(v[0], v[1]), round_pair(v[2], v[3]), round_pair(v[4], v[5]),
                                  round_pair(v[6], v[7]), *reinterpret_cast<cute::uint128_t*>(buffer + byte));
  }
  cute::tma_store_fence();
  sync_warpgroup(consumer);
  if (warp == 0 && cute::elect_one_sync()) {
    CUTE_UNROLL
    for (int panel = 0; panel < CHUNK / PANEL; ++panel)
      cute::SM90_TMA_STORE_2D::copy(&map, buffer + panel * 64 * PANEL * 2, column + panel * PANEL, row);
    cute::tma_store_arrive();
  }
}

// Stores in flight read shared memory; a thread block must not leave before.
__device__ __forceinline__ void finish_stores() {
  if (threadIdx.x % GROUP < 32) cute::tma_store_wait<0>();
}

}  // namespace fused_swiglu
