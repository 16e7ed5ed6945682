// The activation recipes on the device, operation by operation as fused_swiglu/recipes.py declares them.
// Built with -fmad=false: what is fused here says so.
#pragma once

#include <cstdint>

namespace fused_swiglu {

enum class Activation { silu, gelu_tanh, relu, sigmoid, identity };
enum class Recipe { ieee, ex2, tanh, poly3, none };

namespace recipe {

// The names and values of recipes.py; a test compares them.
constexpr float LOG2_E_HIGH = 1.4426950216293335f, LOG2_E_LOW = 1.925963033500011e-08f;
// Minimax polynomials of 2^f on [-1/2, 1/2], the coefficients of f, f^2, ...
constexpr float D1 = 0.6932829022407532f, D2 = 0.24221095442771912f, D3 = 0.055008936673402786f;
constexpr float C1 = 0.6931471824645996f, C2 = 0.24022647738456726f, C3 = 0.055503323674201965f;
constexpr float C4 = 0.00961843691766262f, C5 = 0.0013398875016719103f, C6 = 0.00015353360504377633f;
constexpr float LINEAR = 1.5957691669464111f, CUBIC = 0.07135481387376785f;
constexpr float ROUND = 12582912.0f;
constexpr int SCALE_EXPONENT = -40;
constexpr float LOWEST = -110.0f, HIGHEST = 20.0f;
constexpr float SCALE = 1.0f / (1ull << -SCALE_EXPONENT);

__device__ __forceinline__ float rcp_ftz(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Must not flush: silu(-87.5) * 2^100 is no small number.
__device__ __forceinline__ float rcp(float x) {
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Flushing is harmless: a subnormal power of two leaves its sum with 1 as it is.
__device__ __forceinline__ float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float tanh_approx(float x) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// V values go through a recipe step by step, all through one step before the next: a scheduler of an SM has one warp of
// a warpgroup, which must find independent instructions in itself. What is done to value v is f(v).
template <int V, class F>
__device__ __forceinline__ void each(F f) {
#pragma unroll
  for (int v = 0; v < V; ++v) f(v);
}

// f: what is left of -z log2(e) once the nearest integer, in the low bits of `shifted`, is taken away.
template <int V>
__device__ __forceinline__ void split(float const (&z)[V], float (&shifted)[V], float (&f)[V]) {
  each<V>([&](int v) { shifted[v] = __fmaf_rn(z[v], -LOG2_E_HIGH, ROUND); });
  each<V>([&](int v) { f[v] = shifted[v] - ROUND; });
  each<V>([&](int v) { f[v] = __fmaf_rn(z[v], -LOG2_E_HIGH, -f[v]); });
  each<V>([&](int v) { f[v] = __fmaf_rn(z[v], -LOG2_E_LOW, f[v]); });
}

// 2^SCALE_EXPONENT (1 + exp(-z))
template <int V>
__device__ __forceinline__ void scaled_divisor(float const (&z)[V], float (&b)[V]) {
  float shifted[V], f[V];
  split(z, shifted, f);
  each<V>([&](int v) { b[v] = __fmaf_rn(f[v], C6, C5); });
  each<V>([&](int v) { b[v] = __fmaf_rn(f[v], b[v], C4); });
  each<V>([&](int v) { b[v] = __fmaf_rn(f[v], b[v], C3); });
  each<V>([&](int v) { b[v] = __fmaf_rn(f[v], b[v], C2); });
  each<V>([&](int v) { b[v] = __fmaf_rn(f[v], b[v], C1); });
  each<V>([&](int v) { b[v] = __fmaf_rn(f[v], b[v], 1.0f); });
  each<V>([&](int v) {
    float power = __int_as_float((__float_as_int(shifted[v]) << 23) + ((127 + SCALE_EXPONENT) << 23));
    b[v] = __fmaf_rn(b[v], power, SCALE);
  });
}

// q = a / b, correctly rounded for the recipe's operands: a seed, one Newton step, Markstein's correction.
template <int V>
__device__ __forceinline__ void divide(float const (&a)[V], float const (&b)[V], float (&q)[V]) {
  float r[V], e[V];
  each<V>([&](int v) { r[v] = rcp_ftz(b[v]); });
  each<V>([&](int v) { e[v] = __fmaf_rn(-b[v], r[v], 1.0f); });
  each<V>([&](int v) { r[v] = __fmaf_rn(e[v], r[v], r[v]); });
  each<V>([&](int v) { q[v] = a[v] * r[v]; });
  each<V>([&](int v) { e[v] = __fmaf_rn(-b[v], q[v], a[v]); });
  each<V>([&](int v) { q[v] = __fmaf_rn(e[v], r[v], q[v]); });
}

// result = y / (1 + exp(-z)); BOUNDED: y is the constant 1.
template <bool BOUNDED, int V>
__device__ __forceinline__ void ieee(float const (&y)[V], float const (&z)[V], float (&result)[V]) {
  float a[V], b[V], low[V];
  if constexpr (BOUNDED) {
    each<V>([&](int v) { low[v] = z[v] < LOWEST ? LOWEST : z[v]; });  // NaN passes
    scaled_divisor(low, b);
    divide(y, b, a);
    each<V>([&](int v) { result[v] = z[v] >= HIGHEST ? y[v] : a[v] * SCALE; });
  } else {
    each<V>([&](int v) { low[v] = fmaxf(z[v], LOWEST); });
    scaled_divisor(low, b);
    each<V>([&](int v) { low[v] = fmaxf(y[v], LOWEST); });
    divide(low, b, a);
    // y * 0 is NaN for an infinite gate, and makes silu(-inf) NaN as torch has it.
    each<V>([&](int v) { result[v] = z[v] < HIGHEST ? __fmaf_rn(a[v], SCALE, y[v] * 0.0f) : y[v]; });
  }
}

// x = exp(x); 2^-126 or so below -87, infinite above 88; NaN passes.
template <int V>
__device__ __forceinline__ void exp_degree_3(float (&x)[V]) {
  float z[V], shifted[V], f[V], p[V];
  each<V>([&](int v) { z[v] = -(x[v] < -87.0f ? -87.0f : x[v]); });
  split(z, shifted, f);
  each<V>([&](int v) { p[v] = __fmaf_rn(f[v], D3, D2); });
  each<V>([&](int v) { p[v] = __fmaf_rn(f[v], p[v], D1); });
  each<V>([&](int v) { p[v] = __fmaf_rn(f[v], p[v], 1.0f); });
  each<V>([&](int v) {
    float power = __int_as_float(__float_as_int(p[v]) + (__float_as_int(shifted[v]) << 23));
    x[v] = x[v] > 88.0f ? __int_as_float(0x7F800000) : power;
  });
}

}  // namespace recipe

// The activation of V fp32 gates, in place: y / (1 + exp(-z)) by the recipe. `identity` is the control without one.
template <Activation A, Recipe R, int V>
__device__ __forceinline__ void activate(float (&gate)[V]) {
  using namespace recipe;
  if constexpr (A == Activation::relu) {
    each<V>([&](int v) { gate[v] = gate[v] <= 0.0f ? 0.0f : gate[v]; });
  } else if constexpr (A != Activation::identity) {
    float y[V], z[V];
    each<V>([&](int v) {
      z[v] = A == Activation::gelu_tanh ? gate[v] * __fmaf_rn(gate[v] * gate[v], CUBIC, LINEAR) : gate[v];
      y[v] = A == Activation::sigmoid ? 1.0f : gate[v];
    });
    if constexpr (R == Recipe::ieee) {
      ieee<A == Activation::sigmoid>(y, z, gate);
    } else if constexpr (R == Recipe::tanh) {
      each<V>([&](int v) { y[v] = y[v] * 0.5f; });
      each<V>([&](int v) { z[v] = tanh_approx(z[v] * 0.5f); });
      each<V>([&](int v) { gate[v] = __fmaf_rn(y[v], z[v], y[v]); });
    } else {
      static_assert(R == Recipe::poly3 || R == Recipe::ex2, "silu, gelu_tanh and sigmoid need a recipe");
      if constexpr (R == Recipe::poly3) {
        each<V>([&](int v) { z[v] = -z[v]; });
        exp_degree_3(z);
      } else {
        each<V>([&](int v) { z[v] = ex2(z[v] * -LOG2_E_HIGH); });
      }
      each<V>([&](int v) { z[v] = rcp(z[v] + 1.0f); });
      each<V>([&](int v) { gate[v] = y[v] * z[v]; });
    }
  }
}

// Of one gate.
template <Activation A, Recipe R>
__device__ __forceinline__ float activate(float gate) {
  float one[] = {gate};
  activate<A, R>(one);
  return one[0];
}

}  // namespace fused_swiglu
