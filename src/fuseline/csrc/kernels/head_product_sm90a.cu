// Trial.
#include "device/head_product.cuh"
#include "device/launch.cuh"
#include "device/tensor_map.h"

namespace fuseline {
namespace {

template <class T, bool kTurnA, bool kTurnB>
int run_product(const void* left, const void* right, void* out, int64_t m, int64_t n, int64_t k, int dtype, int group, void* stream) {
  using Shape = ProductShape;
  Device device;
  const cudaError_t found = current_device(device);
  if (found != cudaSuccess) return int(found);
  HeadProduct a{};
  a.out = out, a.m = int(m), a.n = int(n), a.tiles = int(divide_up(n, 192)), a.steps = int(divide_up(k, 64));
  a.row_blocks = int(divide_up(m, 256)), a.group = std::min(a.row_blocks, std::max(1, group)), a.items = a.tiles * a.row_blocks;
  const int64_t rows = kTurnA ? k : m, length = kTurnA ? m : k;
  int error = make_tensor_map(a.a, {left, length, rows, 1, 2 * length, 2 * length * rows, kTurnA ? 64 : kHeadRows, dtype});
  if (error == 0) error = make_tensor_map(a.b, kTurnB ? BoxedTensor{right, n, k, 1, 2 * n, 2 * n * k, 32, dtype} : BoxedTensor{right, k, n, 1, 2 * k, 2 * n * k, 96, dtype});
  if (error != 0) return error;
  const auto kernel = head_product_kernel<T, kTurnA, kTurnB>;
  int resident = 0;
  const cudaError_t asked = resident_clusters(kernel, device, kHeadThreads, size_t(Shape::kShared), 2, resident);
  if (asked != cudaSuccess) return int(asked);
  const int64_t clusters = std::min(resident, a.items);
  return launch(kernel, a, clusters * 2, dim3(kHeadThreads), size_t(Shape::kShared), 2, stream);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

// out[m, n] = left right, of bf16 (k >= 768, n a multiple of 8). kind 0: left [m, k], right [k, n]; 1: left [k, m], right
// [k, n]; 2: left [m, k], right [n, k].
extern "C" FUSELINE_API int fuseline_head_product(const void* left, const void* right, void* out, int64_t m, int64_t n, int64_t k,
                                                  int kind, int group, void* stream) {
  using T = __nv_bfloat16;
  return kind == 1   ? run_product<T, true, true>(left, right, out, m, n, k, FUSELINE_BFLOAT16, group, stream)
         : kind == 0 ? run_product<T, false, true>(left, right, out, m, n, k, FUSELINE_BFLOAT16, group, stream)
                     : run_product<T, false, false>(left, right, out, m, n, k, FUSELINE_BFLOAT16, group, stream);
}
