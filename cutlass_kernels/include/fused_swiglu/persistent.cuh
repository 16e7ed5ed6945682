// The persistent, warp-specialised kernel: one producer warpgroup, two consumers; and how it is launched.
//
// role        threads     registers  does
// producer    32 of 128   24         TMA loads of every pass of this block's tiles into the ring, multicast in a cluster
// consumer 0  128         240        pingpong: tiles 0, 2, 4, ... of this block; cooperative: rows 0-63, 128-191, ... of each
// consumer 1  128         240        pingpong: tiles 1, 3, 5, ...; cooperative: rows 64-127, ... of each
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include <algorithm>

#include "epilogue.cuh"
#include "launch.cuh"
#include "stamps.cuh"

namespace fused_swiglu {

// The tiles of one thread block: every gridDim / CLUSTER-th cluster of tiles.
struct Schedule {
  Raster raster;
  int first, step, rank;

  __device__ explicit Schedule(Params const& params)
      : raster(params.raster), first(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER),
        rank(CLUSTER == 1 ? 0 : int(cute::block_rank_in_cluster())) {}

  __device__ bool has(int i) const { return first + i * step < raster.count(); }
  __device__ Tile tile(int i) const { return raster.tile(first + i * step, rank); }
};

constexpr int TILES = PINGPONG ? CONSUMERS : 1;  // that are in work at a time

// One pass of the tiles from the i-th on that are in work at a time.
template <Operand WHICH>
__device__ __forceinline__ void produce_pass(Shared& shared, Params const& params, Schedule const& schedule, Position& at,
                                             Stamps& stamp, int i) {
  for (int j = i; j < i + TILES && schedule.has(j); ++j) {
    stamp(Event::loading);
    load<WHICH>(shared, params, at, schedule.tile(j), schedule.rank);
    stamp(Event::loaded);
  }
}

// In the order in which the consumers take turns.
__device__ __forceinline__ void produce(Shared& shared, Params const& params, Schedule const& schedule) {
  Position at;
  Stamps stamp(params, PRODUCER);
  for (int i = 0; schedule.has(i); i += TILES) {
    if constexpr (PASSES == 1) {
      produce_pass<Operand::both>(shared, params, schedule, at, stamp, i);
    } else {
      produce_pass<Operand::gate>(shared, params, schedule, at, stamp, i);
      produce_pass<Operand::up>(shared, params, schedule, at, stamp, i);
    }
  }
}

// Consume has a static method
//   run(Shared&, Params const&, Schedule const&, int consumer).
template <class Consume>
__global__ void __launch_bounds__(THREADS, 1) persistent(__grid_constant__ Params const params) {
  extern __shared__ char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) initialise(shared);
  if constexpr (CLUSTER > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }
  Schedule schedule(params);
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), group = warp / 4;
  if (group == CONSUMERS) {
    cutlass::arch::warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
    if (warp == CONSUMERS * 4) produce(shared, params, schedule);
  } else {
    cutlass::arch::warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    Consume::run(shared, params, schedule, group);
    finish_stores();
  }
  if constexpr (CLUSTER > 1) {  // others still write into this block's shared memory and arrive at its barriers
    __syncwarp();
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  }
}

// OUT_COLUMNS: how many matrices of n columns lie side by side in the output.
template <class Consume, int OUT_COLUMNS = 1>
class Bound {
 public:
  explicit Bound(Arguments const& given) : device_(int(given.device)) {
    constexpr auto type = BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    Arguments const& g = given;
    if (g.m == 0) return;
    auto input = [&](int64_t address, int64_t rows, int64_t stride, int box) {
      return tensor_map(address, rows, g.k, stride, box, BK, type);
    };
    auto output = [&](int64_t address, int64_t stride) {
      return tensor_map(address, g.m, g.n, stride, 64, PANEL, type);
    };
    params_.x = input(g.x, g.m, g.x_stride, SHARES_X ? BM / CLUSTER : BM);
    params_.gate = input(g.gate, g.n, g.gate_stride, SHARES_WEIGHTS ? BN / CLUSTER : BN);
    params_.up = input(g.up, g.n, g.up_stride, SHARES_WEIGHTS ? BN / CLUSTER : BN);
    params_.out = output(g.out, g.out_stride);
    if constexpr (OUT_COLUMNS == 2) params_.second = output(g.out + g.n * 2, g.out_stride);
    if constexpr (PREACTIVATIONS) {
      params_.gate_preactivations = output(g.preactivations, g.preactivations_stride);
      params_.up_preactivations = output(g.preactivations + g.n * 2, g.preactivations_stride);
    }
    params_.bias_gate = reinterpret_cast<Element const*>(g.bias_gate);
    params_.bias_up = reinterpret_cast<Element const*>(g.bias_up);
    params_.sums = reinterpret_cast<float*>(g.debug);
    params_.stamps = reinterpret_cast<uint64_t*>(g.debug);
    params_.m = int(g.m), params_.n = int(g.n), params_.blocks = int((g.k + BK - 1) / BK);
    params_.once = 1;
    auto over = [](int64_t size, int part) { return int((size + part - 1) / part); };
    params_.raster = {over(g.m, BM * FS_CLUSTER_M), over(g.n, BN * FS_CLUSTER_N), 0};
    params_.raster.band = std::clamp(int(g.raster), 1, params_.raster.rows);

    auto kernel = persistent<Consume>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared))),
          "shared memory");
    cudaLaunchConfig_t config = launch();
    config.gridDim = CLUSTER;
    int at_once = 0;
    check(cudaOccupancyMaxActiveClusters(&at_once, kernel, &config), "occupancy");
    if (at_once < 1) throw std::runtime_error("no cluster of this kernel fits on the device");
    blocks_ = std::min(at_once, params_.raster.count()) * CLUSTER;
  }

  void run(cudaStream_t stream) const {
    if (!blocks_) return;
    OnDevice here(device_);
    cudaLaunchConfig_t config = launch();
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, persistent<Consume>, params_), "launch");
  }

 private:
  cudaLaunchConfig_t launch() const {
    static cudaLaunchAttribute attribute = [] {
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = CLUSTER, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
      return cluster;
    }();
    cudaLaunchConfig_t config{};
    config.gridDim = blocks_, config.blockDim = THREADS, config.dynamicSmemBytes = sizeof(Shared);
    config.attrs = &attribute, config.numAttrs = 1;
    return config;
  }

  Params params_{};
  int device_, blocks_ = 0;
};

}  // namespace fused_swiglu
