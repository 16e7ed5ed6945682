// The order of the tiles: CUTLASS's persistent scheduler, renumbered down bands of `raster` cluster rows.
//
// What runs at one time then shares rows of x as well as rows of the weights in L2. CUTLASS's own swizzle does so too,
// but in powers of two up to 8, and it pads the grid of tiles to whole swizzles along both dimensions: with 51 tiles
// along n, a tenth of the work would be on nothing.
#pragma once

#include "config.cuh"

#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include <algorithm>

namespace fused_swiglu::evt {

struct Bands : cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

  struct Arguments : Base::Arguments {
    int height = 1;  // of a band, in clusters of tiles
  };
  struct Params : Base::Params {
    int height = 1;
  };

  template <class ProblemShape, class Tile, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape problem_shape, Tile tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware, Arguments const& args,
                                        void* = nullptr, uint32_t = 1) {
    Base::Arguments along_n{1, RasterOrderOptions::AlongN};
    Params params{Base::to_underlying_arguments(problem_shape, tile, cluster, hardware, along_n)};
    params.height = std::clamp(args.height, 1, int(params.problem_tiles_m_));
    return params;
  }

  CUTLASS_DEVICE explicit Bands(Params const& params) : Base(params), height(params.height) {}
  int height;

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    WorkTileInfo work = Base::get_current_work();
    if (!work.is_valid()) return work;
    int rows = scheduler_params.problem_tiles_m_, columns = scheduler_params.problem_tiles_n_;
    int cluster_m = scheduler_params.cluster_shape_m_, cluster_n = scheduler_params.cluster_shape_n_;
    int index = work.M_idx / cluster_m * columns + work.N_idx / cluster_n;
    int first = index / (height * columns) * height, within = index % (height * columns);
    int high = min(height, rows - first);  // the last band may be lower
    work.M_idx = (first + within % high) * cluster_m + work.M_idx % cluster_m;
    work.N_idx = within / high * cluster_n + work.N_idx % cluster_n;
    return work;
  }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    return get_current_work();
  }

  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline const&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
};

}  // namespace fused_swiglu::evt

template <class Tile, class ClusterShape, uint32_t STAGES>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<fused_swiglu::evt::Bands, cutlass::arch::Sm90, Tile,
                                                            ClusterShape, STAGES> {
  using Scheduler = fused_swiglu::evt::Bands;
};
