// Quantized weights of a linear layer as rows again, for many rows of activations and for gradients.
//
// Reads each byte of W once and writes n k elements; 16 bytes of W a thread, whose eight columns of a row go out as one access,
// or two in fp32.

#include "linear_arguments.h"

namespace fuseline {
namespace {

template <class T>
__device__ __forceinline__ void write_eight(const LinearArguments& a, int row, int column, const float (&values)[8]) {
  if (row >= a.n) return;
  T* const to = reinterpret_cast<T*>(a.y) + int64_t(row) * a.k + column;
  if (a.x_vectors && column + 8 <= a.k) {
#pragma unroll
    for (int i = 0; i < 8; i += kVector<T>) {
      float few[kVector<T>];
#pragma unroll
      for (int e = 0; e < kVector<T>; ++e) few[e] = values[i + e];
      *reinterpret_cast<uint4*>(to + i) = pack<T>(few);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < a.k) to[i] = from_float<T>(values[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kLinearThreads) dequantize_int8_kernel(const LinearArguments a) {
  const int64_t vector = int64_t(blockIdx.x) * kLinearThreads + threadIdx.x;
  const int lane = int(vector % kWarp);
  const int64_t half = vector / kWarp;
  const int tile = int(half / (2 * a.chunks)), column = int(half % (2 * a.chunks)) * 32 + lane % 4 * 8;
  if (tile >= a.tiles) return;
  const int row = tile * kTileRows + lane / 4;
  const uint4 raw = load_once(a.weight + vector * 16);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    if (row + 8 * below >= a.n) break;
    const float scale = __uint_as_float(__ldg(a.scales + row + 8 * below));
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = scale * float(int8_t(words[i / 2] >> (i % 2 * 16 + below * 8)));
    write_eight<T>(a, row + 8 * below, column, values);
  }
}

template <class T>
__global__ void __launch_bounds__(kLinearThreads) dequantize_int4_kernel(const LinearArguments a) {
  const int64_t vector = int64_t(blockIdx.x) * kLinearThreads + threadIdx.x;
  const int lane = int(vector % kWarp);
  const int64_t chunk = vector / kWarp;
  const int tile = int(chunk / a.chunks), first = int(chunk % a.chunks) * kTileColumns;
  if (tile >= a.tiles) return;
  const int row = tile * kTileRows + lane / 4;
  const uint4 raw = load_once(a.weight + vector * 16);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of = min((first / 32 + half) >> a.group_shift, a.groups - 1);
    const int64_t place = (int64_t(tile) * a.groups + of) * 8 + lane / 4;
    const float2 scales = unpack_pair<__nv_bfloat16>(__ldg(a.scales + place));
    const uint32_t zeros = a.zeros ? __ldg(a.zeros + place / 2) >> (place % 2 * 16) & 0xffffu : 0x0808u;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const float scale = below ? scales.y : scales.x;
      const int zero = int(below ? zeros >> 8 : zeros & 0xffu);
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // column i of four is nibble 0, 4, 2, 6 of its word
        const int nibble = i % 2 * 4 + i % 4 / 2 * 2 + below;
        values[i] = scale * float(int(words[2 * half + i / 4] >> (4 * nibble) & 0xfu) - zero);
      }
      write_eight<T>(a, row + 8 * below, first + half * 32 + lane % 4 * 8, values);
    }
  }
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_dequantize(const fuseline_linear* call, void* stream) {
  LinearArguments a{};
  const int refused = read_arguments(*call, a);
  if (refused) return refused;
  if (call->format == FUSELINE_WEIGHT_16) return FUSELINE_UNSUPPORTED;
  if (call->n == 0 || call->k == 0) return 0;
  return with_dtype(call->dtype, [&](auto element) -> int {
    using T = decltype(element);
    a.x_vectors = call->k % kVector<T> == 0 && offset_in_vector(call->y) == 0;
    const bool int8 = call->format == FUSELINE_WEIGHT_INT8;
    const int64_t vectors = int64_t(a.tiles) * a.chunks * kWarp * (int8 ? 2 : 1);
    return launch(int8 ? dequantize_int8_kernel<T> : dequantize_int4_kernel<T>, a, divide_up(vectors, kLinearThreads),
                  dim3(kLinearThreads), 0, 1, stream);
  });
}
