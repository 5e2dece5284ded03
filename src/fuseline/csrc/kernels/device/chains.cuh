// Rows handed out to blocks as these get through with them, with sums over rows that do not depend on who took what.
//
// Multiprocessors do not run at one speed, so that fixed shares of the rows leave most of them waiting at the end for the
// slowest. Here each block begins with a long chain of turns that is its own, and then takes chains from a counter, ever
// shorter ones. A chain is the same turns in the same order whoever takes it, and has sums of its own: what is added up
// in the end depends on how rows are cut into chains, and on nothing else.
//
// The counter stands in scratch memory that nobody has written. The first block sets it and shows a number that no other
// launch has; who wants a chain waits to see that number, and the kernel that follows takes it away again, so that the
// same launch may be replayed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "launch.cuh"
#include "meeting.cuh"

namespace fuseline {

constexpr int kChainLevels = 4;

// Chains of one length, side by side: chain i of a level has turns begin + i, begin + i + count ..
struct ChainLevel {
  int count, length;
  int first;  // chain of the level
  int begin;  // turn of the level
};

struct Chains {
  ChainLevel levels[kChainLevels];
  int count;      // of all chains
  bool taken;     // those after the first level are taken from the counter; else there are none
  uint64_t sign;  // of this launch

  // The first turn of a chain, and its level, from a level that is not beyond it on.
  __device__ __forceinline__ int turn(int chain, int& level) const {
    while (level + 1 < kChainLevels && chain >= levels[level].first + levels[level].count) ++level;
    return levels[level].begin + chain - levels[level].first;
  }
};

// What stands at the beginning of the scratch memory.
struct ChainCounter {
  uint64_t sign;
  int next;
};
constexpr int kChainCounterBytes = 128;

// Chains of `turns` turns for `blocks` blocks. `shortest` is the least length worth the memory for its sums.
inline Chains plan_chains(int64_t turns, int blocks, int shortest, bool may_take) {
  Chains chains{};
  const int64_t each = turns / blocks;
  constexpr int kEnough = 24;  // turns of a block, below which a turn is too much of it all
  chains.taken = may_take && each >= kEnough && turns < (int64_t(1) << 30);
  int64_t left = turns;
  int level = 0;
  const auto add = [&](int64_t count, int64_t length) {
    ChainLevel& to = chains.levels[level++];
    to.count = int(count), to.length = int(length);
    to.first = chains.count, to.begin = int(turns - left);
    chains.count += to.count;
    left = std::max<int64_t>(0, left - count * length);
  };
  if (!chains.taken) {
    add(blocks, divide_up(turns, blocks));
  } else {
    add(blocks, each * 7 / 8);
    for (int part = 2; level < kChainLevels - 1; ++part) {
      const int64_t length = left / blocks / 2;
      if (length <= shortest) break;
      add(blocks, length);
    }
    if (left > 0) add(divide_up(left, shortest), shortest);
  }
  return chains;
}

// A number that no other launch of this process has, nor memory by chance.
inline uint64_t sign_of_launch() {
  static std::atomic<uint64_t> next{uint64_t(std::chrono::system_clock::now().time_since_epoch().count()) *
                                    0x9E3779B97F4A7C15u};
  return next.fetch_add(0xD1342543DE82EF95u) | 1;
}

// A block's part of it: which chains it has had.
struct ChainTaker {
  int asked;         // chains asked for
  int64_t taken[4];  // chain number i of this block at i % 4, with i in the upper word

  __device__ __forceinline__ int chain(int number) const {
    return int(*static_cast<const volatile int64_t*>(&taken[number % 4]));
  }

  // One thread of the block, before all of it meets.
  __device__ __forceinline__ void begin(int first_chain) {
    asked = 0;
    for (int i = 1; i < 4; ++i) taken[i] = -1;
    taken[0] = first_chain;
  }

  // Asks for chain number `number` of the block, unless that is done: by one thread of each group.
  __device__ __forceinline__ void ask(const Chains& chains, ChainCounter* counter, int number) {
    if (atomicMax(&asked, number) >= number) return;
    uint64_t seen;
    do {
      asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(seen) : "l"(&counter->sign) : "memory");
    } while (seen != chains.sign);
    const int chain = chains.levels[0].count + atomicAdd(&counter->next, 1);
    *static_cast<volatile int64_t*>(&taken[number % 4]) = int64_t(number) << 32 | chain;
  }

  // Waits for it, after `ask` by any thread of the block.
  __device__ __forceinline__ int await(int number) const {
    int64_t found;
    do {
      found = *static_cast<const volatile int64_t*>(&taken[number % 4]);
    } while (int(found >> 32) != number);
    return int(found);
  }
};

__device__ __forceinline__ void open_counter(ChainCounter* counter, uint64_t sign) {
  counter->next = 0;
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(&counter->sign), "l"(sign) : "memory");
}

}  // namespace fuseline
