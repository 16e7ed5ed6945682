// The collective mainloop: CUTLASS's TMA and wgmma pipeline, with the weights of a stage loaded as two boxes.
//
// A stage of operand B has 2 BN rows of BK: BN rows of w_gate, then BN rows of w_up, each through a tensor map of its
// own. So the weights are read where they are, stacked or not; rows past n are zeros and never the other matrix's; and
// one wgmma of width 2 BN leaves gate in columns 0..BN-1 of the accumulators and up in the rest.
// The K chain is CUTLASS's: one fp32 accumulator, k ascending in steps of 16.
#pragma once

#include "config.cuh"
#include "stamps.cuh"
// config.cuh first: it decides which instructions CuTe has
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>

namespace fused_swiglu::evt {

template <bool SHARED>
using Load = cute::conditional_t<SHARED, cute::SM90_TMA_LOAD_MULTICAST, cute::SM90_TMA_LOAD>;
using LoadX = Load<(FS_CLUSTER_N > 1)>;
using LoadWeights = Load<(FS_CLUSTER_M > 1)>;
using Swizzled = cute::GMMA::Layout_K_SW128_Atom<Element>;

// One row of warpgroups down m, each with wgmmas that are N wide.
template <int N>
using TiledMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<N>, cute::Int<BK>>>(),
    cute::Layout<cute::Shape<cute::Int<TEAM>, cute::_1, cute::_1>>{}));

template <int RING, class Schedule>
using CutlassMainloop = cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<RING, Cluster, Schedule>, AccumulatorTile, Element, RowMajor,
    Element, RowMajor, TiledMma<2 * BN>, LoadX, Swizzled, void, cute::identity, LoadWeights, Swizzled, void,
    cute::identity>;

// RING: stages. Schedule: the tag of CUTLASS's kernel.
template <int RING, class Schedule>
struct Mainloop : CutlassMainloop<RING, Schedule> {
  using Base = CutlassMainloop<RING, Schedule>;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using Word = typename Base::InternalElementB;  // TMA moves bits, and knows nothing of floating point

  // Stage s holds gate as half 2 s and up as half 2 s + 1.
  using SmemLayoutHalves = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<BN>, cute::Int<BK>, cute::Int<2 * RING>>{},
      cute::Step<cute::_1, cute::_2, cute::_3>{}));
  static_assert(cute::cosize_v<SmemLayoutHalves> == cute::cosize_v<typename Base::SmemLayoutB>);

  // Swizzles, and the wgmma descriptors that assume them, count from an address divisible by 1024.
  struct alignas(1024) TensorStorage : Base::TensorStorage {};
  static_assert(BM * BK * 2 % 1024 == 0 && BN * BK * 2 % 1024 == 0);

  struct Arguments {
    Element const *x, *gate, *up;
    RowMajor x_stride, gate_stride, up_stride;
  };

  static auto map_weights(Element const* address, int n, int k, RowMajor stride) {
    return cute::make_tma_copy_B_sm90(
        LoadWeights{}, cute::make_tensor(reinterpret_cast<Word const*>(address), cute::make_shape(n, k, 1), stride),
        SmemLayoutHalves{}(cute::_, cute::_, cute::_0{}), OutputTile{}, Cluster{});
  }

  struct Params {
    typename Base::Params::TMA_A x;
    decltype(map_weights(nullptr, 0, 0, RowMajor{})) gate, up;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;  // of x and both halves
  };

  // problem_shape: (m, 2 n, k), as the tile scheduler sees it.
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem_shape, Arguments const& args, void*) {
    auto [m, n2, k] = problem_shape;
    auto x = cute::make_tma_copy_A_sm90(
        LoadX{}, cute::make_tensor(reinterpret_cast<Word const*>(args.x), cute::make_shape(m, k, 1), args.x_stride),
        typename Base::SmemLayoutA{}(cute::_, cute::_, cute::_0{}), AccumulatorTile{}, Cluster{});
    return {x, map_weights(args.gate, n2 / 2, k, args.gate_stride), map_weights(args.up, n2 / 2, k, args.up_stride)};
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.x.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.gate.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.up.get_tma_descriptor());
  }

  // (x, gate, up) in tiles: (BM, BK, m, k, 1) and twice (BN, BK, n, k, 1).
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& problem_shape, Params const& params) const {
    using namespace cute;
    auto [m, n2, k, l] = problem_shape;
    auto tile = [](auto const& map, int rows, int columns, auto steps) {
      return local_tile(map.get_tma_tensor(make_shape(rows, columns, 1)), OutputTile{}, make_coord(_, _, _), steps);
    };
    return make_tuple(tile(params.x, m, k, Step<_1, X, _1>{}), tile(params.gate, n2 / 2, k, Step<X, _1, _1>{}),
                      tile(params.up, n2 / 2, k, Step<X, _1, _1>{}));
  }

  template <class X, class Gate, class Up, class BlockCoord, class KTileIterator>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState stage,
                           cute::tuple<X, Gate, Up> const& inputs, BlockCoord const& block, KTileIterator k_tile,
                           int k_tiles, int, uint32_t rank, TensorStorage& shared) {
    using namespace cute;
    if (!elect_one_sync()) return;
    stamp(PRODUCER, Event::loading);
    // Blocks of one cluster column share its rows of the weights, blocks of one cluster row its rows of x: each loads
    // its slice of a tile and multicasts it.
    auto ranks = Layout<Cluster>{};
    int rank_m = rank % FS_CLUSTER_M, rank_n = rank / FS_CLUSTER_M;
    uint16_t row = 0, column = 0;
    for (int i = 0; i < FS_CLUSTER_N; ++i) row |= uint16_t(1) << ranks(rank_m, i, 0);
    for (int i = 0; i < FS_CLUSTER_M; ++i) column |= uint16_t(1) << ranks(i, rank_n, 0);

    auto [m, n, k, l] = block;
    auto slice = [](auto const& map, int part, auto const& tiles, int index, auto const& stages) {
      auto mine = map.get_slice(part);
      return make_tuple(mine.partition_S(tiles(_, _, index, _, 0)), mine.partition_D(stages));
    };
    Tensor stages_x = make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor halves = make_tensor(make_smem_ptr(shared.smem_B.data()), SmemLayoutHalves{});
    auto [from_x, to_x] = slice(params.x, rank_n, get<0>(inputs), m, stages_x);
    auto [from_gate, to_gate] = slice(params.gate, rank_m, get<1>(inputs), n, halves);
    auto [from_up, to_up] = slice(params.up, rank_m, get<2>(inputs), n, halves);

    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tiles > 0; --k_tiles, ++k_tile, ++stage) {
      pipeline.producer_acquire(stage);
      auto& full = *pipeline.producer_get_barrier(stage);
      int s = stage.index();
      copy(params.x.with(full, row), from_x(_, _, _, *k_tile), to_x(_, _, _, s));
      copy(params.gate.with(full, column), from_gate(_, _, _, *k_tile), to_gate(_, _, _, 2 * s));
      copy(params.up.with(full, column), from_up(_, _, _, *k_tile), to_up(_, _, _, 2 * s + 1));
    }
    stamp(PRODUCER, Event::loaded);
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState stage, Accumulators& sums, int k_tiles, int thread,
                          TensorStorage& shared, Params const&) {
    stamp(Event::turn_taken);
    typename Base::Params unused;  // the base has them in its signature only
    Base::mma(pipeline, stage, sums, k_tiles, thread, shared, unused);
    stamp(Event::up_issued);
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState stage, int k_tiles) {
    Base::mma_tail(pipeline, stage, k_tiles);
    stamp(Event::up_done);
  }
};

}  // namespace fused_swiglu::evt
