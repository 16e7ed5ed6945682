// The host side that all kernels share: what a launch is bound to, tensor maps, the exported functions.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fused_swiglu {

// Addresses of device memory; strides between rows in elements; what a kernel has no use for is 0.
struct Arguments {
  int64_t out, x, gate, up, bias_gate, bias_up, preactivations, debug;
  int64_t m, n, k;
  int64_t x_stride, gate_stride, up_stride, out_stride, preactivations_stride;
  int64_t device, raster;
};

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // not sticky: it must not surface in the caller's next CUDA call
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// Makes the device current for a scope, and puts back the one that was.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    moved_ = device != before_;
    if (moved_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() {
    if (moved_) cudaSetDevice(before_);
  }
  OnDevice(OnDevice const&) = delete;

 private:
  int before_ = 0;
  bool moved_ = false;
};

// A row-major matrix of 16-bit elements, moved in [box_rows, box_columns] boxes; a row of a box is one swizzle span.
inline CUtensorMap tensor_map(int64_t address, int64_t rows, int64_t columns, int64_t stride, int box_rows,
                              int box_columns, CUtensorMapDataType type) {
  static auto const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  CUtensorMap map;
  cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride) * 2};
  cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[] = {1, 1};
  CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                               : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_32B;
  CUresult status = encode(&map, type, 2, reinterpret_cast<void*>(address), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled refuses a [" + std::to_string(rows) + ", " +
                             std::to_string(columns) + "] matrix of row stride " + std::to_string(stride) + ", error " +
                             std::to_string(int(status)));
  return map;
}

// The C ABI of tvm-ffi by hand: its C++ headers would take longer to compile than most kernels.
template <class Body>
int safely(Body body) {
  try {
    body();
    return 0;
  } catch (std::exception const& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
    return -1;
  }
}

template <class Bound>
int64_t bind(TVMFFIAny const* given, int32_t count) {
  constexpr int COUNT = sizeof(Arguments) / sizeof(int64_t);
  if (count != COUNT) throw std::runtime_error("bind takes " + std::to_string(COUNT) + " integers");
  union {
    int64_t values[COUNT];
    Arguments arguments;
  } all;
  for (int i = 0; i < COUNT; ++i) all.values[i] = given[i].v_int64;
  OnDevice here(static_cast<int>(all.arguments.device));
  return reinterpret_cast<int64_t>(new Bound(all.arguments));
}

// Exports, of a class with a constructor from Arguments and `void run(cudaStream_t) const`:
// bind(the fields of Arguments in order) -> handle, run(handle, stream), release(handle); all integers.
// The constructor does all that can be done before a launch.
#define FUSED_SWIGLU_EXPORT(Bound)                                                                                  \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_bind(void*, TVMFFIAny const* given, int32_t count, TVMFFIAny* result) { \
    return fused_swiglu::safely([&] {                                                                               \
      result->v_int64 = fused_swiglu::bind<Bound>(given, count);                                                    \
      result->type_index = kTVMFFIInt;                                                                              \
    });                                                                                                             \
  }                                                                                                                 \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_run(void*, TVMFFIAny const* given, int32_t, TVMFFIAny*) {             \
    return fused_swiglu::safely([&] {                                                                               \
      reinterpret_cast<Bound const*>(given[0].v_int64)->run(reinterpret_cast<cudaStream_t>(given[1].v_int64));      \
    });                                                                                                             \
  }                                                                                                                 \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_release(void*, TVMFFIAny const* given, int32_t, TVMFFIAny*) {         \
    delete reinterpret_cast<Bound const*>(given[0].v_int64);                                                        \
    return 0;                                                                                                       \
  }

}  // namespace fused_swiglu
