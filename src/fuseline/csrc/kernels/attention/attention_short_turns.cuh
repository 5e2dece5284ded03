// Attention over short sequences: the order in which blocks take problems.
#pragma once

#include "attention_short.cuh"

namespace fuseline::short_attention {

// How many problems blocks have taken. It stands in memory that may hold anything: the first block opens it, the others
// wait for that, and who takes last closes it, so that no later launch finds it open.
struct Counter {
  uint64_t opened;  // key() while it is
  int taken;

  __device__ __forceinline__ uint64_t key() const { return reinterpret_cast<uint64_t>(this) ^ 0x9E3779B97F4A7C15ull; }
  __device__ __forceinline__ void open() {
    asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" ::"l"(&taken) : "memory");
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&opened), "l"(key()) : "memory");
  }
  __device__ __forceinline__ void wait() const {
    uint64_t seen;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(&opened) : "memory");
    } while (seen != key());
  }
  __device__ __forceinline__ int take() {  // atomicAdd would be code for a whole warp
    int before;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(&taken) : "memory");
    return before;
  }
  __device__ __forceinline__ void close() {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&opened), "l"(uint64_t(0)) : "memory");
  }
};

// The problems that a block takes, one after another: a fixed share, or by a counter, since multiprocessors do not all run
// at one speed and a share waits for the slowest. One thread asks, a turn before the next problem's copies begin, and
// leaves the numbers of problem and next in shared memory: two pairs in turn.
struct Turns {
  static constexpr int kBytes = 16;
  uint32_t at;  // a multiple of 16

  __device__ __forceinline__ void begin(const ShortAttention& a) const {
    if (thread_number() != 0) return;
    if (a.counter != nullptr) {
      if (blockIdx.x == 0) a.counter->open();
      a.counter->wait();
    }
    store_pair(at, blockIdx.x, take(a, blockIdx.x));
  }
  __device__ __forceinline__ int problem() const { return load_word(at); }
  __device__ __forceinline__ int next() const { return load_word(at + 4); }
  // Asks for the problem after the next, and later leaves it; the block meets before and after. Blocks ask once in begin()
  // and once for each of their problems, so that the last to ask is known.
  __device__ __forceinline__ int ask(const ShortAttention& a) const {
    return thread_number() == 0 ? take(a, next()) : 0;
  }
  __device__ __forceinline__ void answer(const ShortAttention& a, int asked) const {
    if (thread_number() != 0) return;
    store_pair(at ^ 8, next(), asked);
    unsigned blocks;  // asked for anew, not held
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
    if (a.counter != nullptr && asked == 2 * int(blocks) + a.problems - 1) a.counter->close();
  }
  __device__ __forceinline__ void advance() { at ^= 8; }
  __device__ __forceinline__ bool odd() const { return at & 8; }

 private:
  // The problem after `before`.
  __device__ __forceinline__ static int take(const ShortAttention& a, int before) {
    return int(gridDim.x) + (a.counter != nullptr ? a.counter->take() : before);
  }
};

}  // namespace fuseline::short_attention
