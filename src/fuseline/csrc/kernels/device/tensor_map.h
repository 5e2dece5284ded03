// Descriptors of the bulk tensor copies, made on the host: up to three dimensions, fetched as boxes whose lines are 128
// bytes and lie swizzled in shared memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "../fuseline_kernels.h"

namespace fuseline {

// A tensor [outer][rows][length] in memory, its lines `row_bytes` apart and its slices `outer_bytes`, and the box that is
// fetched of it: `box_rows` lines of 128 bytes of `box_slices` slices. What of a box lies outside is zeros. `tf32`: fp32 is
// rounded to TF32 on the way, which products of TF32 would truncate (2.6 times the error).
struct BoxedTensor {
  const void* data;
  int64_t length, rows, outer, row_bytes, outer_bytes;
  int box_rows, dtype;
  bool tf32 = false;
  int box_slices = 1;

  bool operator==(const BoxedTensor& other) const {
    return data == other.data && length == other.length && rows == other.rows && outer == other.outer &&
           row_bytes == other.row_bytes && outer_bytes == other.outer_bytes && box_rows == other.box_rows &&
           dtype == other.dtype && tf32 == other.tf32 && box_slices == other.box_slices;
  }
};

// The driver's function, which the runtime finds: the library is not linked to libcuda.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) {
      cudaGetLastError();
      return decltype(&cuTensorMapEncodeTiled)(nullptr);
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

// 0, or an error's code. The last ones made are kept: weights stay where they are from call to call.
inline int make_tensor_map(CUtensorMap& map, const BoxedTensor& tensor) {
  struct Kept {
    BoxedTensor tensor{};
    CUtensorMap map;
  };
  constexpr int kKept = 32;
  static thread_local std::array<Kept, kKept> kept;
  static thread_local int next = 0;
  for (const Kept& one : kept) {
    if (one.tensor == tensor) {
      map = one.map;
      return 0;
    }
  }
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return FUSELINE_UNSUPPORTED;
  const int size = tensor.dtype == FUSELINE_FLOAT32 ? 4 : 2;
  const CUtensorMapDataType type = tensor.tf32                        ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                   : tensor.dtype == FUSELINE_FLOAT32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : tensor.dtype == FUSELINE_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[3] = {cuuint64_t(tensor.length), cuuint64_t(tensor.rows), cuuint64_t(tensor.outer)};
  const cuuint64_t strides[2] = {cuuint64_t(tensor.row_bytes), cuuint64_t(tensor.outer_bytes)};
  const cuuint32_t box[3] = {cuuint32_t(128 / size), cuuint32_t(tensor.box_rows), cuuint32_t(tensor.box_slices)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult made = encode(&map, type, 3, const_cast<void*>(tensor.data), sizes, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (made != CUDA_SUCCESS) return FUSELINE_UNSUPPORTED;
  kept[next] = {tensor, map};
  next = (next + 1) % kKept;
  return 0;
}

}  // namespace fuseline
