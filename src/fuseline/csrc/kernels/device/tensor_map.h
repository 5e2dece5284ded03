// Descriptors of the bulk tensor copies, made on the host: up to four dimensions, fetched as boxes whose lines are 128
// bytes and lie swizzled in shared memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
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

// 0, or an error's code: a descriptor of `kRank` dimensions, the first with elements side by side, the strides of the others
// in bytes.
template <int kRank>
int encode_tensor_map(CUtensorMap& map, CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kRank],
                      const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return FUSELINE_UNSUPPORTED;
  cuuint32_t steps[kRank];
  std::fill(steps, steps + kRank, 1u);
  const CUresult made = encode(&map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? 0 : FUSELINE_UNSUPPORTED;
}

inline CUtensorMapDataType tensor_map_type(int dtype) {
  return dtype == FUSELINE_FLOAT32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : dtype == FUSELINE_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
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
  const int size = tensor.dtype == FUSELINE_FLOAT32 ? 4 : 2;
  const cuuint64_t sizes[3] = {cuuint64_t(tensor.length), cuuint64_t(tensor.rows), cuuint64_t(tensor.outer)};
  const cuuint64_t strides[2] = {cuuint64_t(tensor.row_bytes), cuuint64_t(tensor.outer_bytes)};
  const cuuint32_t box[3] = {cuuint32_t(128 / size), cuuint32_t(tensor.box_rows), cuuint32_t(tensor.box_slices)};
  const CUtensorMapDataType type = tensor.tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : tensor_map_type(tensor.dtype);
  if (const int code = encode_tensor_map<3>(map, type, tensor.data, sizes, strides, box)) return code;
  kept[next] = {tensor, map};
  next = (next + 1) % kKept;
  return 0;
}

// A tensor [batch, heads, rows, head_dim] of 16-bit elements, `strides` in elements (any where a dimension is 1 long), fetched
// in boxes of `box_rows` rows and 64 columns of a head. 0, or an error's code: FUSELINE_UNSUPPORTED for expanded tensors.
inline int make_heads_map(CUtensorMap& map, const void* data, const int64_t (&strides)[3], int64_t batch, int64_t heads,
                          int64_t rows, int64_t head_dim, int box_rows, int dtype) {
  const int64_t counts[3] = {rows, heads, batch};
  const cuuint64_t sizes[4] = {cuuint64_t(head_dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(batch)};
  cuuint64_t bytes[3];
  for (int i = 0; i < 3; ++i) {
    if (counts[i] > 1 && strides[2 - i] == 0) return FUSELINE_UNSUPPORTED;  // expanded
    bytes[i] = cuuint64_t(2 * (counts[i] == 1 ? head_dim : strides[2 - i]));
  }
  const cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1};
  return encode_tensor_map<4>(map, tensor_map_type(dtype), data, sizes, bytes, box);
}

}  // namespace fuseline
