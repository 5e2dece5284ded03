// The backward of norms, of x or of residual + dropout(x + x_bias), for the longest rows: device/norm_backward_pieces.cuh.
#include "device/norm_backward_pieces.cuh"
#include "device/norm_sums.cuh"

namespace fuseline {
namespace {

// Rows that half the blocks of a cluster hold are left to norm_backward_ring.cuh, and so are those of 16 bits of which no sums
// of x_bias are wanted.
constexpr int64_t kColumnsOfBlock = int64_t(kPiecesThreads) * kPieceColumns;
bool in_pieces(int64_t n) { return n > kPiecesBlocks / 2 * kColumnsOfBlock && n <= kPiecesBlocks * kColumnsOfBlock; }

template <class Kind>
bool run(NormBackward a, int sums, const Device& device, void* stream, int& error) {
  using T = typename Kind::T;
  if (!in_vectors<Kind::kSize>(a)) return false;
  PiecesNorm given{a};
  given.norm.cluster = kPiecesBlocks;
  const int warps = int(divide_up(divide_up(a.n, kPieceColumns * kWarp), kPiecesBlocks));
  const int64_t room = device.shared_a_block - int64_t(sizeof(PiecesStatics));
  const int64_t columns = int64_t(warps) * kWarp * kPieceColumns;
  const int64_t weights = columns * ((a.weight && a.fp32_weights) || sizeof(T) == 4 ? 4 : 2);
  const int64_t states = int64_t(2) * kPiecesBlocks * warps * int64_t(sizeof(float2));
  const int64_t beside = states + weights + (Kind::kXBias == 2 ? columns * 4 : 0);
  const int64_t piece = int64_t(warps) * kPieceBytes;  // of a tensor, of all warps
  const auto left = [&] { return room - beside - piece * (2 * given.pieces + given.past); };
  given.pieces = Kind::kSlots, given.past = a.grad_sum ? 1 : 0;
  if (left() < 0) return false;
  // The row itself, then grad_sum of as much, then more of both.
  while (a.grad_sum && given.past < Kind::kSlots && given.past < kMostPastAhead && left() >= piece) ++given.past;
  while (given.pieces < kMostPiecesAhead && left() >= 2 * piece) ++given.pieces;
  while (a.grad_sum && given.past < kMostPastAhead && left() >= piece) ++given.past;
  const size_t bytes = size_t(room - left());
  given.past_at = int(2 * given.pieces * piece), given.states_at = int(given.past_at + given.past * piece);
  given.weights_at = given.states_at + int(states), given.x_bias_at = given.weights_at + int(weights);
  const auto kernel = norm_backward_pieces<Kind>;
  int count = 0;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess ||
      resident_clusters(kernel, device, warps * kWarp, bytes, kPiecesBlocks, count) != cudaSuccess || count == 0) {
    return cudaGetLastError(), false;  // it grants no such clusters
  }
  const int blocks = int(std::min<int64_t>({a.rows, count, divide_up(device.processors, kPiecesBlocks)}));
  error = launch(kernel, given, int64_t(blocks) * kPiecesBlocks, dim3(warps * kWarp), bytes, kPiecesBlocks, stream, true);
  if (!error && a.partials) error = add_partials<T>(a, sums, blocks, true, stream);
  return true;
}

}  // namespace

bool norm_backward_pieces(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error) {
  if (dtype != y_dtype || !device.clusters || !in_pieces(a.n) || (a.grad_bias && !a.mean)) return false;
  if (row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) return false;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const bool more = a.grad_x_bias || a.grad_dropped;
    if (more && !a.mean) return int(run<PiecesKind<T, false, 1>>(a, 3, device, stream, error));
    if constexpr (sizeof(T) == 2) {
      return int(more && run<PiecesKind<T, true, 2>>(a, 3, device, stream, error));
    } else {
      if (more) return 0;  // a third sum has no room beside fp32 weights
      return int(a.mean ? run<PiecesKind<T, true, 0>>(a, 2, device, stream, error)
                        : run<PiecesKind<T, false, 0>>(a, 1, device, stream, error));
    }
  });
}

int64_t norm_backward_pieces_blocks(int64_t rows, int64_t n, const Device& device) {
  return in_pieces(n) && device.clusters ? std::min(rows, divide_up(device.processors, kPiecesBlocks)) : 0;
}

}  // namespace fuseline
