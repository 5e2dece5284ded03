// The backward of a norm of residual + dropout(x + x_bias) for long rows: device/norm_backward_ring.cuh with sums for
// weight, bias and x_bias.
#include "device/norm_backward_ring_launch.cuh"

namespace fuseline {
namespace {

// Rows of which no block holds three sums of each column, and where there are but two.
template <class X, class Y>
using PastFamily = RingFamily<X, Y, kSumsOfLayerNorm, true, true>;
constexpr int64_t kLongestAdded = 262144;  // bytes of y

template <class X, class Y>
bool past_ring(const NormBackward& a) {
  return a.n * int64_t(sizeof(Y)) > kLongestAdded && a.grad_sum && a.grad_x && !a.grad_dropped && !a.grad_x_bias;
}

}  // namespace

bool add_norm_backward_ring(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                            const RowChoice* requested) {
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    if (past_ring<X, Y>(a) && PastFamily<X, Y>::run(a, device, stream, error, requested)) return 1;
    return int(RingFamily<X, Y, kSumsOfAddedNorm, true>::run(a, device, stream, error, requested));
  });
}

int64_t add_norm_backward_ring_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device) {
  int64_t blocks = 0;
  with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    blocks = std::max(RingFamily<X, Y, kSumsOfAddedNorm, true>::blocks(rows, n, device),
                      PastFamily<X, Y>::blocks(rows, n, device));
    return 0;
  });
  return blocks;
}

}  // namespace fuseline
