// The ring of stages between the producer and the consumers, and the turns that consumers take at the tensor cores.
#pragma once

#include <cutlass/arch/barrier.h>

#include "tile.cuh"

namespace fused_swiglu {

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// Waits, but not for ever: a protocol error becomes an illegal access instead of a hang. (A `trap` here would cost the
// whole kernel its registers: ptxas 13.0 then spills accumulators.)
template <class Barrier>
__device__ __forceinline__ void wait(uint64_t const* barrier, uint32_t parity) {
  for (uint32_t tries = 0; !Barrier::try_wait(barrier, parity); ++tries)
    if (tries == 1u << 26) asm volatile("st.global.u32 [%0], %1;" ::"l"(uint64_t(8)), "r"(0));
}

// A position in the ring; the parity tells whether a stage's barriers have completed an even number of rounds.
struct Position {
  uint32_t stage = 0, round = 0;

  __device__ void next() {
    if (++stage == STAGES) stage = 0, ++round;
  }
  __device__ void skip(uint32_t count) {
    uint32_t at = stage + count;
    stage = at % STAGES, round += at / STAGES;
  }
  __device__ uint32_t filled() const { return round & 1; }
  __device__ uint32_t emptied() const { return ~round & 1; }  // the first round finds every stage empty
};

__device__ __forceinline__ void initialise(Shared& shared) {
  for (int i = 0; i < STAGES; ++i) {
    Full::init(&shared.full[i], 1);
    Empty::init(&shared.empty[i], CLUSTER * TEAM);
  }
  cutlass::arch::fence_barrier_init();
}

// Says to every thread block of the cluster, since each writes into this one's stages, that the stage was read.
__device__ __forceinline__ void release(Shared& shared, uint32_t stage) {
  int thread = threadIdx.x % GROUP;
  if constexpr (CLUSTER == 1) {
    if (thread == 0) Empty::arrive(&shared.empty[stage]);
  } else {
    if (thread < CLUSTER) Empty::arrive(&shared.empty[stage], thread, 1u);
  }
}

// In the pingpong schedule the consumers issue their wgmmas in turn, one phase each; otherwise there is nothing to do.
// Each named barrier is the turn of one consumer: it waits there, the other only arrives.
struct Turns {
  int consumer;

  __device__ void begin() const {  // the first turn is consumer 0's
    if (PINGPONG && consumer == 1) give();
  }
  __device__ void take() const {
    if constexpr (PINGPONG) cutlass::arch::NamedBarrier::sync(2 * GROUP, consumer);
  }
  __device__ void give() const {
    if constexpr (PINGPONG) cutlass::arch::NamedBarrier::arrive(2 * GROUP, consumer ^ 1);
  }
};

// A barrier of one warpgroup's own threads.
__device__ __forceinline__ void sync_warpgroup(int consumer) {
  cutlass::arch::NamedBarrier::sync(GROUP, CONSUMERS + consumer);
}

}  // namespace fused_swiglu
