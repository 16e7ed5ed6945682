// The nodes that this project adds to CUTLASS's epilogue visitor trees.
//
// An accumulator of these trees is a Pair: gate and up of one output, which the mainloop leaves in one thread. Stock
// nodes (Sm90Compute, Sm90RowBroadcast, Sm90AuxStore) combine with ours, as they take whatever accumulators come by.
#pragma once

#include <cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_store_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>

#include "../gate.cuh"

namespace fused_swiglu::evt {

namespace fusion = cutlass::epilogue::fusion;
using cutlass::Array;

struct Pair {
  float gate, up;
};

// What a node has to declare that needs neither arguments, shared memory nor a producer.
struct Node : fusion::Sm90VisitorImpl<> {
  using fusion::Sm90VisitorImpl<>::Sm90VisitorImpl;

  template <class ProblemShape, class Arguments>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
};

// Leaf: one member of each pair.
template <float Pair::*MEMBER>
struct Fetch : Node {
  using Node::Node;

  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    template <int SIZE>
    CUTLASS_DEVICE Array<float, SIZE> visit(Array<Pair, SIZE> const& pairs, int, int, int) {
      Array<float, SIZE> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < SIZE; ++i) values[i] = pairs[i].*MEMBER;
      return values;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const&) {
    return Callbacks{};
  }
};
using FetchGate = Fetch<&Pair::gate>;
using FetchUp = Fetch<&Pair::up>;

// Node over two subtrees: activation(gate) * up in fp32, rounded once to Out.
//
// The arithmetic stands in a loop that runs once, which ptxas does not know, and whose next turn would depend on this
// one. Else ptxas hoists the arithmetic of all subtiles above the first store, and nothing is left to overlap with
// the stores.
template <Activation ACTIVATION, Recipe RECIPE, class Out>
struct Swiglu : Node {
  struct Params {
    int times = 1;
  };
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const&, void*) {
    return {};
  }

  Swiglu() = default;
  CUTLASS_HOST_DEVICE Swiglu(Params const& params, SharedStorage const&) : times(params.times) {}
  int times;

  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    int times;

    template <int SIZE>
    CUTLASS_DEVICE Array<Out, SIZE> visit(Array<Pair, SIZE> const&, int, int, int, Array<float, SIZE> gate,
                                          Array<float, SIZE> const& up) {
      int time = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      do {
        activate<ACTIVATION, RECIPE>(reinterpret_cast<float (&)[SIZE]>(gate));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < SIZE; ++i) gate[i] = gate[i] * up[i];
      } while (++time < times);
      return cutlass::NumericArrayConverter<Out, float, SIZE>{}(gate);  // to nearest even
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const&) {
    return Callbacks{{}, times};
  }
};

// Node over one subtree, which it passes on: writes the pairs, untouched by any other node, to fp32 [m, 2n].
struct Dump : Node {
  struct Arguments {
    float* sums;
  };
  using Params = Arguments;
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }

  Dump() = default;
  CUTLASS_HOST_DEVICE Dump(Params const& params, SharedStorage const&) : sums(params.sums) {}
  float* sums;

  // coordinates: of this thread's values relative to its first one, whose distance from (m, n) is `left`.
  template <class Coordinates, class Left>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    float* sums;
    int m, n;
    Coordinates coordinates;
    Left left;

    template <int SIZE, class In>
    CUTLASS_DEVICE Array<In, SIZE> visit(Array<Pair, SIZE> const& pairs, int v, int epi_m, int epi_n,
                                         Array<In, SIZE> const& in) {
      auto here = coordinates(cute::_, cute::_, cute::_, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < SIZE; ++i) {
        auto at = here(v * SIZE + i);
        if (!cute::elem_less(at, left)) continue;
        float* row = sums + int64_t(m - cute::get<0>(left) + cute::get<0>(at)) * (2 * n);
        int column = n - cute::get<1>(left) + cute::get<1>(at);
        row[column] = pairs[i].gate;
        row[n + column] = pairs[i].up;
      }
      return in;
    }
  };

  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    return Callbacks<decltype(args.tCcD), decltype(args.residue_tCcD)>{
        {}, sums, int(cute::get<0>(args.problem_shape_mnkl)), int(cute::get<1>(args.problem_shape_mnkl)), args.tCcD,
        args.residue_tCcD};
  }
};

}  // namespace fused_swiglu::evt
