// The host's half of norm_backward_pieces.cuh: how many blocks share a row, and how many pieces are on their way.
#pragma once

#include "choice.h"
#include "norm_backward_pieces.cuh"
#include "norm_sums.cuh"

namespace fuseline {

constexpr int64_t kColumnsOfWarp = int64_t(kWarp) * kPieceColumns;
constexpr int kLeastPiecesBlocks = 2;        // of a row: a block alone may send no state to itself
constexpr int64_t kShortestPieces = 8192;  // elements of rows that are shorter than all of these

// Lays rows out over `cluster` blocks; false if they do not hold it.
template <class Kind>
bool run_pieces(NormBackward a, int cluster, const Device& device, void* stream, int& error) {
  using T = typename Kind::T;
  if (!Kind::kShifted && !in_vectors<Kind::kSize>(a)) return false;
  PiecesNorm given{a};
  given.norm.cluster = cluster;
  const int warps = int(divide_up(divide_up(a.n, kColumnsOfWarp), cluster));
  if (warps > kPiecesWarps) return false;
  const int64_t room = device.shared_a_block - int64_t(sizeof(PiecesStatics));
  const int64_t columns = warps * kColumnsOfWarp;
  const int64_t weights = columns * ((a.weight && a.fp32_weights) || sizeof(T) == 4 ? 4 : 2);
  const int64_t states = int64_t(2) * cluster * warps * int64_t(sizeof(float2));
  const int64_t beside = states + weights + (Kind::kXBias == 2 ? columns * 4 : 0);
  const int64_t piece = int64_t(warps) * Kind::kPiece;  // of a tensor, of all warps
  const auto left = [&] { return room - beside - piece * (2 * given.pieces + given.past); };
  constexpr int kPieces = Kind::kSlots / Kind::kTogether;
  given.pieces = kPieces, given.past = a.grad_sum ? 1 : 0;
  if (left() < 0) return false;
  // The row itself, then grad_sum of as much, then more of both.
  while (a.grad_sum && given.past < kPieces && given.past < kMostPastAhead && left() >= piece) ++given.past;
  while (given.pieces < kMostPiecesAhead && left() >= 2 * piece) ++given.pieces;
  while (a.grad_sum && given.past < kMostPastAhead && left() >= piece) ++given.past;
  const size_t bytes = size_t(room - left());
  given.past_at = int(2 * given.pieces * piece), given.states_at = int(given.past_at + given.past * piece);
  given.weights_at = given.states_at + int(states), given.x_bias_at = given.weights_at + int(weights);
  const auto kernel = norm_backward_pieces<Kind>;
  int count = 0;
  if ((cluster > kMaxCluster &&
       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) ||
      resident_clusters(kernel, device, warps * kWarp, bytes, cluster, count) != cudaSuccess || count == 0) {
    return cudaGetLastError(), false;  // it grants no such clusters
  }
  const int blocks = int(std::min<int64_t>({a.rows, count, divide_up(device.processors, cluster)}));
  error = launch(kernel, given, int64_t(blocks) * cluster, dim3(warps * kWarp), bytes, cluster, stream, true);
  const int sums = a.grad_x_bias ? kSumsOfAddedNorm : a.mean ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  if (!error && a.partials) error = add_partials<T>(a, sums, blocks, true, stream);
  return true;
}

}  // namespace fuseline
