// What a launch passes to a kernel.
#pragma once

#include <cuda.h>

#include "raster.cuh"

namespace fused_swiglu {

struct Params {
  CUtensorMap x, gate, up;
  CUtensorMap out, second;  // `second`: the up half of a control's [m, 2n] output
  CUtensorMap gate_preactivations, up_preactivations;
  Element const *bias_gate, *bias_up;
  float* sums;       // [m, 2n], where a debug build puts its accumulators
  uint64_t* stamps;  // [thread blocks, ROLES, STAMPS_OF_A_ROLE], where another puts its time stamps
  int m, n, blocks;  // blocks: of BK along k
  int once;          // 1, which the compiler does not know
  Raster raster;
};

}  // namespace fused_swiglu
