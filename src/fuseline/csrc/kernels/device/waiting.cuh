// Rows that wait in shared memory until their threads have met, with blocks that end with them (sm_90).
//
// Each warp has a part of the row, neighbouring vectors, and one of its lanes sends for them in bulk copies, a piece
// each: the warp takes pieces as they arrive, and needs no other warp until the row meets. What it writes then takes
// the place of what it read, and leaves in bulk copies, too. Two blocks and more share a multiprocessor if their rows
// let them: one computes while another's row is on its way.
#pragma once

#include "../plans/waiting.h"
#include "launch.cuh"
#include "meeting.cuh"

namespace fuseline {

// Bytes (a multiple of 16, between multiples of 16) from HBM to shared memory; `barrier` counts them.
__device__ __forceinline__ void copy_in(void* shared, const void* global, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// The same, of what leaves the L2 before all else, for one block.
__device__ __forceinline__ void copy_in_leaving(void* shared, const void* global, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void copy_out(void* global, const void* shared, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// What was stored to shared memory may be copied out.
__device__ __forceinline__ void show_to_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// What this thread copies out has been read: its shared memory may go.
__device__ __forceinline__ void wait_for_copies_out() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// `fill` (a word of it) in the place of elements outside 0 .. n.
template <class T>
__device__ __forceinline__ void blank(uint4& raw, int first, int n, uint32_t fill) {
  uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if (first + i < 0 || first + i >= n) {
      const uint32_t element = sizeof(T) == 4 ? ~0u : 0xffffu << (16 * (i % 2));
      uint32_t& word = words[i * int(sizeof(T)) / 4];
      word = (word & ~element) | (fill & element);
    }
  }
  raw = make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Value>
__device__ __forceinline__ Value sum_over_warp(Value value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = plus(value, from_lane(value, step));
  return value;
}

// Where the warps of a row meet, and the barriers at which their pieces arrive.
template <class State>
struct WaitingRoom {
  State states[kMostBlocks * kMostThreads / kWarp];
  uint64_t met[kMostTogether];  // of each row
  uint64_t arrived[kMostThreads / kWarp][kPieces];
};

// A thread's place, and the meeting of its row.
template <class State>
struct Seat {
  WaitingRoom<State>& room;
  int blocks, rank;  // of the row, and of these
  int lane, warp;    // of the block
  int warps, first;  // of the row in this block, and its first
  int64_t row;

  // `copies` of each piece arrive. A block has `together` rows; it shares them with no other if they are several.
  __device__ __forceinline__ Seat(WaitingRoom<State>& in, int cluster, int copies, int together = 1)
      : room(in),
        blocks(cluster),
        rank(int(blockIdx.x) & (cluster - 1)),
        lane(int(threadIdx.x) % kWarp),
        warp(int(threadIdx.x) / kWarp),
        warps(int(blockDim.x) / kWarp / together),
        first(together == 1 ? 0 : warp / warps * warps),
        row(together == 1 ? int64_t(int(blockIdx.x) / cluster) : int64_t(blockIdx.x) * together + warp / warps) {
    if (lane < kPieces) barrier_init(&room.arrived[warp][lane], copies);
    if (int(threadIdx.x) < together) barrier_init(&room.met[threadIdx.x], blocks == 1 ? warps : 1);
    publish_barriers();
    if (blocks > 1) {
      cluster_arrive_relaxed();
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Of this warp among all of the row.
  __device__ __forceinline__ int place() const { return rank * warps + warp - first; }
  __device__ __forceinline__ int count() const { return blocks * warps; }

  // The states of all warps of the row, from that of each.
  __device__ __forceinline__ const State* meet(const State& mine) {
    uint64_t* const met = &room.met[first / warps];
    if (blocks == 1) {
      if (lane == 0) {
        room.states[warp] = mine;
        barrier_arrive(met);
      }
    } else {
      cluster_wait();  // the others' barriers are there
      if (threadIdx.x == 0) barrier_expect(met, count() * int(sizeof(State)));
      if (lane < blocks) send_in_cluster(&room.states[place()], met, lane, mine);
    }
    barrier_wait(met, 0);
    return room.states + first;
  }
};

// A warp's part of a row of a tensor [rows, n]. Parts begin where lines of memory do, of `line` bytes: 128, of which copies that
// begin elsewhere take one more each (rows of 50,257 forward 0.943 of the copy bandwidth and 0.962, backward 0.957 and 0.995),
// or 16.
template <class T>
struct Part {
  const T* at;  // the row
  int n, head;  // its elements, and how many are before it in its first line
  int first;    // vector of the row
  int count;    // vectors
  int before;   // of these, that are not the row's
  bool opens, ends;  // the tensor has nothing before its first vector, or behind its last

  __device__ __forceinline__ Part(const void* tensor, int64_t row, int64_t rows, int64_t width, int place, int most, int line)
      : at(static_cast<const T*>(tensor) + row * width),
        n(int(width)),
        head(int(reinterpret_cast<uintptr_t>(at) & (line - 1)) / int(sizeof(T))) {
    const int vectors = (n + head + kVector<T> - 1) / kVector<T>;
    first = place * most;
    count = min(max(vectors - first, 0), most);
    before = first == 0 ? head / kVector<T> : 0;
    opens = row == 0 && head % kVector<T> > 0 && first == 0;
    ends = row == rows - 1 && count > 0 && element(count) > n;
  }

  // The element that its vector number `slot` begins with.
  __device__ __forceinline__ int element(int slot) const { return (first + slot) * kVector<T> - head; }
  __device__ __forceinline__ int pieces() const { return (count + kPieceSlots - 1) / kPieceSlots; }
  // Whether its vector number `slot` has elements of other rows.
  __device__ __forceinline__ bool is_shared(int slot) const { return element(slot) < 0 || element(slot) + kVector<T> > n; }

  // Sends for its pieces; one lane calls. Of the vectors at the ends of the row the elements of its neighbours come
  // along, but nothing from outside the tensor.
  __device__ __forceinline__ void fetch(uint4* slots, uint64_t* arrived, bool leaves = false) const {
    if (opens) slots[before] = load_vector<T, false>(at, element(before), n, false);
    if (ends) slots[count - 1] = load_vector<T, false>(at, element(count - 1), n, false);
#pragma unroll 1
    for (int piece = 0; piece < pieces(); ++piece) {
      const int from = max(piece * kPieceSlots, before + int(opens));
      const int to = min((piece + 1) * kPieceSlots, count - int(ends));
      const int bytes = max(to - from, 0) * 16;
      barrier_expect(&arrived[piece], bytes);
      if (bytes > 0 && leaves) copy_in_leaving(slots + from, at + element(from), bytes, &arrived[piece]);
      if (bytes > 0 && !leaves) copy_in(slots + from, at + element(from), bytes, &arrived[piece]);
    }
  }

  // Vector number `slot`, `fill` outside the row, or outside its first `limit` elements.
  __device__ __forceinline__ uint4 take(const uint4* slots, int slot, uint32_t fill, int limit) const {
    uint4 raw = slot < count ? slots[slot] : make_uint4(fill, fill, fill, fill);
    const int from = element(slot);
    if (from < 0 || from + kVector<T> > limit) blank<T>(raw, from, limit, fill);
    return raw;
  }
  __device__ __forceinline__ uint4 take(const uint4* slots, int slot, uint32_t fill) const {
    return take(slots, slot, fill, n);
  }

  // Writes a vector to the row `to`, which stands as this one does: into its slot, to be sent, or by elements.
  __device__ __forceinline__ void put(T* to, uint4* slots, int slot, const float (&values)[kVector<T>]) const {
    const int from = element(slot);
    if (slot >= count) return;
    if (from >= 0 && from + kVector<T> <= n) {
      slots[slot] = pack<T>(values);
    } else {
      store_vector<T, false>(to, from, n, true, values);
    }
  }

  // Sends a piece that all lanes have put.
  __device__ __forceinline__ void send(T* to, const uint4* slots, int piece) const {
    show_to_copies();
    __syncwarp();
    if (threadIdx.x % kWarp > 0) return;
    int from = max(piece * kPieceSlots, before), behind = min((piece + 1) * kPieceSlots, count);
    if (element(from) < 0) ++from;
    if (element(behind) > n) --behind;
    if (behind > from) copy_out(to + element(from), slots + from, (behind - from) * 16);
  }
};

inline int offset_in_line(const void* at) { return int(reinterpret_cast<uintptr_t>(at) % 128); }

template <class T>
Lines lines_of(int64_t n, const void* at, const void* other, const void* third) {
  return lines_of(sizeof(T), n, offset_in_line(at), offset_in_line(other), offset_in_line(third));
}

// `fits` is false where the device does not hold such blocks; then nothing ran.
template <class Arguments>
int launch_waiting(void (*kernel)(Arguments), const Arguments& a, const LaunchShape& shape, const Device& device, void* stream,
                   bool& fits) {
  int count = 0;
  cudaError_t error = cudaSuccess;
  if (shape.cluster > kMaxCluster) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) error = resident_clusters(kernel, device, shape.threads, shape.shared, shape.cluster, count);
  fits = error == cudaSuccess && count > 0;
  if (error != cudaSuccess && shape.cluster > kMaxCluster) return cudaGetLastError(), 0;  // it grants no such clusters
  if (!fits) return int(error);
  return launch(kernel, a, shape, device, stream);
}

}  // namespace fuseline
