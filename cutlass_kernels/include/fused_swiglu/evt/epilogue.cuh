// The collective epilogue: CUTLASS's store loop over an output that is half as wide as the accumulators.
//
// Subtile by subtile the loop lets the visitor tree compute, writes the result to swizzled shared memory with stmatrix
// and stores it by TMA, while the next subtile is being computed. Here it is given the two halves of the accumulator
// tile zipped into pairs, with the tiler, the problem and the tensor map of the output.
#pragma once

#include "mainloop.cuh"
#include "nodes.cuh"

#include <cutlass/epilogue/collective/collective_epilogue.hpp>

namespace fused_swiglu::evt {

using StoreAtom = cute::conditional_t<SUBTILE == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                      cute::conditional_t<SUBTILE == 32, cute::GMMA::Layout_K_SW64_Atom<Element>,
                                                          cute::GMMA::Layout_K_SW32_Atom<Element>>>;

constexpr bool DELAYED_STORE = true;  // a subtile is computed between the previous one's stmatrix and its TMA store
constexpr int FRAGMENT = 8;           // values of a thread that a node sees at a time; more would cost registers

template <class Tree>
using CutlassEpilogue = cutlass::epilogue::collective::CollectiveEpilogue<
    cutlass::epilogue::Sm90TmaWarpSpecialized<SUBTILES_IN_FLIGHT, SUBTILES_IN_FLIGHT, FRAGMENT, false,
                                              DELAYED_STORE>,
    OutputTile, Subtile, void, RowMajor, Element, RowMajor, Tree, cute::SM90_TMA_LOAD, StoreAtom,
    cute::SM75_U32x4_LDSM_N, cute::SM90_TMA_STORE, StoreAtom, cute::SM90_U32x4_STSM_N,
    cute::Copy_Atom<cute::SM90_U32x4_STSM_N, cutlass::half_t>, void>;

// Tree: a visitor tree whose accumulators are Pairs and whose root gives Elements.
template <class Tree>
struct Epilogue : CutlassEpilogue<Tree> {
  using Base = CutlassEpilogue<Tree>;
  using Base::Base;
  using typename Base::Arguments;
  using typename Base::LoadPipeline;
  using typename Base::LoadPipelineState;
  using typename Base::Params;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using typename Base::TensorStorage;

  template <class ProblemShape>
  CUTLASS_HOST_DEVICE static auto halved(ProblemShape problem_shape) {
    cute::get<1>(problem_shape) /= 2;
    return problem_shape;
  }

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem_shape, Arguments const& args, void* workspace) {
    return Base::to_underlying_arguments(halved(problem_shape), args, workspace);
  }

  template <class Tile>
  CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(Tile) {
    return Base::get_load_pipe_increment(OutputTile{});
  }
  template <class Tile>
  CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(Tile) {
    return Base::get_store_pipe_increment(OutputTile{});
  }

  // There is no source matrix, and no node of ours loads by TMA.
  CUTLASS_DEVICE static constexpr bool is_producer_load_needed() { return false; }
  template <class... Args>
  CUTLASS_DEVICE static LoadPipelineState load(LoadPipeline, LoadPipelineState state, Args const&...) {
    return state;
  }
  CUTLASS_DEVICE static LoadPipelineState load_tail(LoadPipeline, LoadPipelineState state) { return state; }

  // The layout of a thread's accumulators is (V, M, N) with N = 1; V is ((2, 2, n / 8)) for a wgmma n wide. So those of
  // gate come first, then those of up, and each half is laid out as by a wgmma that is BN wide.
  template <class ProblemShape, class Tile, class Coord, class Sums, class Mma>
  CUTLASS_DEVICE auto store(LoadPipeline load, LoadPipelineState load_state, StorePipeline store,
                            StorePipelineState store_state, ProblemShape problem_shape, Tile, Coord coord,
                            Sums const& sums, Mma, int thread, TensorStorage& shared, int subtile = -1) {
    using namespace cute;
    TiledMma<BN> mma;
    Tensor pairs = make_tensor<Pair>(partition_shape_C(mma, take<0, 2>(OutputTile{})));
    constexpr int V = size<0>(decltype(pairs.layout()){});
    static_assert(size<0>(typename Sums::layout_type{}) == 2 * V && size<2>(typename Sums::layout_type{}) == 1);
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < size<1>(pairs); ++m)
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < V; ++v) pairs(v, m, 0) = {sums(v, m, 0), sums(V + v, m, 0)};
    auto states = Base::store(load, load_state, store, store_state, halved(problem_shape), OutputTile{}, coord, pairs,
                              mma, thread, shared, subtile);
    stamp(Event::stored);
    return states;
  }
};

}  // namespace fused_swiglu::evt
