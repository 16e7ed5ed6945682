// One wgmma on tiles of 128-byte rows in shared memory: its accumulators, its operands' descriptors.
#pragma once

#include "tile.cuh"

#if FS_WIDTH != 32 && FS_WIDTH != 64 && FS_WIDTH != 96 && FS_WIDTH != 128 && FS_WIDTH != 192 && FS_WIDTH != 256
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // the widths between, in a header of their own
#endif
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <utility>

namespace fused_swiglu {

using cute::warpgroup_arrive, cute::warpgroup_commit_batch, cute::warpgroup_wait;
namespace GMMA = cute::SM90::GMMA;

#define FS_PASTE(width, types) MMA_64x##width##x16_##types##_SS<GMMA::Major::K, GMMA::Major::K>
#define FS_ATOM(width, types) FS_PASTE(width, types)
using Atom = std::conditional_t<BF16, GMMA::FS_ATOM(FS_WIDTH, F32BF16BF16), GMMA::FS_ATOM(FS_WIDTH, F32F16F16)>;

// What one pass accumulates: of thread t, slab s and column block j, element 4 j + i is row
// 16 (t / 32) + t % 32 / 4 + 8 (i / 2) and column 8 j + 2 (t % 4) + i % 2 of that slab.
struct Accumulators {
  float slab[SLABS][WIDTH / 2];

  __device__ float& at(int e) { return slab[e / (WIDTH / 2)][e % (WIDTH / 2)]; }
};

// Keeps the compiler from moving the accumulators about while wgmmas are in flight.
__device__ __forceinline__ void fence(Accumulators& sums) {
  CUTE_UNROLL
  for (int s = 0; s < SLABS; ++s) {
    CUTE_UNROLL
    for (int e = 0; e < WIDTH / 2; ++e) cute::warpgroup_fence_operand(sums.slab[s][e]);
  }
}

// Of a K-major tile of 64 columns with TMA's 128-byte swizzle: groups of 8 rows follow each other.
__device__ __forceinline__ uint64_t descriptor(Element const* tile) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(tile) >> 4;
  d.bitfield.leading_byte_offset_ = 1;  // not used with a swizzle
  d.bitfield.stride_byte_offset_ = 1024 >> 4;
  d.bitfield.layout_type_ = 1;  // 128 bytes
  return d;
}

constexpr int STEP_K = 32 >> 4, STEP_M = 64 * BK * 2 >> 4;  // to the next 16 columns, the next 64 rows, in a descriptor

template <size_t... I>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sums)[WIDTH / 2], bool add,
                                         std::index_sequence<I...>) {
  Atom::fma(a, b, sums[I]..., add ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
}

// sums (+)= a b^T; `add`: false starts from zero.
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sums)[WIDTH / 2], bool add) {
  multiply(a, b, sums, add, std::make_index_sequence<WIDTH / 2>{});
}

}  // namespace fused_swiglu
