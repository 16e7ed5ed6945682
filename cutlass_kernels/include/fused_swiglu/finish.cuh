// What a kernel does with its finished accumulators: SwiGLU, or, in a control, the two halves of a plain product.
#pragma once

#include "epilogue.cuh"

namespace fused_swiglu {

enum class Half { gate, up };

// What is done to either half as soon as it is complete: dump, bias, pre-activations.
template <class Sum>
__device__ __forceinline__ void complete(Shared& shared, Params const& params, int consumer, Tile tile, Sum sum, Half half) {
  bool is_gate = half == Half::gate;
  dump(params, tile, consumer, is_gate ? 0 : params.n, sum);
  add_bias(is_gate ? params.bias_gate : params.bias_up, tile.column, params.n, sum);
  if constexpr (PREACTIVATIONS)
    store_tile(shared, consumer, is_gate ? params.gate_preactivations : params.up_preactivations, tile, sum);
}

// out = activate(gate) * up, in fp32, rounded once. A kernel of two passes activates gate itself.
struct SwiGLU {
  static __device__ __forceinline__ float activate(float gate) { return fused_swiglu::activate<ACTIVATION, RECIPE>(gate); }

  template <class Gate>
  static __device__ __forceinline__ void gate_done(Shared& shared, Params const& params, int consumer, Tile tile,
                                                   Gate gate) {
    complete(shared, params, consumer, tile, gate, Half::gate);
  }

  template <class Gate, class Up>
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, int consumer, Tile tile, Gate gate,
                                             Up up) {
    if constexpr (PASSES == 1) complete(shared, params, consumer, tile, gate, Half::gate);
    complete(shared, params, consumer, tile, up, Half::up);
    store_tile(shared, consumer, params.out, tile, [&](int s, int j, int i) {
      float gated = PASSES == 1 ? activate(gate(s, j, i)) : gate(s, j, i);
      return gated * up(s, j, i);
    });
  }
};

// [m, 2n]: the product with w_gate beside the product with w_up.
struct Products {
  static __device__ __forceinline__ float activate(float gate) { return gate; }

  template <class Gate>
  static __device__ __forceinline__ void gate_done(Shared& shared, Params const& params, int consumer, Tile tile,
                                                   Gate gate) {
    dump(params, tile, consumer, 0, gate);
    if constexpr (PASSES == 2) store_tile(shared, consumer, params.out, tile, gate);
  }

  template <class Gate, class Up>
  static __device__ __forceinline__ void run(Shared& shared, Params const& params, int consumer, Tile tile, Gate gate,
                                             Up up) {
    dump(params, tile, consumer, params.n, up);
    if constexpr (PASSES == 1) {
      gate_done(shared, params, consumer, tile, gate);
      store_tile(shared, consumer, params.out, tile, gate);
    }
    store_tile(shared, consumer, params.second, tile, up);
  }
};

}  // namespace fused_swiglu
