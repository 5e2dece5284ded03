// What plans know of a device, and the sizes that all of them share. Plans are host C++ without CUDA: they take the device as
// an argument, so that they can be asked for any GPU where there is none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fuseline {

constexpr int kWarp = 32;
constexpr int kMaxCluster = 8;  // the largest that every sm_90 part grants
constexpr int kMostThreads = 512;  // of a row in one block; two such blocks, or more of fewer, share a multiprocessor
constexpr int kShortRowBlock = 128;  // threads of a block whose rows are a warp's each, or less
constexpr int kMostShortRowBlock = 256;
constexpr int kMaxStates = kMostThreads / kWarp * kMaxCluster;

// What a plan asks of a device.
struct Device {
  int index = -1;
  int processors = 0;
  int shared_a_block = 0;      // bytes a block may ask for
  int shared_a_processor = 0;  // bytes all its blocks share
  int memory_gbs = 0;          // by the clock and the width of its memory: 3,352 of an H100, 4,917 of an H200
  bool clusters = false;
  bool warpgroups = false;  // runs the machine code of sources named *_sm90a.cu, with products of warpgroups
};

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline int power_of_two_from(int64_t value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Whether there are rows enough to fill the chip: those that the table was measured for.
inline bool are_many(int64_t rows, int64_t bytes, const Device& device) {
  constexpr int64_t kEach = 8, kLongRows = int64_t(64) << 20;  // rows a multiprocessor, or bytes of one or more
  return rows > kEach * device.processors || (rows > device.processors && bytes > kLongRows);
}

// The grid, blocks and memory of one launch.
struct LaunchShape {
  int64_t grid = 0;  // blocks, those of all clusters together
  int threads = 0;   // of a block that share a row
  int beside = 1;    // rows of a block, each with so many threads
  int cluster = 1;   // blocks that share a row
  size_t shared = 0;  // bytes of dynamic shared memory of a block
};

// Clusters of a launch (blocks, where they are alone) that a device holds at once, if a multiprocessor holds `blocks` of them and
// shared memory is the only other limit. The system keeps 1 KB of a block's.
inline int estimated_clusters(int blocks, const LaunchShape& shape, const Device& device) {
  const int by_memory = device.shared_a_processor / (int(shape.shared) + 1024);
  return device.processors * std::min(blocks, by_memory) / shape.cluster;
}

}  // namespace fuseline
