// The backward of norms, of x or of residual + dropout(x + x_bias), for many long rows at any address:
// device/norm_backward_pieces.cuh. Shares of the copy bandwidth at 50,257 elements, of layer and RMS norms, by
// norm_backward_ring.cuh, which shifts vectors, and here: fp32 0.571 and 0.874, 0.638 and 0.876, of sums 0.610 and 0.869, 0.610 and
// 0.876, with a mask 0.567 and 0.831, 0.569 and 0.839; 16 bits 0.451 and 0.775, 0.486 and 0.820, 0.486 and 0.860, 0.488 and 0.894,
// 0.413 and 0.593, 0.414 and 0.635. By pieces of one slot 0.02 to 0.12 less, but 0.05 more of fp32 at 262,143.
#include "device/norm_backward_pieces_launch.cuh"

namespace fuseline {
namespace {

// As few blocks as hold a row: of 50,257 elements 4 read 0.847 in layer norms of fp32, 8 0.693, 16 0.440.
template <class T, bool kCentred, int kXBias, bool kDrops>
bool run(const NormBackward& a, const Device& device, void* stream, int& error) {
  for (int cluster = kLeastPiecesBlocks; cluster <= kMostBlocks; cluster *= 2) {
    if (run_pieces<PiecesKind<T, kCentred, kXBias, kDrops, true, 2>>(a, cluster, device, stream, error)) return true;
  }
  return false;
}

template <class T, bool kCentred>
bool run_centred(const NormBackward& a, const Device& device, void* stream, int& error) {
  if (a.grad_x_bias) return run<T, kCentred, 2, true>(a, device, stream, error);
  if (a.grad_dropped) return run<T, kCentred, 0, true>(a, device, stream, error);
  return run<T, kCentred, 0, false>(a, device, stream, error);
}

}  // namespace

bool norm_backward_pieces_shifted(const NormBackward& a, int dtype, const Device& device, void* stream, int& error) {
  const bool masked_halves = dtype != FUSELINE_FLOAT32 && (a.grad_dropped || a.grad_x_bias);
  if (a.n <= (masked_halves ? 2 * kShortestPieces : kShortestPieces) || a.rows < device.processors) return false;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (in_vectors<kVector<T>>(a)) return 0;
    return int(a.mean ? run_centred<T, true>(a, device, stream, error) : run_centred<T, false>(a, device, stream, error));
  });
}

}  // namespace fuseline
