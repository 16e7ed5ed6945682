// The compile-time choices of cutlass.evt: what follows from -D alone.
#pragma once

#if FS_BN % 32 == 16 && FS_BN > 16
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmmas BN and 2 BN wide; without it CuTe has the common widths
#endif

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "../options.cuh"

namespace fused_swiglu::evt {

using Element = cute::conditional_t<BF16, cutlass::bfloat16_t, cutlass::half_t>;

// The accumulator tile is BM x 2 BN: gate in the first BN columns, up in the others. STAGES 0: as many as fit.
constexpr int TEAM = PINGPONG ? 1 : 2;                  // warpgroups that work on one tile
constexpr int ACCUMULATORS = BM / TEAM * 2 * BN / 128;  // of a thread
// What the epilogue computes and stores at a time: 64 rows of each warpgroup, SUBTILE columns, one swizzle span wide.
// Narrow ones where registers are short: bias and pre-activations take some for each value of a subtile.
constexpr bool CROWDED = ACCUMULATORS >= 192 && (BIAS || PREACTIVATIONS);
constexpr int SUBTILE = FS_SUBTILE ? FS_SUBTILE : BN % 32 == 0 && !CROWDED ? 32 : 16;
constexpr int SUBTILES_IN_FLIGHT = 2;

constexpr int SHARED_MEMORY = 227 * 1024;  // of a thread block

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
