// The compile-time choices of the kernels that are written on CuTe's atoms: what -D gives, and what follows from it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/config.hpp>

#include <cstdint>
#include <type_traits>

#include "options.cuh"

namespace fused_swiglu {

using Element = std::conditional_t<BF16, __nv_bfloat16, __half>;

// Passes over K per output tile: 1 with gate and up in one wgmma of width 2 BN, or 2, gate and then up, of width BN.
constexpr int PASSES = FS_PASSES;
// Thread blocks that share a tile of the weights (they lie along m) or of x (along n), each loading its part for all.
constexpr int CLUSTER = FS_CLUSTER_M * FS_CLUSTER_N;
constexpr bool SHARES_WEIGHTS = FS_CLUSTER_M > 1, SHARES_X = FS_CLUSTER_N > 1;
static_assert(FS_CLUSTER_M == 1 || FS_CLUSTER_N == 1, "a cluster lies along one dimension");

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * GROUP;
constexpr int TEAM = PINGPONG ? 1 : CONSUMERS;  // warpgroups that work on one tile
constexpr int SLABS = BM / (64 * TEAM);         // m64 blocks of one warpgroup
constexpr int WIDTH = FS_WIDTH;                 // of a wgmma
static_assert(WIDTH == (PASSES == 1 ? 2 * BN : BN), "FS_WIDTH is a literal, since names are pasted with it");
static_assert(BM % (64 * TEAM) == 0 && SLABS >= 1, "bm is a multiple of 64 per warpgroup");
static_assert(WIDTH <= 256, "a wgmma is at most 256 wide");
static_assert(SLABS * (PASSES == 1 ? WIDTH : 2 * WIDTH) / 2 <= 208, "the accumulators leave a thread too few registers");
static_assert((SHARES_WEIGHTS ? BN : BM) % (8 * CLUSTER) == 0, "each thread block of a cluster loads whole 8-row groups");

// Columns that go through shared memory to the output at a time, in panels whose rows are one swizzle span.
constexpr int CHUNK = BN <= 128 ? BN : BN / 2;
constexpr int PANEL = CHUNK % 64 == 0 ? 64 : CHUNK % 32 == 0 ? 32 : 16;
static_assert(CHUNK % 16 == 0, "bn is a multiple of 16, over 128 of 32");

constexpr int A_BYTES = BM * BK * 2, B_BYTES = WIDTH * BK * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

struct alignas(1024) Shared {
  Element a[STAGES][BM * BK];
  Element b[STAGES][WIDTH * BK];
  Element out[CONSUMERS][64 * CHUNK];
  uint64_t full[STAGES], empty[STAGES];
};
static_assert(A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0 && (64 * PANEL * 2) % 1024 == 0, "swizzled tiles start at 1024");
static_assert(sizeof(Shared) <= 227 * 1024, "an SM has 227 KiB of shared memory for a thread block");

}  // namespace fused_swiglu
