// One wgmma instruction with an accumulator, for each format, width and source of A.
//
// A block is one warpgroup and runs one instruction: d[t] = a[t] @ b[t].T + c[t] for its t. a: [count, 64, 32 bytes],
// b: [count, N, 32 bytes], rows of K elements (16 of 2 bytes, 32 of one); c, d: fp32 [count, 64, N]. Rows of 32 bytes
// make the layout in shared memory and the fragments of A in registers the same for all formats.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kM = 64, kRowBytes = 32, kThreads = 128;

// No swizzle, K-major: core matrices of 8 rows of 16 bytes, each 128 bytes in a row. Those of one row's two halves are
// neighbours; the next 8 rows follow.
constexpr int kCore = 128, kAlongK = kCore, kAlongRows = 2 * kCore;

__device__ int offset_of(int row, int half) { return row / 8 * kAlongRows + half * kAlongK + row % 8 * 16; }

__device__ uint64_t descriptor(const void* shared) {
  uint64_t address = __cvta_generic_to_shared(shared);
  return (address & 0x3FFFF) >> 4 | uint64_t(kAlongK >> 4) << 16 | uint64_t(kAlongRows >> 4) << 32;
}

__device__ void to_shared(uint8_t* shared, const uint8_t* matrix, int rows) {
  for (int i = threadIdx.x; i < 2 * rows; i += kThreads)
    *reinterpret_cast<uint4*>(shared + offset_of(i / 2, i % 2)) = reinterpret_cast<const uint4*>(matrix)[i];
}

// This thread's first row in accumulators and in A's fragments; the second lies 8 below.
__device__ int first_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

// Where accumulator i of this thread lies in [64, N].
template <int N>
__device__ int place(int i) {
  return (first_row() + i / 2 % 2 * 8) * N + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

template <int N, bool kFromShared, class Instruction>
__device__ void run(const uint8_t* a, const uint8_t* b, const float* c, float* d, Instruction instruction) {
  __shared__ alignas(128) uint8_t a_shared[kM * kRowBytes], b_shared[N * kRowBytes];
  const size_t t = blockIdx.x;
  a += t * kM * kRowBytes, b += t * N * kRowBytes, c += t * kM * N, d += t * kM * N;
  if (kFromShared) to_shared(a_shared, a, kM);
  to_shared(b_shared, b, N);
  uint32_t fragment[4];  // rows r and r + 8 of A's first 16 bytes, then of the other 16
  if (!kFromShared)
    for (int i = 0; i < 4; ++i)
      fragment[i] = *reinterpret_cast<const uint32_t*>(
          a + (first_row() + i % 2 * 8) * kRowBytes + i / 2 * 16 + threadIdx.x % 4 * 4);
  float accumulator[N / 2];
  for (int i = 0; i < N / 2; ++i) accumulator[i] = c[place<N>(i)];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what was stored is for the tensor cores' eyes
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  instruction(accumulator, fragment, descriptor(a_shared), descriptor(b_shared));
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < N / 2; ++i) d[place<N>(i)] = accumulator[i];
}

// An instruction's operands, as text and as values: the accumulators, then A and the descriptor of B.
#define TEN(x) "%" #x "0, %" #x "1, %" #x "2, %" #x "3, %" #x "4, %" #x "5, %" #x "6, %" #x "7, %" #x "8, %" #x "9, "
#define TEXT_8 "{%0, %1, %2, %3}, "
#define TEXT_256                                                                                           \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) \
      TEN(10) TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127}, "
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define VALUES_8 FOUR(0)
#define VALUES_256 \
  SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
#define A_TEXT_shared_8 "%4, %5"
#define A_TEXT_shared_256 "%128, %129"
#define A_TEXT_registers_8 "{%4, %5, %6, %7}, %8"
#define A_TEXT_registers_256 "{%128, %129, %130, %131}, %132"
#define A_VALUES_shared "l"(a_shared)
#define A_VALUES_registers "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define FROM_SHARED_shared true
#define FROM_SHARED_registers false

#define EXPORT __attribute__((visibility("default")))

// FLAGS: the accumulator takes part, nothing is negated, and, where the format has a choice, nothing is transposed.
#define HARNESS(TYPE, N, K, A, FLAGS)                                                                            \
  __global__ void __launch_bounds__(kThreads) kernel_##TYPE##_n##N##_##A(                                        \
      const uint8_t* a, const uint8_t* b, const float* c, float* d) {                                            \
    auto instruction = [](float(&d)[N / 2], const uint32_t(&a)[4], uint64_t a_shared, uint64_t b_shared) {       \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." #TYPE "." #TYPE " " TEXT_##N            \
                   A_TEXT_##A##_##N ", " FLAGS ";"                                                               \
                   : VALUES_##N                                                                                  \
                   : A_VALUES_##A, "l"(b_shared));                                                               \
    };                                                                                                           \
    run<N, FROM_SHARED_##A>(a, b, c, d, instruction);                                                            \
  }                                                                                                              \
  extern "C" EXPORT int wgmma_##TYPE##_n##N##_##A(const void* a, const void* b, const void* c, void* d,          \
                                                  unsigned count, cudaStream_t stream) {                         \
    kernel_##TYPE##_n##N##_##A<<<count, kThreads, 0, stream>>>(                                                  \
        static_cast<const uint8_t*>(a), static_cast<const uint8_t*>(b), static_cast<const float*>(c),            \
        static_cast<float*>(d));                                                                                 \
    return cudaGetLastError();                                                                                   \
  }

#define ALL(TYPE, K, FROM_SHARED, FROM_REGISTERS) \
  HARNESS(TYPE, 8, K, shared, FROM_SHARED)        \
  HARNESS(TYPE, 256, K, shared, FROM_SHARED)      \
  HARNESS(TYPE, 8, K, registers, FROM_REGISTERS)  \
  HARNESS(TYPE, 256, K, registers, FROM_REGISTERS)

}  // namespace

ALL(bf16, 16, "1, 1, 1, 0, 0", "1, 1, 1, 0")
ALL(f16, 16, "1, 1, 1, 0, 0", "1, 1, 1, 0")
ALL(e4m3, 32, "1, 1, 1", "1, 1, 1")
ALL(e5m2, 32, "1, 1, 1", "1, 1, 1")
