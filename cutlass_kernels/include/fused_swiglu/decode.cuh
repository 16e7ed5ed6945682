// Few tokens: the weights are operand A, streamed once from memory, and the tokens operand B of a narrow wgmma.
//
// role      threads  does
// producer  32       TMA loads of x and of the rows of both weights, as far ahead as shared memory reaches
// consumer  128      wgmmas on gate and on up rows; activation, product, rounding; stores
//
// A thread block takes every gridDim-th tile of FEATURES rows of the weights and TOKENS rows of x. Gate and up have an
// accumulator each, whose elements are of the same place in one thread. The sum over k is the chain of all kernels:
// what is A and what is B does not change it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "gate.cuh"
#include "launch.cuh"

#ifndef FS_DUMP
#define FS_DUMP 0
#endif

namespace fused_swiglu {

using namespace cute;

constexpr bool BF16 = FS_DTYPE == 0;  // else fp16
constexpr auto ACTIVATION = Activation(FS_ACTIVATION);
constexpr auto RECIPE = Recipe(FS_RECIPE);
constexpr bool BIAS = FS_BIAS, PREACTIVATIONS = FS_PREACTIVATIONS, DUMP = FS_DUMP;
using Element = std::conditional_t<BF16, __nv_bfloat16, __half>;

constexpr int TOKENS = FS_BM;                // of a tile: the width of a wgmma
constexpr int SLABS = FS_SLABS;              // wgmmas of 64 rows for either half of a tile's features
constexpr int BK = 64;                       // one swizzle span of 128 bytes
constexpr int CONSUMER = 128, THREADS = CONSUMER + 32;
constexpr int SHARED_MEMORY = 227 * 1024;
constexpr int MOST_STAGES = 32;
static_assert(TOKENS == 8 || TOKENS == 16 || TOKENS == 32 || TOKENS == 64, "the widths of a wgmma that CuTe has");
static_assert(SLABS == 1 || SLABS == 2, "64 or 128 features");

struct Params {
  CUtensorMap x, gate, up;
  Element *out, *preactivations;
  Element const *bias_gate, *bias_up;
  float* sums;
  int64_t out_stride, preactivations_stride;
  int m, n, blocks;         // blocks: of BK along k
  int features;             // of a tile: a multiple of 8, at most 64 SLABS
  int token_tiles, tiles;   // along m; in all
  int stages, stage_bytes;  // of the ring: features rows of gate, as many of up, TOKENS rows of x
};

// Behind the ring, which begins at an address that is a multiple of 1024.
struct Barriers {
  uint64_t full[MOST_STAGES], empty[MOST_STAGES];
};

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

// Waits, but not for ever: a protocol error becomes an illegal access instead of a hang.
template <class Barrier>
__device__ __forceinline__ void wait(uint64_t const* barrier, uint32_t parity) {
  for (uint32_t tries = 0; !Barrier::try_wait(barrier, parity); ++tries)
    if (tries == 1u << 26) asm volatile("st.global.u32 [%0], %1;" ::"l"(uint64_t(8)), "r"(0));
}

struct Position {
  int stage = 0;
  uint32_t parity = 0;  // of the round: even, odd
  __device__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

struct Tile {
  int token, feature;  // the first
};
__device__ __forceinline__ Tile tile_at(Params const& params, int index) {
  return {index % params.token_tiles * TOKENS, index / params.token_tiles * params.features};
}

// By one whole warp; see mainloop.cuh for why. The weights are read once and need not stay in L2; x is read by all.
__device__ __forceinline__ void produce(Params const& params, char* ring, Barriers& barriers) {
  Position at;
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    Tile tile = tile_at(params, index);
    for (int block = 0; block < params.blocks; ++block, at.next(params.stages)) {
      wait<Empty>(&barriers.empty[at.stage], at.parity ^ 1);
      if (cute::elect_one_sync()) {
        uint64_t* full = &barriers.full[at.stage];
        Full::arrive_and_expect_tx(full, params.stage_bytes);
        char* gate = ring + at.stage * params.stage_bytes;
        char* up = gate + params.features * BK * 2;
        auto once = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_FIRST);
        auto kept = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_LAST);
        SM90_TMA_LOAD_2D::copy(&params.gate, full, once, gate, block * BK, tile.feature);
        SM90_TMA_LOAD_2D::copy(&params.up, full, once, up, block * BK, tile.feature);
        SM90_TMA_LOAD_2D::copy(&params.x, full, kept, up + params.features * BK * 2, block * BK, tile.token);
      }
    }
  }
}

namespace GMMA = cute::SM90::GMMA;
#define FS_PASTE(width, types) MMA_64x##width##x16_##types##_SS<GMMA::Major::K, GMMA::Major::K>
#define FS_ATOM(width, types) FS_PASTE(width, types)
using Atom = std::conditional_t<BF16, GMMA::FS_ATOM(FS_BM, F32BF16BF16), GMMA::FS_ATOM(FS_BM, F32F16F16)>;

// Of thread t, element 4 j + i is feature 16 (t / 32) + t % 32 / 4 + 8 (i / 2) of a slab and token 8 j + 2 (t % 4) + i % 2.
struct Accumulators {
  float slab[SLABS][TOKENS / 2];
};

__device__ __forceinline__ void fence(Accumulators& sums) {
  CUTE_UNROLL
  for (int s = 0; s < SLABS; ++s) {
    CUTE_UNROLL
    for (int e = 0; e < TOKENS / 2; ++e) cute::warpgroup_fence_operand(sums.slab[s][e]);
  }
}

// Of K-major rows of 128 bytes with TMA's 128-byte swizzle. A slab may reach beyond a tile's features, into what lies
// behind them: its rows are independent, and those are not used.
__device__ __forceinline__ uint64_t descriptor(char const* rows) {
  cute::GmmaDescriptor d;
  d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(rows) >> 4;
  d.bitfield.leading_byte_offset_ = 1;  // not used with a swizzle
  d.bitfield.stride_byte_offset_ = 1024 >> 4;
  d.bitfield.layout_type_ = 1;  // 128 bytes
  return d;
}

template <size_t... I>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sums)[TOKENS / 2], bool add,
                                         std::index_sequence<I...>) {
  Atom::fma(a, b, sums[I]..., add ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero);
}

__device__ __forceinline__ void issue(Params const& params, char const* stage, bool fresh, Accumulators& gates,
                                      Accumulators& ups) {
  constexpr int STEP_K = 32 >> 4, STEP_M = 64 * BK * 2 >> 4;
  constexpr auto ALL = std::make_index_sequence<TOKENS / 2>{};
  int half = params.features * BK * 2;
  uint64_t gate = descriptor(stage), up = descriptor(stage + half), x = descriptor(stage + 2 * half);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < BK / 16; ++k) {
    CUTE_UNROLL
    for (int s = 0; s < SLABS; ++s) {
      multiply(gate + s * STEP_M + k * STEP_K, x + k * STEP_K, gates.slab[s], !fresh || k > 0, ALL);
      multiply(up + s * STEP_M + k * STEP_K, x + k * STEP_K, ups.slab[s], !fresh || k > 0, ALL);
    }
  }
  cute::warpgroup_commit_batch();
}

__device__ __forceinline__ void accumulate(Params const& params, char const* ring, Barriers& barriers, Position& at,
                                           Accumulators& gates, Accumulators& ups) {
  fence(gates), fence(ups);
  int before = 0;
  for (int block = 0; block < params.blocks; ++block) {
    wait<Full>(&barriers.full[at.stage], at.parity);
    issue(params, ring + at.stage * params.stage_bytes, block == 0, gates, ups);
    if (block > 0) {
      cute::warpgroup_wait<1>();
      if (threadIdx.x == 0) Empty::arrive(&barriers.empty[before]);
    }
    before = at.stage;
    at.next(params.stages);
  }
  cute::warpgroup_wait<0>();
  fence(gates), fence(ups);
  if (threadIdx.x == 0) Empty::arrive(&barriers.empty[before]);
}

// Feature within the tile of element e of slab s, and its token.
__device__ __forceinline__ int feature_of(int s, int e) {
  return s * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + e % 4 / 2 * 8;
}
__device__ __forceinline__ int token_of(int e) { return e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2; }

__device__ __forceinline__ void dump(Params const& params, Tile tile, int offset, Accumulators const& sums) {
  if constexpr (DUMP) {
    CUTE_UNROLL
    for (int s = 0; s < SLABS; ++s) {
      CUTE_UNROLL
      for (int e = 0; e < TOKENS / 2; ++e) {
        int feature = feature_of(s, e), token = tile.token + token_of(e);
        if (feature < params.features && tile.feature + feature < params.n && token < params.m)
          params.sums[int64_t(token) * 2 * params.n + offset + tile.feature + feature] = sums.slab[s][e];
      }
    }
  }
}

// In fp32, before all else.
__device__ __forceinline__ void add_bias(Params const& params, Element const* bias, Tile tile, Accumulators& sums) {
  if constexpr (BIAS) {
    CUTE_UNROLL
    for (int s = 0; s < SLABS; ++s) {
      CUTE_UNROLL
      for (int i = 0; i < 4; i += 2) {
        int feature = tile.feature + feature_of(s, i);
        float add = feature < params.n ? float(bias[feature]) : 0.0f;
        CUTE_UNROLL
        for (int e = i; e < TOKENS / 2; e += 4) {
          sums.slab[s][e] = sums.slab[s][e] + add;
          sums.slab[s][e + 1] = sums.slab[s][e + 1] + add;
        }
      }
    }
  }
}

// Rounds once, to nearest even.
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t pair;
  if constexpr (BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void sync_consumer() { cutlass::arch::NamedBarrier::sync(CONSUMER, 0); }

// Rounds, turns the tile over in shared memory, where a row is a token, and writes it in pieces of 16 bytes.
__device__ __forceinline__ void store(Params const& params, char* buffer, Tile tile, Accumulators const& values,
                                      Element* to, int64_t stride) {
  int features = params.features, pitch = features * 2;
  sync_consumer();  // the last tile has been read
  CUTE_UNROLL
  for (int s = 0; s < SLABS; ++s) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int feature = __shfl_sync(0xffffffff, s * 64 + int(threadIdx.x) / 32 * 16 + half * 8, 0);
      if (feature >= features) continue;
      CUTE_UNROLL
      for (int j = 0; j < TOKENS / 8; ++j) {
        // A lane gives the address of one row of the 8 x 8 matrix, a token.
        char* row = buffer + (j * 8 + threadIdx.x % 8) * pitch + feature * 2;
        cute::SM90_U16x2_STSM_T::copy(round_pair(values.slab[s][j * 4 + half * 2], values.slab[s][j * 4 + half * 2 + 1]),
                                      *reinterpret_cast<cute::uint128_t*>(row));
      }
    }
  }
  sync_consumer();
  int across = features / 8;
  for (int piece = threadIdx.x; piece < TOKENS * across; piece += CONSUMER) {
    int token = piece / across, feature = piece % across * 8;
    if (tile.token + token < params.m && tile.feature + feature < params.n)
      *reinterpret_cast<uint4*>(to + (tile.token + token) * stride + tile.feature + feature) =
          *reinterpret_cast<uint4 const*>(buffer + token * pitch + feature * 2);
  }
}

__device__ __forceinline__ void consume(Params const& params, char* ring, Barriers& barriers, char* buffer) {
  Position at;
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    Tile tile = tile_at(params, index);
    Accumulators gates, ups;
    accumulate(params, ring, barriers, at, gates, ups);
    dump(params, tile, 0, gates), dump(params, tile, params.n, ups);
    add_bias(params, params.bias_gate, tile, gates), add_bias(params, params.bias_up, tile, ups);
    if constexpr (PREACTIVATIONS) {
      store(params, buffer, tile, gates, params.preactivations, params.preactivations_stride);
      store(params, buffer, tile, ups, params.preactivations + params.n, params.preactivations_stride);
    }
    CUTE_UNROLL
    for (int s = 0; s < SLABS; ++s) {
      activate<ACTIVATION, RECIPE>(gates.slab[s]);
      CUTE_UNROLL
      for (int e = 0; e < TOKENS / 2; ++e) gates.slab[s][e] = gates.slab[s][e] * ups.slab[s][e];
    }
    store(params, buffer, tile, gates, params.out, params.out_stride);
  }
}

__global__ void __launch_bounds__(THREADS, 1) decode(__grid_constant__ Params const params) {
  extern __shared__ char memory[];
  char* ring = memory + (-cute::cast_smem_ptr_to_uint(memory) & 1023);
  char* buffer = ring + params.stages * params.stage_bytes;
  auto& barriers = *reinterpret_cast<Barriers*>(buffer + TOKENS * params.features * 2);
  if (threadIdx.x < params.stages) {
    Full::init(&barriers.full[threadIdx.x], 1);
    Empty::init(&barriers.empty[threadIdx.x], 1);
  }
  cutlass::arch::fence_barrier_init();
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  // The kernel before may still run, up to here; the one behind may begin as soon as there is room.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == CONSUMER / 32)
    produce(params, ring, barriers);
  else
    consume(params, ring, barriers, buffer);
}

class Decode {
 public:
  explicit Decode(Arguments const& g) : device_(int(g.device)) {
    constexpr auto type = BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    if (g.m == 0) return;
    Params& p = params_;
    p.features = int(g.raster);
    if (p.features < 8 || p.features % 8 || p.features > 64 * SLABS) throw std::runtime_error("features of a tile");
    p.x = tensor_map(g.x, g.m, g.k, g.x_stride, TOKENS, BK, type);
    p.gate = tensor_map(g.gate, g.n, g.k, g.gate_stride, p.features, BK, type);
    p.up = tensor_map(g.up, g.n, g.k, g.up_stride, p.features, BK, type);
    p.out = reinterpret_cast<Element*>(g.out), p.out_stride = g.out_stride;
    p.preactivations = reinterpret_cast<Element*>(g.preactivations), p.preactivations_stride = g.preactivations_stride;
    p.bias_gate = reinterpret_cast<Element const*>(g.bias_gate);
    p.bias_up = reinterpret_cast<Element const*>(g.bias_up);
    p.sums = reinterpret_cast<float*>(g.debug);
    auto over = [](int64_t size, int part) { return int((size + part - 1) / part); };
    p.m = int(g.m), p.n = int(g.n), p.blocks = over(g.k, BK);
    p.token_tiles = over(g.m, TOKENS);
    int64_t tiles = int64_t(p.token_tiles) * over(g.n, p.features);
    if (tiles > INT32_MAX) throw std::runtime_error("too many tiles");
    p.tiles = int(tiles);
    p.stage_bytes = (2 * p.features + TOKENS) * BK * 2;
    // Behind the ring: the output, the barriers, and as much as a slab reaches beyond the last stage's features.
    int beside = 1024 + TOKENS * p.features * 2 + int(sizeof(Barriers)) + 64 * SLABS * BK * 2;
    p.stages = std::min((SHARED_MEMORY - beside) / p.stage_bytes, MOST_STAGES);
    bytes_ = beside + p.stages * p.stage_bytes;
    // Of the function, which other tiles share: so not bytes_.
    check(cudaFuncSetAttribute(decode, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MEMORY), "shared memory");
    int multiprocessors = 0;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device_), "multiprocessors");
    blocks_ = std::min(multiprocessors, p.tiles);
  }

  void run(cudaStream_t stream) const {
    if (!blocks_) return;
    OnDevice here(device_);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks_, config.blockDim = THREADS, config.dynamicSmemBytes = bytes_, config.stream = stream;
    config.attrs = &early, config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, decode, params_), "launch");
  }

 private:
  Params params_{};
  int device_, blocks_ = 0, bytes_ = 0;
};

}  // namespace fused_swiglu
