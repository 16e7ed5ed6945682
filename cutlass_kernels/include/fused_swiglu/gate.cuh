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

// What is left of -z log2(e) once the nearest integer, in the low bits of `shifted`, is taken away.
__device__ __forceinline__ float fraction(float z, float shifted) {
  float f = __fmaf_rn(z, -LOG2_E_HIGH, -(shifted - ROUND));
  return __fmaf_rn(z, -LOG2_E_LOW, f);
}

// 2^SCALE_EXPONENT (1 + exp(-z))
__device__ __forceinline__ float scaled_divisor(float z) {
  float shifted = __fmaf_rn(z, -LOG2_E_HIGH, ROUND);
  float f = fraction(z, shifted);
  float p = __fmaf_rn(f, C6, C5);
  p = __fmaf_rn(f, p, C4);
  p = __fmaf_rn(f, p, C3);
  p = __fmaf_rn(f, p, C2);
  p = __fmaf_rn(f, p, C1);
  p = __fmaf_rn(f, p, 1.0f);
  float power = __int_as_float((__float_as_int(shifted) << 23) + ((127 + SCALE_EXPONENT) << 23));
  return __fmaf_rn(p, power, SCALE);
}

__device__ __forceinline__ float rcp_ftz(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// a / b, correctly rounded for the recipe's operands: a seed, one Newton step, Markstein's correction.
__device__ __forceinline__ float divide(float a, float b) {
  float seed = rcp_ftz(b);
  float r = __fmaf_rn(__fmaf_rn(-b, seed, 1.0f), seed, seed);
  float q = a * r;
  return __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
}

// y / (1 + exp(-z)); BOUNDED: y is the constant 1.
template <bool BOUNDED>
__device__ __forceinline__ float ieee(float y, float z) {
  if constexpr (BOUNDED) {
    float quotient = divide(y, scaled_divisor(z < LOWEST ? LOWEST : z));  // NaN passes
    return z >= HIGHEST ? y : quotient * SCALE;
  } else {
    float quotient = divide(fmaxf(y, LOWEST), scaled_divisor(fmaxf(z, LOWEST)));
    // y * 0 is NaN for an infinite gate, and makes silu(-inf) NaN as torch has it.
    return z < HIGHEST ? __fmaf_rn(quotient, SCALE, y * 0.0f) : y;
  }
}

// exp(x); 2^-126 or so below -87, infinite above 88; NaN passes.
__device__ __forceinline__ float exp_degree_3(float x) {
  float z = -(x < -87.0f ? -87.0f : x);
  float shifted = __fmaf_rn(z, -LOG2_E_HIGH, ROUND);
  float f = fraction(z, shifted);
  float p = __fmaf_rn(f, D3, D2);
  p = __fmaf_rn(f, p, D1);
  p = __fmaf_rn(f, p, 1.0f);
  float power = __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
  return x > 88.0f ? __int_as_float(0x7F800000) : power;
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

}  // namespace recipe

// The activation of an fp32 gate: y / (1 + exp(-z)) by the recipe. `identity` is the control without an activation.
template <Activation A, Recipe R>
__device__ __forceinline__ float activate(float gate) {
  using namespace recipe;
  if constexpr (A == Activation::identity) {
    return gate;
  } else if constexpr (A == Activation::relu) {
    return gate <= 0.0f ? 0.0f : gate;
  } else {
    float z = A == Activation::gelu_tanh ? gate * __fmaf_rn(gate * gate, CUBIC, LINEAR) : gate;
    float y = A == Activation::sigmoid ? 1.0f : gate;
    if constexpr (R == Recipe::ieee) {
      return ieee<A == Activation::sigmoid>(y, z);
    } else if constexpr (R == Recipe::tanh) {
      float half = y * 0.5f;
      return __fmaf_rn(half, tanh_approx(z * 0.5f), half);
    } else if constexpr (R == Recipe::poly3) {
      return y * rcp(exp_degree_3(-z) + 1.0f);
    } else {
      static_assert(R == Recipe::ex2, "silu, gelu_tanh and sigmoid need a recipe");
      return y * rcp(ex2(z * -LOG2_E_HIGH) + 1.0f);
    }
  }
}

}  // namespace fused_swiglu
