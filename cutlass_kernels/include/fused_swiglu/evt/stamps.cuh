// Time stamps of a debug build of cutlass.evt.
#pragma once

#include "../events.cuh"
#include "config.cuh"

namespace fused_swiglu::evt {

#if FS_STAMPS
__device__ uint64_t* stamps;  // set when a launch is bound
#endif

// By one thread of a role. CUTLASS's collectives keep nothing of their own between tiles, so a role's stamps are counted
// in its last entry.
__device__ __forceinline__ void stamp(int role, Event event) {
#if FS_STAMPS
  int64_t block = blockIdx.x + int64_t(gridDim.x) * blockIdx.y;
  uint64_t* mine = stamps + (block * ROLES + role) * STAMPS_OF_A_ROLE;
  auto count = reinterpret_cast<unsigned long long*>(mine + STAMPS_OF_A_ROLE - 1);
  unsigned long long at = atomicAdd(count, 1ull);
  if (at < STAMPS_OF_A_ROLE - 1) mine[at] = uint64_t(clock64()) << 8 | uint64_t(event);
#endif
}

// By a consumer: its first thread stamps. CUTLASS's kernels have their producer in warpgroup 0.
__device__ __forceinline__ void stamp(Event event) {
#if FS_STAMPS
  if (threadIdx.x % 128 == 0) stamp(int(threadIdx.x) / 128 - 1, event);
#endif
}

}  // namespace fused_swiglu::evt
