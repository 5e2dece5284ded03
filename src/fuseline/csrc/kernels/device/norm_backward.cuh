// The main kernel of the norms' backward. With x_hat = (x - mean) * rstd (mean 0 in an RMS norm) and g = grad_y:
//   grad_x = rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat)) + grad_sum   (no mean(g * w) in an RMS norm)
//   grad_weight = sum over rows of g * x_hat, grad_bias = sum over rows of g
// and where x was residual + dropout(x0 + x_bias): grad_dropped = grad_x through the mask, grad_x_bias = its sum.
//
// Moves: x, grad_y (and grad_sum) read once, grad_x (and grad_dropped) written once; besides, a few fp32 rows a block of
// partial sums. Does: about 20 operations an element, and 15 more for a mask. Limit: HBM bandwidth.
//
// Threads: the grid is as large as the device holds at once, and each group of threads walks over rows with the same
// columns. The sums over rows stay in its registers over all its rows. The rows come through a ring in shared memory,
// several rows ahead (ring.cuh). A group of one warp sums by shuffles. The warps of a larger one, or of a cluster, meet
// one row behind (meeting.cuh): they read the next row before they write the gradient of this one. At the end each
// block writes a row of partial sums of each kind, and a second kernel adds those up in a fixed order: no atomics, the
// same bits each run. Rows that do not start at multiples of 16 bytes are shifted into place (shifted.cuh).
#pragma once

#include "meeting.cuh"
#include "norm_gradient.cuh"
#include "ring.cuh"
#include "shifted.cuh"

namespace fuseline {

// Columns a thread has in the two kernels of a kind, and threads of a block that the registers of their sums leave room
// for: a multiprocessor holds one block, and 64 KiB of rows or less in each stage of its ring.
template <class T>
constexpr int kManyColumns = sizeof(T) == 4 ? 16 : 32;
template <class T>
constexpr int kFewColumns = kManyColumns<T> / 2;

// Three sums and a mask take more registers than 128 where a thread also has rows of its own: fewer threads, then.
constexpr int backward_block(int sums, bool one_warp) { return one_warp && sums == kSumsOfAddedNorm ? 384 : 512; }

// Which kernel: columns a thread has, and how its rows lie.
template <class T, int kColumnsOfThread, bool kOneWarpARow, bool kShiftedRows, int kSumsOfColumn, bool kCentredRows>
struct BackwardKind {
  static constexpr int kColumns = kColumnsOfThread;
  static constexpr bool kOneWarp = kOneWarpARow;
  static constexpr bool kShifted = kShiftedRows;
  static constexpr int kSums = kSumsOfColumn;
  static constexpr bool kCentred = kCentredRows;
  // Threads of a row are whole warps, with columns of their own warp each: every address is a base and a constant.
  static constexpr bool kWholeWarps = !kOneWarpARow || kColumnsOfThread == kManyColumns<T>;
  static constexpr bool kAdded = kSumsOfColumn == kSumsOfAddedNorm;
  static constexpr int kTensors = kAdded ? 3 : 2;
  static constexpr int kBlock = backward_block(kSumsOfColumn, kOneWarpARow);
  static constexpr int kRows = kOneWarpARow ? 1 : kBlock / (2 * kWarp);  // that meet in a block
};

// Weights of columns first .. first + kVector. kPlain: they are there, whole vectors in the dtype of the rows. Otherwise
// in either dtype, with kShifted at any address, and ones where there are none.
template <class T, bool kPlain, bool kShifted>
__device__ __forceinline__ void weights_at(const NormBackward& a, int first, float (&weight)[kVector<T>]) {
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) weight[i] = kPlain ? 0.f : 1.f;
  if (first >= int(a.n)) return;
  if constexpr (kPlain) {
    load_reused<T>(static_cast<const T*>(a.weight) + first, weight);
  } else if (!a.weight) {
    return;
  } else if (!kShifted || (reinterpret_cast<uintptr_t>(a.weight) % 16 == 0 && first + kVector<T> <= int(a.n))) {
    load_weights<T, true>(a.weight, a.fp32_weights, first, int(a.n), weight);
  } else {
    load_weights<T, false>(a.weight, a.fp32_weights, first, int(a.n), weight);
  }
}

template <class T, class Kind>
__global__ void __launch_bounds__(Kind::kBlock, 1) norm_backward_rows(const NormBackward a) {
  constexpr int kColumns = Kind::kColumns, kSums = Kind::kSums, kTensors = Kind::kTensors;
  constexpr bool kOneWarp = Kind::kOneWarp, kShifted = Kind::kShifted, kAdded = Kind::kAdded;
  constexpr int kSize = kVector<T>;
  constexpr int kAccesses = kColumns / kSize;
  using Room = MeetingRoom<float2, Kind::kRows, kMaxStates>;
  extern __shared__ uint4 ring[];
  __shared__ std::conditional_t<kOneWarp, int, Room> room;
  // Mean and rstd of the rows in the ring, for each warp.
  __shared__ float statistics[kOneWarp ? 1 : kMostStages][Kind::kBlock / kWarp][2];

  const int threads = blockDim.x, n = int(a.n);
  const int width = min(threads, kWarp);  // lanes side by side in a row
  const int cluster = kOneWarp ? 1 : a.cluster;
  const int rank = kOneWarp ? 0 : int(blockIdx.x) & (cluster - 1);
  const int shift = kOneWarp ? 0 : (cluster > 1) + (cluster > 2) + (cluster > 4);  // a power of two
  const int groups = int(gridDim.x) >> shift, group = int(blockIdx.x) >> shift;
  // This thread's columns: kAccesses vectors, `step` apart from `start` on.
  const int step = (Kind::kWholeWarps ? kWarp : threads) * kSize;
  int start = ((rank * threads + int(threadIdx.x)) / width * width * kAccesses + int(threadIdx.x) % width) * kSize;

  // A stage of the ring: for each tensor its accesses, each side by side for all threads of the block. Where rows are
  // shifted, `width` threads have a vector more.
  const int tid = int(threadIdx.y) * threads + int(threadIdx.x);
  const int slot_step = kShifted ? threads * int(blockDim.y) / width * (width + 1) : Kind::kBlock;
  const int stage_step = kTensors * kAccesses * slot_step;
  uint4* const slots = ring + (kShifted ? tid / width * (width + 1) + tid % width : tid);
  const int lane = tid % kWarp;
  // Whether this warp has any column of its access k, and not only such as are past the row.
  const auto warp_has = [&](int k) { return start - lane * kSize + k * step < n; };
  const bool last_lane = kShifted && int(threadIdx.x) % width == width - 1;

  // All rows of a block take the same number of turns. Nothing of 64 bits is kept from one to the next.
  const auto row_at = [&](int turn) {
    int64_t place = int64_t(group) + int64_t(turn) * groups;
    forget(place);
    return place * blockDim.y + threadIdx.y;
  };
  const auto is_turn = [&](int turn) { return row_at(turn) - threadIdx.y < a.rows; };

  const auto tensor = [&](int which) {
    return static_cast<const T*>(which == 0 ? a.x : which == 1 ? a.grad_y : a.grad_sum);
  };
  const auto fetch_row = [&](int64_t row, int stage) {
    forget(start);
    const bool wanted = row < a.rows;  // a row that is not there is zeros, and adds nothing
    uint4* const to = slots + stage * stage_step;
    if (!kOneWarp && lane < 2) {
      const float* from = lane == 0 && a.mean ? a.mean : a.rstd;
      copy_async<4>(&statistics[stage][tid / kWarp][lane], from + (wanted ? row : 0), wanted && (lane == 1 || a.mean));
    }
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      if (t == 2 && !a.grad_sum) continue;
      const T* from = tensor(t) + (wanted ? row * a.n : 0);
      // A row that is not there has no elements before it either: what stands before the tensor is anyone's.
      const int head = kShifted && wanted ? elements_into_vector(from) : 0;
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        uint4* const slot = to + (t * kAccesses + k) * slot_step;
        const int first = start + k * step - head;
        if (Kind::kWholeWarps && !warp_has(k)) break;
        if constexpr (kShifted) {
          copy_front(slot, from, first, wanted ? n : 0);
          if (last_lane) copy_front(slot + 1, from, first + kSize, wanted ? n : 0);
        } else {
          copy_async<16>(slot, from + start + k * step, wanted && first < n);
        }
      }
    }
    commit_copies();
  };
  const auto read_slot = [&](const uint4* slot, int t, int k, int64_t row, float (&values)[kSize]) {
    const uint4* const at = slot + (t * kAccesses + k) * slot_step;
    if constexpr (kShifted) {
      unpack<T>(shift_elements<T>(at[0], at[1], elements_into_vector(tensor(t) + row * a.n)), values);
    } else {
      unpack<T>(at[0], values);
    }
  };
  const auto settle = [&] {  // what the other lanes copied is there, too, or what they read is done with
    if constexpr (kShifted || !kOneWarp) __syncwarp();
  };

  float weight_sums[kColumns] = {}, bias_sums[kSums > 1 ? kColumns : 1] = {}, x_bias_sums[kAdded ? kColumns : 1] = {};

  // Both passes over the row read it from the ring, and the weights from L1: their registers are the sums'.
  const auto first_pass = [&](auto plain, const uint4* slot, int64_t row, float mean, float rstd) {
    float2 sums = make_float2(0.f, 0.f);
    forget(start);
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (Kind::kWholeWarps && !warp_has(k)) break;
      float x[kSize], grad[kSize], weight[kSize];
      read_slot(slot, 0, k, row, x);
      read_slot(slot, 1, k, row, grad);
      weights_at<T, plain.value, kShifted>(a, start + k * step, weight);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float product = grad[i] * (Kind::kCentred ? x[i] - mean : x[i]);
        weight_sums[k * kSize + i] += product * rstd;
        if constexpr (kSums > 1) bias_sums[k * kSize + i] += grad[i];
        if constexpr (Kind::kCentred) sums.x += grad[i] * weight[i];
        sums.y += product * weight[i];
      }
    }
    return sums;
  };
  const auto second_pass = [&](auto plain, const uint4* slot, int64_t row, float mean, float rstd, float2 sums) {
    // Of one element alone nothing is left of x - mean, nor of its gradient; below, rounding would be.
    const float scale = Kind::kCentred && n == 1 && (!kAdded || a.mean) ? 0.f : rstd;
    const float offset = Kind::kCentred && (!kAdded || a.mean) ? scale * (sums.x * a.inverse_n) : 0.f;
    const float slope = scale * rstd * (rstd * sums.y * a.inverse_n);
    const int inside = row < a.rows ? n : 0;
    T* const grad_x = static_cast<T*>(a.grad_x) + row * a.n;
    const auto write = [&](T* to, int first, const float (&values)[kSize]) {
      if constexpr (kShifted) {
        store_shifted(to, elements_into_vector(to), first, inside, pack<T>(values), width);
      } else {
        store_vector<T, true>(to, first, inside, true, values);
      }
    };
    forget(start);
#pragma unroll(kAdded || kOneWarp ? kAccesses : 2)
    for (int k = 0; k < kAccesses; ++k) {
      if (Kind::kWholeWarps && !warp_has(k)) break;
      const int first = start + k * step;
      float x[kSize], grad[kSize], weight[kSize];
      read_slot(slot, 0, k, row, x);
      read_slot(slot, 1, k, row, grad);
      weights_at<T, plain.value, kShifted>(a, first, weight);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float weighted = grad[i] * weight[i];
        x[i] = Kind::kCentred ? weighted * scale - offset - (x[i] - mean) * slope : weighted * scale - x[i] * slope;
      }
      if constexpr (kAdded) {
        if (a.grad_sum) {
          read_slot(slot, 2, k, row, grad);
#pragma unroll
          for (int i = 0; i < kSize; ++i) x[i] += grad[i];
        }
        if (a.grad_x) write(grad_x, first, x);
        if (a.dropout.seed) {
          float kept[kSize];
          dropout_row<kSize, kShifted>(a.dropout, uint64_t(*a.dropout.seed), row * a.n + first, kept);
#pragma unroll
          for (int i = 0; i < kSize; ++i) x[i] *= kept[i];
          if (a.grad_dropped) write(static_cast<T*>(a.grad_dropped) + row * a.n, first, x);
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) x_bias_sums[k * kSize + i] += x[i];
      } else {
        write(grad_x, first, x);
      }
    }
  };

  const bool wants_rows = a.wants_rows();
  const bool plain = !kShifted && a.weight && (sizeof(T) == 4 || !a.fp32_weights);
  const auto first = [&](const uint4* slot, int64_t row, float mean, float rstd) {
    return plain ? first_pass(std::true_type{}, slot, row, mean, rstd)
                 : first_pass(std::false_type{}, slot, row, mean, rstd);
  };
  const auto second = [&](const uint4* slot, int64_t row, float mean, float rstd, float2 sums) {
    if (plain) {
      second_pass(std::true_type{}, slot, row, mean, rstd, sums);
    } else {
      second_pass(std::false_type{}, slot, row, mean, rstd, sums);
    }
  };
  const int ahead = kOneWarp ? a.stages : a.stages - 1;
  for (int turn = 0; turn < ahead; ++turn) fetch_row(row_at(turn), turn);
  int stage = 0;
  if constexpr (kOneWarp) {
    const auto mean_of = [&](int64_t row) { return Kind::kCentred && a.mean && row < a.rows ? a.mean[row] : 0.f; };
    const auto rstd_of = [&](int64_t row) { return row < a.rows ? a.rstd[row] : 0.f; };
    float mean = mean_of(row_at(0)), rstd = rstd_of(row_at(0));
    for (int turn = 0; is_turn(turn); ++turn) {
      const float mean_next = mean_of(row_at(turn + 1)), rstd_next = rstd_of(row_at(turn + 1));
      wait_for_oldest(ahead);
      settle();
      const uint4* const slot = slots + stage * stage_step;
      float2 sums = first(slot, row_at(turn), mean, rstd);
      if (wants_rows) {
#pragma unroll
        for (int by = kWarp / 2; by > 0; by /= 2) {
          if (by < width) sums = plus(sums, from_lane(sums, by));
        }
        second(slot, row_at(turn), mean, rstd, sums);
      }
      settle();
      fetch_row(row_at(turn + ahead), stage);
      stage = stage + 1 < a.stages ? stage + 1 : 0;
      mean = mean_next, rstd = rstd_next;
    }
  } else {
    Meeting<Room, float2> meeting{room, cluster, rank};
    meeting.open();
    const auto warp_sum = [](float2 value) {
#pragma unroll
      for (int by = kWarp / 2; by > 0; by /= 2) value = plus(value, from_lane(value, by));
      return value;
    };
    for (int turn = 0;; ++turn) {
      const int stage_before = stage > 0 ? stage - 1 : ahead;
      const bool more = is_turn(turn);
      if (more) {
        wait_for_oldest(ahead);
        settle();
        const float* const known = statistics[stage][tid / kWarp];
        const float2 sums = first(slots + stage * stage_step, row_at(turn), known[0], known[1]);
        if (wants_rows) meeting.publish(turn, warp_sum(sums));
      }
      if (wants_rows && turn > 0) {
        const float2* states = meeting.await(turn - 1);
        float2 whole = make_float2(0.f, 0.f);
#pragma unroll 1
        for (int i = lane; i < meeting.count(); i += kWarp) whole = plus(whole, states[i]);
        whole = warp_sum(whole);
        const float* const known = statistics[stage_before][tid / kWarp];
        second(slots + stage_before * stage_step, row_at(turn - 1), known[0], known[1], whole);
      }
      if (!more) break;
      settle();
      fetch_row(row_at(turn + ahead), stage_before);
      stage = stage < ahead ? stage + 1 : 0;
    }
  }
  wait_for_all();
  start_next_kernel();
  if (a.partials) {
    const int from = rank * kColumns * threads;
    float* const parts = reinterpret_cast<float*>(ring);
    float* const mine = a.partials + int64_t(group) * n;
    const int64_t kind_step = int64_t(groups) * n;
    write_partials<kColumns, kSize>(weight_sums, parts, mine, from, n, start, step);
    if constexpr (kSums > 1) write_partials<kColumns, kSize>(bias_sums, parts, mine + kind_step, from, n, start, step);
    if constexpr (kAdded) write_partials<kColumns, kSize>(x_bias_sums, parts, mine + 2 * kind_step, from, n, start, step);
  }
}

}  // namespace fuseline
