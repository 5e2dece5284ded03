// The backward of norms, of x or of residual + dropout(x + x_bias), for the longest rows: device/norm_backward_pieces.cuh.
#include <cstdio>
#include <cstdlib>

#include "device/norm_backward_pieces.cuh"
#include "device/norm_sums.cuh"

namespace fuseline {
namespace {

// Trial: FUSELINE_B_PIECES=shortest row,0 or 1 for weights in shared memory,most pieces,most of grad_sum. 0 for none.
struct Trial {
  long long shortest = 131073;
  int keeps = -1, pieces = kMostPiecesAhead, past = kMostPastAhead;
  Trial() {
    if (const char* const said = std::getenv("FUSELINE_B_PIECES")) {
      std::sscanf(said, "%lld,%d,%d,%d", &shortest, &keeps, &pieces, &past);
    }
  }
};

template <class Kind>
bool run(NormBackward a, int sums, const Device& device, void* stream, int& error) {
  using T = typename Kind::T;
  const Trial trial;
  if (trial.shortest == 0 || a.n < trial.shortest || !in_vectors<Kind::kSize>(a)) return false;
  PiecesNorm given{a};
  bool kept = false;
  int cluster = 1;
  while (cluster < kMostBlocks && a.n > int64_t(cluster) * kPiecesThreads * kPieceColumns) cluster *= 2;
  const int warps = int(divide_up(divide_up(a.n, kPieceColumns * kWarp), cluster));
  if (warps > kPiecesWarps) return false;
  given.norm.cluster = cluster;
  const int64_t room = device.shared_a_block - int64_t(sizeof(PiecesStatics));
  const int64_t columns = int64_t(warps) * kWarp * kPieceColumns;
  const int64_t weights = columns * ((a.weight && a.fp32_weights) || sizeof(T) == 4 ? 4 : 2);
  const int64_t beside = int64_t(2) * cluster * warps * 8 + (Kind::kXBias == 2 ? columns * 4 : 0);
  const int64_t piece = int64_t(warps) * kPieceBytes;  // of a tensor, of all warps
  const auto left = [&] { return room - beside - (kept ? weights : 0) - piece * (2 * given.pieces + given.past); };
  const auto fits = [&](bool keeps) {
    kept = keeps, given.pieces = Kind::kSlots, given.past = a.grad_sum ? 1 : 0;
    if (left() < 0) return false;
    while (a.grad_sum && given.past < Kind::kSlots && given.past < trial.past && left() >= piece) ++given.past;
    while (given.pieces < trial.pieces && left() >= 2 * piece) ++given.pieces;
    while (a.grad_sum && given.past < trial.past && left() >= piece) ++given.past;
    return true;
  };
  if (!(trial.keeps != 0 && fits(true)) && !fits(false)) return false;
  const size_t bytes = size_t(room - left());
  given.past_at = int(2 * given.pieces * piece), given.states_at = int(given.past_at + given.past * piece);
  const int behind = given.states_at + 2 * cluster * warps * int(sizeof(float2));
  given.weights_at = kept ? behind : 0, given.x_bias_at = behind + (kept ? int(weights) : 0);
  const auto kernel = norm_backward_pieces<Kind>;
  if (cluster > kMaxCluster) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  int count = 0;
  const cudaError_t found = resident_clusters(kernel, device, warps * kWarp, bytes, cluster, count);
  if (found != cudaSuccess || count == 0) {  // larger clusters than all devices have
    cudaGetLastError();
    return error = int(found), cluster <= kMaxCluster && error != 0;
  }
  const int blocks = int(std::min<int64_t>({a.rows, count, divide_up(device.processors, cluster)}));
  if (std::getenv("FUSELINE_B_SAY")) {
    std::fprintf(stderr, "pieces %d past %d keeps %d bytes %zu clusters %d of %d\n", given.pieces, given.past, kept,
                 bytes, blocks, cluster);
  }
  error = launch(kernel, given, int64_t(blocks) * cluster, dim3(warps * kWarp), bytes, cluster, stream, true);
  if (!error && a.partials) error = add_partials<T>(a, sums, blocks, true, stream);
  return true;
}

}  // namespace

bool norm_backward_pieces(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error) {
  if (dtype != y_dtype || !device.clusters || (a.grad_bias && !a.mean)) return false;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const bool more = a.grad_x_bias || a.grad_dropped;
    if (a.mean) {
      return int(more ? run<PiecesKind<T, true, 2>>(a, 3, device, stream, error)
                      : run<PiecesKind<T, true, 0>>(a, 2, device, stream, error));
    }
    return int(more ? run<PiecesKind<T, false, 1>>(a, 3, device, stream, error)
                    : run<PiecesKind<T, false, 0>>(a, 1, device, stream, error));
  });
}

}  // namespace fuseline
