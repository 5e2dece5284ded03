// The norms' forward for rows that are longer than registers: the same results as in norm_forward_rows.cuh, in parts of
// kVector<X> elements, 16 bytes of what is normalized.
//
// Moves: as there; limit: HBM bandwidth. Threads: rows wait in shared memory, each in that of a block or of a cluster, until
// their moments have met. Each thread copies exactly the vectors that it will read, all at once, and takes them piece by piece
// as they arrive; two blocks or more share a multiprocessor, and one computes while another's row is on its way. Rows longer
// than a cluster can hold are read twice.
#pragma once

#include "../plans/waiting.h"
#include "device/ring.cuh"
#include "norm_elements.cuh"
#include "slot.cuh"

namespace fuseline {

// The part of block `rank` of a row of n elements, neighbouring vectors: the first of this thread, and the end of all.
template <class T>
__device__ __forceinline__ void divide_row(const T* row, int n, int rank, int blocks, int lane, int& begin, int& end) {
  constexpr int kSize = kVector<T>;
  const int head = elements_into_vector(row);
  const int each = ((n + head + kSize - 1) / kSize + blocks - 1) / blocks;
  begin = (rank * each + lane) * kSize - head;
  end = min((rank + 1) * each * kSize - head, n);
}

// The next piece, once it has arrived: with one more group of copies each time, an empty one, it has when all but the
// last kPieces groups have.
__device__ __forceinline__ void wait_for_piece(const uint4* slots, int threads, int first, int end, int step,
                                               uint4 (&raw)[kPiece]) {
  commit_copies();
  asm volatile("cp.async.wait_group %0;" ::"n"(kPieces) : "memory");
#pragma unroll
  for (int k = 0; k < kPiece; ++k) {
    raw[k] = first + k * step < end ? slots[k * threads] : make_uint4(0, 0, 0, 0);
  }
}

// The moments of one thread's elements, added piece by piece.
template <int kSize, class Index>
__device__ __forceinline__ void add_moments(const float (&values)[kPiece][kSize], Index from, Index step, Index end,
                                            bool centred, Moments& mine) {
  const auto each = [&](auto&& value) {
    if (from >= 0 && from + (kPiece - 1) * step + kSize <= end) {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) value(values[k][i]);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      each_inside<kSize>(Index(from + k * step), end, [&](int i) { value(values[k][i]); });
    }
  };
  float squares = 0.f;
  if (!centred) {
    each([&](float x) { squares += x * x; });
    mine.squares += squares;
    return;
  }
  int inside = 0;
#pragma unroll
  for (int k = 0; k < kPiece; ++k) inside += count_inside<kSize>(Index(from + k * step), end);
  const float count = float(inside);
  float total = 0.f;
  each([&](float x) { total += x; });
  const float mean = total / count;
  each([&](float x) { squares += (x - mean) * (x - mean); });
  const float apart = mean - mine.mean;
  const float together = mine.count + count;
  const float share = count / together;
  mine.squares += squares + apart * apart * (mine.count * share);
  mine.mean += apart * share;
  mine.count = together;
}

// The moments of the row from those of its threads.
__device__ __forceinline__ Moments meet(const Moments& mine, float n, bool centred, Group<Moments>& group) {
  if (!centred) {
    const Moments warp{0.f, group.warp_sum(mine.squares), 0.f, 0.f};
    return combine(group.publish(warp), group.states, n, false);
  }
  const float2 whole = group.warp_sum(make_float2(mine.count, mine.count * mine.mean));
  const float mean = whole.x > 0.f ? whole.y / whole.x : 0.f;
  const float apart = mine.mean - mean;
  const float2 sums =
      group.warp_sum(make_float2(mine.count * apart, mine.squares + mine.count * apart * apart));
  return combine(group.publish(corrected(mean, sums.x, sums.y, whole.x)), group.states, n, true);
}

// The rows of a long norm, of which a thread's parts start at multiples of their bytes where the flags say so.
template <class X, class Y>
struct LongRow {
  static constexpr int kSize = kVector<X>;
  const X* normalized;  // x, or the residual
  const Y* branch;
  X* sum;
  Y* y;
  int head;  // elements of the first vector of `normalized` that are before the row
  bool branch_vectors, sum_vectors, y_vectors;

  __device__ __forceinline__ LongRow(const NormForward& a, int64_t row, bool added)
      : normalized(static_cast<const X*>(added ? a.residual : a.x) + row * a.n),
        branch(added ? static_cast<const Y*>(a.x) + row * a.n : nullptr),
        sum(added ? static_cast<X*>(a.sum) + row * a.n : nullptr),
        y(static_cast<Y*>(a.y) + row * a.n),
        head(elements_into_vector(normalized)),
        branch_vectors(added && RowPart<Y, kSize>::in_place(branch, head)),
        sum_vectors(added && RowPart<X, kSize>::in_place(sum, head)),
        y_vectors(RowPart<Y, kSize>::in_place(y, head)) {}
};

// Copies a part of a row that will be read by this thread alone; nothing where it is outside of the row.
template <class T, int kSize>
__device__ __forceinline__ void fetch_part(void* to, const T* row, int first, int n, bool vectors) {
  constexpr int kBytes = RowPart<T, kSize>::kBytes;
  if (vectors && first >= 0 && first + kSize <= n) {
    copy_async<kBytes>(to, row + first, true);
  } else if (first < n && first + kSize > 0) {
    RowPart<T, kSize> part;
    part.load(row, first, n, false);
    part.put(to);
  }
}

template <class X, class Y>
__global__ void __launch_bounds__(kMostThreads, 2) norm_forward_waiting(const NormForward a) {
  constexpr int kSize = kVector<X>;
  extern __shared__ uint4 slots[];
  __shared__ Moments shared[2 * kMaxStates];
  Group<Moments> group(shared, a.cluster);
  const int n = int(a.n), threads = group.threads, step = threads * kSize;
  const int64_t row = group.first;
  const bool added = a.residual;
  const LongRow<X, Y> of(a, row, added);
  int begin, end;
  divide_row(of.normalized, n, group.rank, a.cluster, group.lane, begin, end);
  uint4* const held = slots + group.lane;
  using Branch = RowPart<Y, kSize>;
  // The parts of the branch stand after those of the residual.
  const int each = ((n + of.head + kSize - 1) / kSize + a.cluster - 1) / a.cluster;
  char* const branches = reinterpret_cast<char*>(slots + each) + group.lane * Branch::kBytes;
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {
    const int first = begin + piece * kPiece * step;
    if (first < end) {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        const int from = first + k * step, place = (piece * kPiece + k) * threads;
        if (from >= end) break;
        fetch_part<X, kSize>(held + place, of.normalized, from, n, true);
        if (added) {
          fetch_part<Y, kSize>(branches + place * Branch::kBytes, of.branch, from, n, of.branch_vectors);
        }
      }
    }
    commit_copies();
  }
  const uint64_t seed = added && a.dropout.seed ? uint64_t(*a.dropout.seed) : 0;
  Moments mine{0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int first = begin, place = 0; first < end; first += kPiece * step, place += kPiece * threads) {
    uint4 raw[kPiece];
    wait_for_piece(held + place, threads, first, end, step, raw);
    if (added) {  // the sum takes the residual's place
#pragma unroll 1
      for (int k = 0; k < kPiece && first + k * step < end; ++k) {
        const int from = first + k * step, at = place + k * threads;
        float residual[kSize], values[kSize];
        unpack<X>(held[at], residual);
        Branch branch;
        branch.take(branches + at * Branch::kBytes);
        branch.values(values);
        add_residual<Y, false>(a, seed, row * a.n, from, n, residual, values);
        RowPart<X, kSize> sum;
        sum.set(values);
        sum.put(held + at);
        sum.store(of.sum, from, n, of.sum_vectors);
      }
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        raw[k] = first + k * step < end ? held[place + k * threads] : make_uint4(0, 0, 0, 0);
      }
    }
    float values[kPiece][kSize];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) unpack<X>(raw[k], values[k]);
    add_moments<kSize>(values, first, step, end, a.centred, mine);
  }
  const Moments whole = meet(mine, float(a.n), a.centred, group);
  const float rstd = rstd_of(a, whole);
  if (group.lane == 0 && group.rank == 0) keep_statistics(a, row, whole.mean, rstd);
  int place = 0;
#pragma unroll 4
  for (int first = begin; first < end; first += step, place += threads) {
    float values[kSize];
    unpack<X>(held[place], values);
    normalize<Y, false>(a, first, n, whole.mean, rstd, values);
    RowPart<Y, kSize> y;
    y.set(values);
    y.store(of.y, first, n, of.y_vectors);
  }
}

template <class X, class Y>
__global__ void __launch_bounds__(kMostThreads, 1) norm_forward_streamed(const NormForward a) {
  constexpr int kSize = kVector<X>;
  __shared__ Moments shared[2 * kMaxStates];
  Group<Moments> group(shared, a.cluster);
  const int64_t step = int64_t(group.threads) * kSize;
  const int64_t row = group.first;
  const bool added = a.residual;
  const LongRow<X, Y> of(a, row, added);
  const int64_t vectors = (a.n + of.head + kSize - 1) / kSize;
  const int64_t each = (vectors + group.blocks - 1) / group.blocks;
  const int64_t begin = (each * group.rank + group.lane) * kSize - of.head;
  const int64_t end = min(each * (group.rank + 1) * kSize - of.head, a.n);
  Moments mine{0.f, 0.f, 0.f, 0.f};
  for (int64_t from = begin; from < end; from += kPiece * step) {
    float values[kPiece][kSize];
    RowPart<X, kSize> raw[kPiece];
#pragma unroll
    for (int k = 0; k < kPiece; ++k) raw[k].load(of.normalized, from + k * step, end, true);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      raw[k].values(values[k]);
      if (added) {
        const int64_t first = from + k * step;
        if (first >= end) continue;
        float residual[kSize];
        RowPart<Y, kSize> branch;
        branch.load(of.branch, first, end, of.branch_vectors);
#pragma unroll
        for (int i = 0; i < kSize; ++i) residual[i] = values[k][i];
        branch.values(values[k]);
        add_residual<Y, false>(a, row, first, a.n, residual, values[k]);
        raw[k].set(values[k]);
        raw[k].values(values[k]);
        raw[k].store(of.sum, first, end, of.sum_vectors);
      }
    }
    add_moments<kSize>(values, from, step, end, a.centred, mine);
  }
  const Moments whole = meet(mine, float(a.n), a.centred, group);
  const float rstd = rstd_of(a, whole);
  if (group.lane == 0 && group.rank == 0) keep_statistics(a, row, whole.mean, rstd);
  // A thread reads again what it read, or wrote, before.
  const X* const again = added ? of.sum : of.normalized;
  const bool again_vectors = !added || of.sum_vectors;
  for (int64_t from = begin; from < end; from += step) {
    float values[kSize];
    RowPart<X, kSize> part;
    part.load(again, from, end, again_vectors);
    part.values(values);
    normalize<Y, false>(a, from, a.n, whole.mean, rstd, values);
    RowPart<Y, kSize> y;
    y.set(values);
    y.store(of.y, from, end, of.y_vectors);
  }
}

}  // namespace fuseline
