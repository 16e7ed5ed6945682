// Time stamps of a debug build of the kernels on CuTe's atoms.
#pragma once

#include "events.cuh"
#include "params.cuh"

namespace fused_swiglu {

// One per role, written in order by one thread.
struct Stamps {
  uint64_t* next;
  int left;

  __device__ Stamps(Params const& params, int role)
      : next(STAMPS ? params.stamps + (int64_t(blockIdx.x) * ROLES + role) * STAMPS_OF_A_ROLE : nullptr),
        left(STAMPS ? STAMPS_OF_A_ROLE - 1 : 0) {}

  __device__ __forceinline__ void operator()(Event event) {
    if constexpr (STAMPS) {
      if (left > 0 && threadIdx.x % GROUP == 0) *next++ = uint64_t(clock64()) << 8 | uint64_t(event), --left;
    }
  }
};

}  // namespace fused_swiglu
