// The compile-time choices of cutlass.evt: what -D gives, its defaults, and what follows from it alone.
#pragma once

#ifndef FS_BM
#define FS_BM 128
#endif
#ifndef FS_BN
#define FS_BN 96
#endif
#ifndef FS_BK
#define FS_BK 64
#endif
#ifndef FS_STAGES
#define FS_STAGES 0
#endif
#ifndef FS_CLUSTER_M
#define FS_CLUSTER_M 1
#endif
#ifndef FS_CLUSTER_N
#define FS_CLUSTER_N 1
#endif
#ifndef FS_PINGPONG
#define FS_PINGPONG 1
#endif
#ifndef FS_SUBTILE
#define FS_SUBTILE 0
#endif
#ifndef FS_DTYPE
#define FS_DTYPE 0
#endif
#ifndef FS_ACTIVATION
#define FS_ACTIVATION 0
#endif
#ifndef FS_RECIPE
#define FS_RECIPE 0
#endif
#ifndef FS_BIAS
#define FS_BIAS 0
#endif
#ifndef FS_PREACTIVATIONS
#define FS_PREACTIVATIONS 0
#endif
#ifndef FS_DUMP
#define FS_DUMP 0
#endif
#ifndef FS_STAMPS
#define FS_STAMPS 0
#endif

#if FS_BN % 32 == 16 && FS_BN > 16
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmmas BN and 2 BN wide; without it CuTe has the common widths
#endif

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "../gate.cuh"

namespace fused_swiglu::evt {

using Element = cute::conditional_t<FS_DTYPE == 0, cutlass::bfloat16_t, cutlass::half_t>;
constexpr auto ACTIVATION = Activation(FS_ACTIVATION);
constexpr auto RECIPE = Recipe(FS_RECIPE);
constexpr bool BIAS = FS_BIAS, PREACTIVATIONS = FS_PREACTIVATIONS, DUMP = FS_DUMP;
constexpr bool PINGPONG = FS_PINGPONG;

// The output tile: of a warpgroup in the pingpong schedule, of both together in the cooperative one. Its accumulator
// tile is BM x 2 BN: gate in the first BN columns, up in the others.
constexpr int BM = FS_BM, BN = FS_BN, BK = FS_BK;
constexpr int TEAM = PINGPONG ? 1 : 2;                  // warpgroups that work on one tile
constexpr int ACCUMULATORS = BM / TEAM * 2 * BN / 128;  // of a thread
constexpr int STAGES = FS_STAGES;                       // of the mainloop; 0: as many as fit
// What the epilogue computes and stores at a time: 64 rows of each warpgroup, SUBTILE columns, one swizzle span wide.
// Narrow ones where registers are short: bias and pre-activations take some for each value of a subtile.
constexpr bool CROWDED = ACCUMULATORS >= 192 && (BIAS || PREACTIVATIONS);
constexpr int SUBTILE = FS_SUBTILE ? FS_SUBTILE : BN % 32 == 0 && !CROWDED ? 32 : 16;
constexpr int SUBTILES_IN_FLIGHT = 2;

constexpr int SHARED_MEMORY = 227 * 1024;  // of a thread block

static_assert(BK == 64, "a row of a stage is one swizzle span of 128 bytes");
static_assert(BM % (64 * TEAM) == 0, "FS_BM is a multiple of 64 for each warpgroup of a tile");
static_assert(BN % 16 == 0 && 2 * BN <= 256, "FS_BN is a multiple of 16, and a wgmma at most 256 wide");
static_assert(ACCUMULATORS <= 208, "the accumulators leave a thread too few registers");
static_assert(BN % (8 * FS_CLUSTER_M) == 0 && BM % (8 * FS_CLUSTER_N) == 0,
              "each thread block of a cluster loads whole groups of 8 rows");
static_assert(BN % SUBTILE == 0 && (SUBTILE == 16 || SUBTILE == 32 || SUBTILE == 64),
              "FS_SUBTILE is 16, 32 or 64 and divides FS_BN");

using OutputTile = cute::Shape<cute::Int<BM>, cute::Int<BN>, cute::Int<BK>>;
using AccumulatorTile = cute::Shape<cute::Int<BM>, cute::Int<2 * BN>, cute::Int<BK>>;
using Cluster = cute::Shape<cute::Int<FS_CLUSTER_M>, cute::Int<FS_CLUSTER_N>, cute::_1>;
using Subtile = cute::Shape<cute::Int<64 * TEAM>, cute::Int<SUBTILE>>;
using RowMajor = cute::Stride<int64_t, cute::_1, cute::_0>;  // of all matrices; the last mode is a batch of one

}  // namespace fused_swiglu::evt
