// cutlass.evt: the paper's Kernel-2, SwiGLU as a node of an epilogue visitor tree, on CUTLASS's GemmUniversal.
//
// Tiles, cluster, schedule, stages: evt/config.cuh, from -D. Layout of the weights and K chain: evt/mainloop.cuh.
// What is computed from the accumulators: evt/tree.cuh; where it is rounded: the nodes, evt/nodes.cuh. Subtiles and
// their stores: evt/epilogue.cuh. Order of the tiles: evt/scheduler.cuh.
#include <fused_swiglu/evt/scheduler.cuh>
#include <fused_swiglu/evt/tree.cuh>

#include <cutlass/device_kernel.h>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>

namespace fused_swiglu::evt {

using CollectiveEpilogue = Epilogue<Tree>;

constexpr int STAGE_BYTES = (BM + 2 * BN) * BK * int(sizeof(Element));
constexpr int BARRIER_BYTES = 2048;  // with what aligning the stages costs
constexpr int RING =
    STAGES ? STAGES : (SHARED_MEMORY - BARRIER_BYTES - int(sizeof(CollectiveEpilogue::TensorStorage))) / STAGE_BYTES;

using CollectiveMainloop =
    Mainloop<RING, cute::conditional_t<PINGPONG, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                       cutlass::gemm::KernelTmaWarpSpecializedCooperative>>;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                                  Bands>;

static_assert(sizeof(Kernel::SharedStorage) <= SHARED_MEMORY, "FS_STAGES does not fit into shared memory");

constexpr auto KERNEL = cutlass::device_kernel<Kernel>;

class Bound {
 public:
  explicit Bound(Arguments const& g) : device_(int(g.device)) {
    if (g.m == 0 || g.n == 0) return;
    check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize),
          "shared memory");
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = device_;
    check(cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount, device_), "multiprocessors");
    cudaLaunchConfig_t config = launch(dim3(FS_CLUSTER_M, FS_CLUSTER_N));
    check(cudaOccupancyMaxActiveClusters(&hardware.max_active_clusters, KERNEL, &config), "occupancy");
    if (hardware.max_active_clusters < 1) throw std::runtime_error("no cluster of this kernel fits on the device");

#if FS_STAMPS
    check(cudaMemcpyToSymbol(stamps, &g.debug, sizeof(g.debug)), "time stamps");
#endif
    auto at = [](int64_t address) { return reinterpret_cast<Element*>(address); };
    auto stride = [](int64_t elements) { return RowMajor{elements, {}, {}}; };
    params_ = Kernel::to_underlying_arguments(
        {cutlass::gemm::GemmUniversalMode::kGemm,
         {int(g.m), int(2 * g.n), int(g.k)},
         {at(g.x), at(g.gate), at(g.up), stride(g.x_stride), stride(g.gate_stride), stride(g.up_stride)},
         {tree_arguments(g), nullptr, {}, at(g.out), stride(g.out_stride)},
         hardware,
         {{}, int(g.raster)}},
        nullptr);
    grid_ = Kernel::get_grid_shape(params_);
    empty_ = false;
  }

  void run(cudaStream_t stream) const {
    if (empty_) return;
    OnDevice here(device_);
    cudaLaunchConfig_t config = launch(grid_);
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, KERNEL, params_), "launch");
  }

 private:
  static cudaLaunchConfig_t launch(dim3 grid) {
    static cudaLaunchAttribute attribute = [] {
      cudaLaunchAttribute cluster{};
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = FS_CLUSTER_M, cluster.val.clusterDim.y = FS_CLUSTER_N, cluster.val.clusterDim.z = 1;
      return cluster;
    }();
    cudaLaunchConfig_t config{};
    config.gridDim = grid, config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = Kernel::SharedStorageSize;
    config.attrs = &attribute, config.numAttrs = 1;
    return config;
  }

  Kernel::Params params_{};
  dim3 grid_{};
  int device_;
  bool empty_ = true;
};

FUSED_SWIGLU_EXPORT(Bound);

}  // namespace fused_swiglu::evt
