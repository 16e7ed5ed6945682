// The options that every kernel has, from -D: activation, recipe, what is added and written besides, debug builds.
#pragma once

#include "gate.cuh"

#ifndef FS_DUMP
#define FS_DUMP 0
#endif
#ifndef FS_STAMPS
#define FS_STAMPS 0
#endif

namespace fused_swiglu {

constexpr bool BF16 = FS_DTYPE == 0;  // else fp16
constexpr auto ACTIVATION = Activation(FS_ACTIVATION);
constexpr auto RECIPE = Recipe(FS_RECIPE);
constexpr bool BIAS = FS_BIAS, PREACTIVATIONS = FS_PREACTIVATIONS, DUMP = FS_DUMP, STAMPS = FS_STAMPS;

// Output tile: of a warpgroup in the pingpong schedule, of both together in the cooperative one.
constexpr int BM = FS_BM, BN = FS_BN;
constexpr int BK = 64;  // one swizzle span of 128 bytes
constexpr int STAGES = FS_STAGES;
constexpr bool PINGPONG = FS_PINGPONG;

}  // namespace fused_swiglu
