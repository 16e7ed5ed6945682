// What a kernel does with its finished accumulators: SwiGLU, or, in a control, the two halves of a plain product.
#pragma once

#include "epilogue.cuh"

namespace fused_swiglu {

enum class Half { gate, up };

// For store_tile: the accumulators unchanged.
template <class Sum>
__device__ __forceinline__ auto as_they_are(Sum sum) {
  return [=](int s, int j, float (&values)[8]) {
    CUTE_UNROLL
    for (int e = 0; e < 8; ++e) values[e] = sum(s, j + e / 4, e % 4);
  };
}

// What is done to either half as soon as it is complete: dump, bias, pre-activations.
template <class Sum>
__device__ __forceinline__ void complete(Shared& shared, Params const& params, int consumer, Tile tile, Sum sum, Half half) {
  bool is_gate = half == Half::gate;
  dump(params, tile, consumer, is_gate ? 0 : params.n, sum);
  add_bias(is_gate ? params.bias_gate : params.bias_up, tile.column, params.n, sum);
  if constexpr (PREACTIVATIONS)
    store_tile(shared, consumer, is_gate ? params.gate_preactivations : params.up_preactivations, tile, as_they_are(sum));
}

// out = activate(gate) * up, in fp32, rounded once. A kernel of two passes activates gate itself.
struct SwiGLU {
  // Between the passes: under a condition that always holds, which ptxas does not know. So the arithmetic stays where it
  // is between barriers, and each part is a block of its own, in which ptxas interleaves independent chains. Over all
  // accumulators at once it would go chain after chain.
  template <int V>
  static __device__ __forceinline__ void activate(Params const& params, float (&gate)[V]) {
    static_assert(V == 8);
    if (params.once) fused_swiglu::activate<ACTIVATION, RECIPE>(gate);
  }

  template <class Gate>
  static __device__ __forceinline__ void gate_done(Shared& shared, Params const& params, int consumer, Tile tile,
                                                   Gate gate) {
    complete(shared, params, consumer, tile, gate, Half::gate);
  }

  template <class Gate, class Up>
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, int consumer, Tile tile, Gate gate,
                                             Up up) {
    complete(shared, params, consumer, tile, up, Half::up);
    store_tile(shared, consumer, params.out, tile, [&](int s, int j, float (&values)[8]) {
      CUTE_UNROLL
      for (int e = 0; e < 8; ++e) values[e] = gate(s, j + e / 4, e % 4);
      if constexpr (PASSES == 1) fused_swiglu::activate<ACTIVATION, RECIPE>(values);
      CUTE_UNROLL
      for (int e = 0; e < 8; ++e) values[e] = values[e] * up(s, j + e / 4, e % 4);
    });
  }
};

// [m, 2n]: the product with w_gate beside the product with w_up.
struct Products {
  template <int V>
  static __device__ __forceinline__ void activate(Params const&, float (&)[V]) {}

  template <class Gate>
  static __device__ __forceinline__ void gate_done(Shared& shared, Params const& params, int consumer, Tile tile,
                                                   Gate gate) {
    dump(params, tile, consumer, 0, gate);
    store_tile(shared, consumer, params.out, tile, as_they_are(gate));
  }

  template <class Gate, class Up>
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, int consumer, Tile tile, Gate, Up up) {
    dump(params, tile, consumer, params.n, up);
    store_tile(shared, consumer, params.second, tile, as_they_are(up));
  }
};

}  // namespace fused_swiglu
