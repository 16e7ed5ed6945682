// The visitor tree of a build: which nodes stand between a pair of accumulators and the output.
//
//   [Dump] <- Swiglu <- [AuxStore] <- [plus bias_gate] <- FetchGate
//                    <- [AuxStore] <- [plus bias_up]   <- FetchUp
#pragma once

#include "../launch.cuh"
#include "epilogue.cuh"

namespace fused_swiglu::evt {

constexpr auto NEAREST = cutlass::FloatRoundStyle::round_to_nearest;
constexpr int VECTOR = 16 / sizeof(Element);

using Bias =
    fusion::Sm90RowBroadcast<0, OutputTile, Element, float, cute::Stride<cute::_0, cute::_1, cute::_0>, VECTOR, false>;
template <class Fetch>
using AddBias = fusion::Sm90TreeVisitor<fusion::Sm90Compute<cutlass::plus, float, float, NEAREST>, Fetch, Bias>;
template <class Fetch>
using PreActivation = cute::conditional_t<BIAS, AddBias<Fetch>, Fetch>;

template <class Child>
using StorePreActivation = fusion::Sm90TreeVisitor<
    fusion::Sm90AuxStore<SUBTILES_IN_FLIGHT, Subtile, Element, NEAREST, RowMajor, StoreAtom, cute::SM90_U32x4_STSM_N,
                         VECTOR, false>,
    Child>;
template <class Fetch>
using Half = cute::conditional_t<PREACTIVATIONS, StorePreActivation<PreActivation<Fetch>>, PreActivation<Fetch>>;

using Output = fusion::Sm90TreeVisitor<Swiglu<ACTIVATION, RECIPE, Element>, Half<FetchGate>, Half<FetchUp>>;
using Tree = cute::conditional_t<DUMP, fusion::Sm90TreeVisitor<Dump, Output>, Output>;

template <class Fetch>
typename Half<Fetch>::Arguments half_arguments(int64_t bias, int64_t preactivations, int64_t stride) {
  typename PreActivation<Fetch>::Arguments before{};
  if constexpr (BIAS) before.op_1.ptr_row = reinterpret_cast<Element const*>(bias);
  if constexpr (PREACTIVATIONS)
    return {before, {reinterpret_cast<Element*>(preactivations), {stride, {}, {}}}};
  else
    return before;
}

// The arguments of an operation's children come before its own.
template <class Of = Tree>
typename Of::Arguments tree_arguments(Arguments const& g) {
  if constexpr (cute::is_same_v<Of, Output>)
    return {half_arguments<FetchGate>(g.bias_gate, g.preactivations, g.preactivations_stride),
            half_arguments<FetchUp>(g.bias_up, g.preactivations + g.n * int64_t(sizeof(Element)),
                                    g.preactivations_stride),
            {}};
  else
    return {tree_arguments<Output>(g), {reinterpret_cast<float*>(g.debug)}};
}

}  // namespace fused_swiglu::evt
