// The backward of norms, of x or of residual + dropout(x + x_bias), for the longest rows and others that fill its warps:
// device/norm_backward_pieces.cuh.
#include "device/norm_backward_pieces_launch.cuh"

namespace fuseline {
namespace {

constexpr int64_t kColumnsOfBlock = kPiecesWarps * kColumnsOfWarp;
constexpr int64_t kLongest = kMostBlocks * kColumnsOfBlock;  // 262,144 elements

// How many blocks share a row; 0 where norm_backward_ring.cuh reads more, or as much. Shares of the copy bandwidth there and
// here, of layer and RMS norms: fp32 with a mask 131,072 0.398 (which no ring holds) and 0.917, 0.398 and 0.927; sums of fp32
// 12,288 0.926 and 0.969, 0.929 and 0.966, 16,384 0.937 and 0.954, 0.938 and 0.961, with a mask 12,288 0.919 and 0.943, 0.912 and
// 0.919, 16,384 0.917 and 0.926, 0.919 and 0.933; of x alone 0.943 and 0.914, 0.967 and 0.950 at 12,288. Of 16 bits sums at 32,768
// 0.907 and 0.940, 0.912 and 0.959, at 131,072 0.906 and 0.915, 0.908 and 0.944, at 262,144 0.886 and 0.926, 0.888 and 0.915;
// norms of x at 32,768 0.906 and 0.914, 0.901 and 0.920, at 50,304 0.766 and 0.886, 0.888 and 0.938, at 131,072 0.851 and 0.898,
// 0.941 and 0.927, at 262,144 0.871 and 0.849, 0.911 and 0.907. With warps that have no columns it is slower: 16,384 of 16 bits
// 0.918 and 0.781.
int pieces_cluster(const NormBackward& a, bool halves, const Device& device) {
  constexpr int64_t kNearly = 14;  // of kPiecesWarps warps have columns
  const bool drops = a.grad_dropped || a.grad_x_bias, sum = a.grad_sum, many = a.rows >= device.processors;
  const auto fills = [&](int blocks) {
    return a.n > blocks * kNearly * kColumnsOfWarp && a.n <= blocks * kPiecesWarps * kColumnsOfWarp;
  };
  if (a.n > kLongest) return 0;
  if (a.n > kLongest / 2) return halves && !drops && !(sum && many) ? 0 : kMostBlocks;
  if (!halves && drops && a.n > kLongest / 4) return kMostBlocks / 2;
  return many && halves && !drops && fills(8) && (sum || a.mean) ? 8 : 0;
}

template <class T, bool kCentred, int kXBias, bool kDrops>
bool run(const NormBackward& a, int cluster, const Device& device, void* stream, int& error, const RowChoice* requested) {
  if constexpr (sizeof(T) == 4) {  // by pieces of two slots 0.877 of the copy bandwidth in place of 0.894, 0.883 of 0.907
    using Narrow = PiecesKind<T, kCentred, kXBias, kDrops, false, 1>;
    if (requested ? requested->held == 1 : cluster == kMostBlocks) return run_pieces<Narrow>(a, cluster, device, stream, error);
  } else if (requested && requested->held == 1) {
    return false;
  }
  return run_pieces<PiecesKind<T, kCentred, kXBias, kDrops, false, 2>>(a, cluster, device, stream, error);
}

template <class T, bool kCentred>
bool run_centred(const NormBackward& a, const Device& device, void* stream, int& error, const RowChoice* requested) {
  const int cluster = requested ? requested->cluster : pieces_cluster(a, sizeof(T) == 2, device);
  if (cluster == 0) return false;
  if (a.grad_x_bias) return run<T, kCentred, kCentred ? 2 : 1, true>(a, cluster, device, stream, error, requested);
  if (a.grad_dropped) return run<T, kCentred, 0, true>(a, cluster, device, stream, error, requested);
  return run<T, kCentred, 0, false>(a, cluster, device, stream, error, requested);
}

}  // namespace

bool norm_backward_pieces(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                          const RowChoice* requested) {
  if (dtype != y_dtype || !device.clusters || (a.grad_bias && !a.mean)) return false;
  if (row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) return false;
  if (!requested && norm_backward_pieces_shifted(a, dtype, device, stream, error)) return true;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return int(a.mean ? run_centred<T, true>(a, device, stream, error, requested)
                      : run_centred<T, false>(a, device, stream, error, requested));
  });
}

int64_t norm_backward_pieces_blocks(int64_t rows, int64_t n, const Device& device) {
  if (n <= kShortestPieces || n > kLongest || !device.clusters) return 0;
  int cluster = kLeastPiecesBlocks;  // the fewest that hold a row
  while (cluster * kColumnsOfBlock < n) cluster *= 2;
  return std::min(rows, divide_up(device.processors, cluster));
}

}  // namespace fuseline
