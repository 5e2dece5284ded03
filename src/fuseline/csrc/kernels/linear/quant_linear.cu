// The C API of linear layers for few rows: what it refuses, and weights as rows again, for many rows and for gradients.
//
// Dequantizing reads each byte of W once and writes n k elements; 16 bytes of W a thread, whose eight columns of a row go
// out as one access, or two in fp32.

#include "linear_stream_launch.cuh"
#include "linear_tiles_launch.cuh"

namespace fuseline {

int launch_gemv_16(const LinearArguments& a, const fuseline_linear& call, void* stream);       // linear_gemv.cu
int launch_gemv_shifted(const LinearArguments& a, const fuseline_linear& call, void* stream);  // linear_gemv_shifted.cu
int launch_gemv_quantized(const LinearArguments& a, const fuseline_linear& call, void* stream);  // linear_gemv_quantized.cu
int run_slices(const LinearArguments& a, const fuseline_linear& call, void* stream);           // linear_slices.cu
int run_65_to_256_int8(const LinearArguments& a, const fuseline_linear& call, void* stream);  // linear_65_to_256_int8_sm90a.cu
int run_65_to_256_int4(const LinearArguments& a, const fuseline_linear& call, void* stream);  // linear_65_to_256_int4_sm90a.cu

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

bool power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Answers 0, or why the call cannot be.
int read_call(const fuseline_linear& call, LinearArguments& a) {
  const bool int4 = call.format == FUSELINE_WEIGHT_INT4;
  if (call.format < FUSELINE_WEIGHT_16 || call.format > FUSELINE_WEIGHT_INT4) return FUSELINE_UNSUPPORTED;
  if (call.m < 0 || call.n < 0 || call.k < 0) return FUSELINE_BAD_SIZE;
  if (call.m > 0x3fffffff || call.n > 0x3fffffff || call.k > 0x3fffffff) return FUSELINE_UNSUPPORTED;
  if (int4 && (call.group_size < 32 || !power_of_two(call.group_size))) return FUSELINE_UNSUPPORTED;
  if (call.format != FUSELINE_WEIGHT_16 && offset_in_vector(call.weight)) return FUSELINE_UNSUPPORTED;
  a.x = static_cast<const char*>(call.x), a.weight = static_cast<const char*>(call.weight);
  a.scales = static_cast<const uint32_t*>(call.scales), a.zeros = static_cast<const uint32_t*>(call.zeros);
  a.bias = static_cast<const char*>(call.bias), a.y = static_cast<char*>(call.y);
  a.x_stride = 2 * call.x_stride, a.weight_stride = 2 * call.weight_stride;
  a.m = int(call.m), a.n = int(call.n), a.k = int(call.k);
  a.tiles = int(divide_up(call.n, kTileRows)), a.chunks = int(divide_up(call.k, kTileColumns));
  a.groups = int4 ? int(divide_up(call.k, call.group_size)) : 1;
  a.group_shift = 0;
  while (int4 && (int64_t(32) << a.group_shift) < call.group_size) ++a.group_shift;
  return 0;
}

// A stream's blocks hold all rows of x: fewer at a time, where they do not fit.
template <class T, class Weights>
int run_streams(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  int answer = FUSELINE_UNSUPPORTED;
  for (int rows = kStreamRows; rows >= 1 && answer == FUSELINE_UNSUPPORTED; rows /= 2) {
    if (a.m <= rows / 2) continue;
    for (int first = 0; first < a.m; first += rows) {
      LinearArguments some = a;
      some.m = std::min(a.m - first, rows);
      some.x = a.x + first * a.x_stride;
      const int64_t written = int64_t(first) * (a.halves ? a.n / 2 : a.n) * 2;
      some.y = a.y + written;
      if (a.residual) some.residual = a.residual + written;
      answer = run_stream<T, Weights>(some, call, stream);
      if (answer != 0) break;
    }
  }
  return answer;
}

template <class T, class Weights>
int run(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  constexpr int kFastStreams = 16;  // rows of x up to which a stream is the fastest, where slices are not
  constexpr int64_t kManyWeights = 32 << 20;  // but for more than 8 rows and so many weights
  constexpr int kMostStreams = 128;  // rows of x, beyond which the weight is better dequantized
  int answer = FUSELINE_UNSUPPORTED;
  const auto tiles = [&] {
    if constexpr (Weights::kFormat != FUSELINE_WEIGHT_16) {
      if (answer == FUSELINE_UNSUPPORTED && call.kernel != FUSELINE_LINEAR_STREAM) {
        answer = run_tiles<T, Weights>(a, call, stream);
      }
    }
  };
  const bool many = int64_t(a.n) * a.k >= kManyWeights;
  if (a.m > (many ? 8 : kFastStreams)) tiles();
  if (answer == FUSELINE_UNSUPPORTED && call.kernel <= FUSELINE_LINEAR_STREAM) {
    answer = run_stream<T, Weights>(a, call, stream);
  }
  tiles();
  if (answer != FUSELINE_UNSUPPORTED || call.kernel > FUSELINE_LINEAR_STREAM || a.m > kMostStreams) return answer;
  return run_streams<T, Weights>(a, call, stream);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_quant_linear(const fuseline_linear* call, void* stream) {
  LinearArguments a{};
  const int refused = read_call(*call, a);
  if (refused) return refused;
  if (call->dtype != FUSELINE_FLOAT16 && call->dtype != FUSELINE_BFLOAT16) return FUSELINE_UNSUPPORTED;
  if (call->m == 0 || call->n == 0) return 0;
  a.x_vectors = call->k % 8 == 0 && call->x_stride % 8 == 0 && offset_in_vector(call->x) == 0;
  a.overlap = call->overlap;
  a.workspace = static_cast<char*>(call->workspace);
  a.norm = call->norm, a.eps = float(call->eps);
  a.norm_weight = static_cast<const char*>(call->norm_weight), a.norm_bias = static_cast<const char*>(call->norm_bias);
  a.activation = call->activation, a.residual = static_cast<const char*>(call->residual);
  if (a.norm && (!a.norm_weight || !a.x_vectors || offset_in_vector(a.norm_weight) || offset_in_vector(a.norm_bias))) {
    return FUSELINE_UNSUPPORTED;
  }
  if (a.activation == FUSELINE_ACTIVATION_SWIGLU) {
    if (call->n % (2 * kTileRows)) return FUSELINE_UNSUPPORTED;
    a.halves = a.tiles / 2;
  }
  if (call->next_weight && offset_in_vector(call->next_weight) == 0) {
    a.next_weight = static_cast<const char*>(call->next_weight);
    a.next_pieces = int(std::min<int64_t>(call->next_bytes / kPieceBytes, 1 << 30));
  }
  const bool plain = call->format == FUSELINE_WEIGHT_16, half = call->dtype == FUSELINE_FLOAT16;
  const bool shifted = plain && (call->k % 8 || call->weight_stride % 8 || offset_in_vector(call->weight));
  if (call->kernel == FUSELINE_LINEAR_GEMV || (!call->kernel && !call->splits)) {
    int answer = FUSELINE_UNSUPPORTED;
    if (plain) answer = shifted ? launch_gemv_shifted(a, *call, stream) : launch_gemv_16(a, *call, stream);
    if (!plain) answer = launch_gemv_quantized(a, *call, stream);
    if (answer != FUSELINE_UNSUPPORTED || call->kernel) return answer;
  }
  if (!plain && (!call->kernel || call->kernel == FUSELINE_LINEAR_SLICES)) {
    const int answer = run_slices(a, *call, stream);
    if (answer != FUSELINE_UNSUPPORTED || call->kernel) return answer;
  }
  if (!plain) {
    const auto run_65_to_256 = call->format == FUSELINE_WEIGHT_INT8 ? run_65_to_256_int8 : run_65_to_256_int4;
    const int answer = run_65_to_256(a, *call, stream);
    if (answer != FUSELINE_UNSUPPORTED || call->kernel == FUSELINE_LINEAR_65_TO_256) return answer;
  }
  switch (call->format) {
    case FUSELINE_WEIGHT_INT8:
      return half ? run<__half, WeightsInt8>(a, *call, stream) : run<__nv_bfloat16, WeightsInt8>(a, *call, stream);
    case FUSELINE_WEIGHT_INT4:
      return half ? run<__half, WeightsInt4>(a, *call, stream) : run<__nv_bfloat16, WeightsInt4>(a, *call, stream);
    default:
      if (shifted) return FUSELINE_UNSUPPORTED;
      return half ? run<__half, Weights16>(a, *call, stream) : run<__nv_bfloat16, Weights16>(a, *call, stream);
  }
}

int64_t fuseline_quant_linear_workspace(int format, int64_t m, int64_t k) {
  Device device;
  if (format == FUSELINE_WEIGHT_16 || current_device(device) != cudaSuccess) return 0;
  return tiled_bytes(m, k, device.processors);
}

uint64_t fuseline_capture_id(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();  // the stream that others being captured exclude: nothing is known of it
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

int fuseline_dequantize(const fuseline_linear* call, void* stream) {
  LinearArguments a{};
  const int refused = read_call(*call, a);
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
