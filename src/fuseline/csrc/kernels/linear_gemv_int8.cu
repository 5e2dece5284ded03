// One row of activations times weights of 8 bits, so few that all of them are on their way at once.
//
// Floor: the bytes of W over the copy bandwidth, 3 us for 3000 x 3000; or what a launch in a chain cannot do before the one
// ahead has ended: x comes, is multiplied, the sums meet and leave. That is 1.3 us for 1000 x 1000.
//
// A block has 1 / kSplit of a tile's rows and all of their columns: a warp takes kSplit half chunks of 32 columns at a time,
// 512 bytes together, and has asked for all of its weights when it waits for the launch ahead. No two warps of a block want the
// same of x, so that it comes from the L2 to the lanes that multiply it. Nothing is left to balance: 376 blocks of 3000 x 3000
// take 4.1 us, where the streams (device/linear_stream.cuh), of 188 tiles two at most to a multiprocessor, take 6.4.

#include "device/linear_call.cuh"

namespace fuseline {
namespace {

template <class T, int kSplit, int kSteps>
__global__ void __launch_bounds__(kLinearThreads, 3) gemv_int8_kernel(const __grid_constant__ LinearArguments a) {
  constexpr int kLanes = kWarp / kSplit, kRows = kTileRows / kSplit, kGroups = kRows / 2;  // of a half chunk, of the block
  constexpr int kHalfBytes = kWarp * 16, kHalfColumns = kTileColumns / 2;
  __shared__ float parts[kLinearWarps * kSplit][kRows];
  if (a.overlap) let_next_start();  // its weights may come while this waits, too
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp, quad = lane % 4;
  const int part = lane / kLanes, group = lane % kLanes / 4;  // which half chunk, which rows of the block: group, group + kGroups
  const int tile = int(blockIdx.x) / kSplit, first_group = int(blockIdx.x) % kSplit * kGroups;
  const auto half_of = [&](int step) { return (step * kLinearWarps + warp) * kSplit + part; };

  // The row of W that this thread writes.
  const int row = tile * kTileRows + first_group + thread % kGroups + thread % kRows / kGroups * 8;
  const bool writes = thread < kRows && row < a.n;
  float scale = 0.f;
  uint4 raw[kSteps], x[kSteps];
  const auto load = [&] {
    const char* const from = a.weight + int64_t(tile) * a.chunks * (2 * kHalfBytes) + ((first_group + group) * 4 + quad) * 16;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      raw[s] = make_uint4(0, 0, 0, 0);
      if (half_of(s) < 2 * a.chunks) raw[s] = load_once(from + half_of(s) * kHalfBytes);
    }
    if (writes) scale = __uint_as_float(__ldg(a.scales + row));
  };
  if (a.overlap) load();
  wait_for_earlier();
  if (!a.overlap) {
    let_next_start();
    load();
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int column = half_of(s) * kHalfColumns + quad * 8;
    x[s] = make_uint4(0, 0, 0, 0);
    if (column < a.k) x[s] = *reinterpret_cast<const uint4*>(a.x + column * 2);
  }
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint32_t w[2][4];
    WeightsInt8::step<T>(w[0], raw[s].x, raw[s].y);
    WeightsInt8::step<T>(w[1], raw[s].z, raw[s].w);
    mma_16816<T>(even, w[0], x[s].x, x[s].y);
    mma_16816<T>(odd, w[1], x[s].z, x[s].w);
  }
  // Column c of the products is of the x of lanes 4 c to 4 c + 3. A lane has columns 2 quad and 2 quad + 1: one that is of its
  // own half chunk has its rows' sums.
  if (2 * quad == part * kGroups) {
    parts[warp * kSplit + part][group] = even[0] + odd[0];
    parts[warp * kSplit + part][group + kGroups] = even[2] + odd[2];
  }
  __syncthreads();
  if (!writes) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kLinearWarps * kSplit; ++i) sum += parts[i][thread];
  const float shift = a.bias ? to_float(reinterpret_cast<const T*>(a.bias)[row]) : 0.f;
  reinterpret_cast<T*>(a.y)[row] = from_float<T>(fmaf(sum, scale, shift));
}

template <class T, int kSplit>
int launch_split(const LinearArguments& a, const Device& device, void* stream) {
  const auto with = [&](auto kernel) {
    return launch(kernel, a, int64_t(a.tiles) * kSplit, dim3(kLinearThreads), 0, 1, stream, device.clusters);
  };
  const int64_t steps = divide_up(2 * a.chunks, kSplit * kLinearWarps);
  if (steps <= 1) return with(gemv_int8_kernel<T, kSplit, 1>);
  if (steps <= 2) return with(gemv_int8_kernel<T, kSplit, 2>);
  if (steps <= 4) return with(gemv_int8_kernel<T, kSplit, 4>);
  if constexpr (kSplit == 2) {
    if (steps <= 6) return with(gemv_int8_kernel<T, kSplit, 6>);
  }
  return FUSELINE_UNSUPPORTED;
}

// Halves of tiles where all of them have room at once, three blocks to a multiprocessor or, of fewer registers, four; quarters
// of more. Us by halves, quarters and streams: 1000 x 1000 1.26, 1.34, 2.80; 2000 x 2000 2.38, 2.17, 3.46; 3000 x 3000 4.13,
// 4.62, 6.42; 1024 x 4096 2.17, 2.42, 3.54; 2048 x 4096 3.80, 4.20, 4.09; 4096 x 4096 -, 6.58, 7.49; 5000 x 5000 9.35, 10.03,
// 9.38.
template <class T>
int launch_int8(const LinearArguments& a, const Device& device, void* stream) {
  const int at_once = (a.chunks <= 32 ? 4 : 3) * device.processors;
  if (2 * a.tiles <= at_once && a.chunks <= 48) return launch_split<T, 2>(a, device, stream);
  return 4 * a.tiles <= 8 * device.processors ? launch_split<T, 4>(a, device, stream) : FUSELINE_UNSUPPORTED;
}

}  // namespace

int launch_gemv_int8(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  const bool bare = !a.norm && !a.activation && !a.residual && !a.next_weight;
  if (a.m != 1 || !a.x_vectors || !bare) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return call.dtype == FUSELINE_FLOAT16 ? launch_int8<__half>(a, device, stream) : launch_int8<__nv_bfloat16>(a, device, stream);
}

}  // namespace fuseline
