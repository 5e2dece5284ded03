// How rows that wait in shared memory (device/waiting.cuh) are divided among blocks and warps.
#pragma once

#include "rows.h"

namespace fuseline {

constexpr int kPiece = 4;                    // vectors of a piece that a thread takes
constexpr int kPieceSlots = kPiece * kWarp;  // of a warp
constexpr int kPieces = 8;                   // of a warp's part, at most
constexpr int kMostBlocks = 16;              // of a row; more than 8 is more than sm_90 promises, and H100 grants
constexpr int kPartSlots = kPieces * kPieceSlots;
constexpr int kMostTogether = 8;             // rows of a block

// Shared memory of a block beside its rows (WaitingRoom in device/waiting.cuh): what warps tell each other of a row, of
// `state_bytes` each, and barriers.
constexpr size_t waiting_room(size_t state_bytes) {
  return kMostBlocks * kMostThreads / kWarp * state_bytes + 8 * kMostTogether + 8 * (kMostThreads / kWarp) * kPieces;
}

// How many threads of how many blocks share a row, 0 if none can hold it; slots of a warp's part, of each tensor.
struct Waiting {
  int cluster, threads, part;
  size_t bytes;
  int together = 1;  // rows of a block
};

inline LaunchShape shape_of(const Waiting& plan, int64_t rows) {
  return {divide_up(rows, plan.together) * plan.cluster, plan.threads, 1, plan.cluster, plan.bytes};
}

// Which layouts the device would not hold. A layout whose clusters a GPU may refuse has the plan without it as its fallback.
enum class Refused { nothing, of_table, of_rules };

constexpr int64_t kAnyBytes = INT64_MAX / 2;

// Where the lines of rows begin in all of their tensors alike, and whether that is where rows begin.
struct Lines {
  int bytes;
  bool whole;
};

// Of tensors whose addresses are these modulo 128.
inline Lines lines_of(int element_size, int64_t n, int at, int other, int third) {
  const bool alike = at == other && at == third;
  const int bytes = alike ? 128 : 16;
  return {bytes, n * element_size % bytes == 0 && at % bytes == 0};
}

// The 16-byte vectors of a row's lines, at most.
inline int64_t vectors_of(int element_size, int64_t n, const Lines& lines) {
  return lines.whole ? n / (16 / element_size) : divide_up(n + lines.bytes / element_size - 1, 16 / element_size);
}

// For rows of n elements of `tensors` tensors; `room` is what a block has beside them. A row has as many blocks as
// leave each no more than `most_bytes`, or twice that beyond kMaxCluster, so that other rows' fill the time it waits.
inline Waiting plan_waiting(int element_size, int64_t rows, int64_t n, const Lines& lines, int tensors, size_t room,
                            const Device& device, int64_t most_bytes = kAnyBytes) {
  Waiting plan{1, 0, 0, 0};
  if (!device.clusters) return plan;
  const int64_t beside = int64_t(room) + 1024;  // the system's part
  const int64_t vectors = vectors_of(element_size, n, lines);
  int64_t blocks = 0;  // of a multiprocessor
  for (;; plan.cluster *= 2) {
    const int64_t bytes = divide_up(vectors, plan.cluster) * 16 * tensors + 4096;
    blocks = bytes > device.shared_a_block - int64_t(room) ? 0 : device.shared_a_processor / (bytes + beside);
    const bool fine = bytes - 4096 <= (plan.cluster < kMaxCluster ? most_bytes : 2 * most_bytes);
    if ((blocks >= 2 && fine) || plan.cluster == kMostBlocks) break;
  }
  // Few rows have more blocks each.
  while (plan.cluster < kMaxCluster && rows * plan.cluster * 2 <= device.processors &&
         vectors / plan.cluster >= 4 * kPieceSlots) {
    plan.cluster *= 2;
  }
  if (blocks == 0) return plan;
  const int64_t each = divide_up(vectors, plan.cluster);
  const int64_t most = std::min<int64_t>(kMostThreads, 1024 / std::min<int64_t>(blocks, 8)) / kWarp;
  const int64_t warps = std::max<int64_t>(2, std::min(most, divide_up(each, kPieceSlots)));
  plan.part = int(divide_up(divide_up(vectors, plan.cluster * warps), 8) * 8);
  plan.bytes = size_t(plan.part * warps * tensors * 16);
  if (plan.part <= kPartSlots) plan.threads = int(warps * kWarp);
  return plan;
}

// The requested layout; no threads: no block holds it.
inline Waiting requested_waiting(int element_size, const RowChoice& requested, int64_t n, const Lines& lines, int tensors,
                                 size_t room, const Device& device) {
  Waiting plan{requested.cluster, 0, 0, 0};
  const int64_t warps = requested.block / kWarp, vectors = vectors_of(element_size, n, lines);
  if (!device.clusters || requested.cluster < 1 || requested.cluster > kMostBlocks || warps < 1 ||
      requested.block > kMostThreads) {
    return plan;
  }
  plan.part = int(divide_up(divide_up(vectors, requested.cluster * warps), 8) * 8);
  plan.bytes = size_t(plan.part * warps * tensors * 16);
  if (plan.part <= kPartSlots && plan.bytes + room <= size_t(device.shared_a_block)) plan.threads = int(warps * kWarp);
  return plan;
}

// The same for rows too short for a block each, which costs as much as 1 KB of them: several of a few warps each, whose
// parts are five vectors a lane or less. 0 threads for longer rows.
inline Waiting plan_waiting_together(int element_size, int64_t n, int tensors, const Device& device) {
  Waiting plan{1, 0, 0, 0};
  const int64_t vectors = divide_up(n + 16 / element_size - 1, 16 / element_size);
  int warps = 1;
  while (warps < kMostTogether && vectors > warps * 5 * kWarp) warps *= 2;
  if (!device.clusters || vectors > warps * 5 * kWarp) return plan;
  plan.together = kMostTogether / warps;
  plan.part = int(divide_up(divide_up(vectors, warps), 8) * 8);
  plan.bytes = size_t(plan.part * kMostTogether * tensors * 16);
  plan.threads = kMostTogether * kWarp;
  return plan;
}

}  // namespace fuseline
