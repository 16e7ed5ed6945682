// Time stamps of a debug build: when each role of a thread block did what, by the SM's clock.
#pragma once

#include "params.cuh"

namespace fused_swiglu {

// Each names what ends at the stamp.
enum class Event : uint8_t { none, turn_taken, gate_issued, gate_done, swished, up_issued, up_done, stored, loading, loaded };

constexpr int STAMPS_OF_A_ROLE = 256;

// One per role: consumer 0, consumer 1, producer. Written as cycles << 8 | event, in order, by one thread.
struct Stamps {
  uint64_t* next;
  int left;

  __device__ Stamps(Params const& params, int role)
      : next(STAMPS ? params.stamps + (int64_t(blockIdx.x) * (CONSUMERS + 1) + role) * STAMPS_OF_A_ROLE : nullptr),
        left(STAMPS ? STAMPS_OF_A_ROLE : 0) {}

  __device__ __forceinline__ void operator()(Event event) {
    if constexpr (STAMPS) {
      if (left > 0 && threadIdx.x % GROUP == 0) *next++ = uint64_t(clock64()) << 8 | uint64_t(event), --left;
    }
  }
};

}  // namespace fused_swiglu
