// A matrix of bytes transposed: the gradient of a linear layer's input reads its fp8 weight by columns, and fp8 products
// take both operands by rows of what is summed over.
//
// Moves: each byte read once and written once. Limit: HBM bandwidth.
//
// Threads: a block has a tile of kSide x kSide bytes, which goes through shared memory. A thread reads 16 bytes of a row and
// writes 16 bytes of a column. Rows in shared memory are a word longer than the tile, so that a column lies in all banks.

#include "device/launch.cuh"
#include "fuseline_fp8.h"

namespace fuseline {
namespace {

constexpr int kSide = 64, kVectors = kSide / 16, kPitch = kSide + 4;

struct Fp8Transpose {
  const uint8_t* x;
  uint8_t* y;
  int64_t rows, n;
  int tiles_a_row;
};

__global__ void __launch_bounds__(kSide* kVectors) fp8_transpose(const Fp8Transpose a) {
  __shared__ uint8_t tile[kSide * kPitch];
  const int64_t top = blockIdx.x / a.tiles_a_row * int64_t(kSide), left = blockIdx.x % a.tiles_a_row * int64_t(kSide);
  const int line = threadIdx.x / kVectors, part = threadIdx.x % kVectors * 16;
  let_next_start();
  wait_for_earlier();
  if (top + line < a.rows && left + part < a.n) {
    const uint4 read = *reinterpret_cast<const uint4*>(a.x + (top + line) * a.n + left + part);
    uint32_t* const words = reinterpret_cast<uint32_t*>(tile + line * kPitch + part);
    words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
  }
  __syncthreads();
  if (left + line >= a.n || top + part >= a.rows) return;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i / 4] |= uint32_t(tile[(part + i) * kPitch + line]) << 8 * (i % 4);
  *reinterpret_cast<uint4*>(a.y + (left + line) * a.rows + top + part) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace
}  // namespace fuseline

int fuseline_fp8_transpose(const void* x, void* y, int64_t rows, int64_t n, void* stream) {
  using namespace fuseline;
  if (rows < 0 || n < 0) return FUSELINE_BAD_SIZE;
  if (rows == 0 || n == 0) return 0;
  if (rows % 16 || n % 16 || offset_in_vector(x) || offset_in_vector(y)) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const int64_t across = divide_up(n, kSide);
  if (across > 0x7fffffff) return FUSELINE_BAD_SIZE;
  const Fp8Transpose a{static_cast<const uint8_t*>(x), static_cast<uint8_t*>(y), rows, n, int(across)};
  return launch(fp8_transpose, a, across * divide_up(rows, kSide), dim3(kSide * kVectors), 0, 1, stream, device.clusters);
}
