// The layout that a kernel takes for a row length: from a GPU's table, or set by fuseline_plan_override.
#pragma once

#include <cstdint>

#include "../fuseline_kernels.h"

namespace fuseline {

// The kernels of a family that has several for a row.
enum class RowKernel : int {
  rules,   // as the launchers lay out what no table was measured for
  held,    // registers
  packed,  // registers, as the row came
  copied,  // shared memory, in bulk copies, by blocks that end with their row
  light,   // the same by threads of fewer registers
  ring,    // rows ahead in shared memory, by blocks that stay
  tiles    // several short rows a copy
};

// What each of them is told: `vectors` of 16 bytes that a thread holds, `threads` of a block at most (rows that need fewer share
// one if it is their layout), `cluster` of so many blocks that share a row.
struct Rules {
  int vectors, threads, cluster = 1;
  int stages = 0;  // 0: each block has one row (or several short ones) and ends. Else blocks stay, and this many rows are
                   // on their way through shared memory while one is computed; 1 in the norms' forward: blocks end with
                   // their row, which waits there
};
struct Held {
  int vectors, threads, cluster = 1;
  int early = 0;  // 1: the weights are fetched together with the row
};
struct Packed {
  int vectors, threads;
};
struct Copied {
  int threads, cluster = 1;
  int stages = 1;  // 2: x leaves the L2 first
};
struct Light {
  int threads, cluster = 1;
};
struct Ring {
  int vectors, threads, cluster;
  int stages;  // rows on their way while one is computed
};
struct Tiles {  // lay themselves out
  int vectors, threads;
};

// A line of the table: rows of up to `longest` elements are laid out so.
struct RowChoice {
  int64_t longest = 0;
  int held = 0, block = 0, cluster = 1, stages = 0;  // vectors, threads and the others, as above
  RowKernel kernel = RowKernel::rules;

  constexpr RowChoice() = default;
  constexpr RowChoice(int64_t to, int held, int block, int cluster, int stages, RowKernel kernel)
      : longest(to), held(held), block(block), cluster(cluster), stages(stages), kernel(kernel) {}
  constexpr RowChoice(int64_t to, const Rules& of)
      : RowChoice(to, of.vectors, of.threads, of.cluster, of.stages, RowKernel::rules) {}
  constexpr RowChoice(int64_t to, const Held& of)
      : RowChoice(to, of.vectors, of.threads, of.cluster, of.early, RowKernel::held) {}
  constexpr RowChoice(int64_t to, const Packed& of) : RowChoice(to, of.vectors, of.threads, 1, 0, RowKernel::packed) {}
  constexpr RowChoice(int64_t to, const Copied& of)
      : RowChoice(to, 0, of.threads, of.cluster, of.stages, RowKernel::copied) {}
  constexpr RowChoice(int64_t to, const Light& of) : RowChoice(to, 0, of.threads, of.cluster, 1, RowKernel::light) {}
  constexpr RowChoice(int64_t to, const Ring& of)
      : RowChoice(to, of.vectors, of.threads, of.cluster, of.stages, RowKernel::ring) {}
  constexpr RowChoice(int64_t to, const Tiles& of) : RowChoice(to, of.vectors, of.threads, 1, 0, RowKernel::tiles) {}
};

struct RowChoices {
  const RowChoice* first;
  int count;
};

// What fuseline_plan_override set for the calls of this thread.
struct RowOverride {
  bool given = false;
  RowChoice choice;
};

inline thread_local RowOverride row_overrides[FUSELINE_FAMILIES];

}  // namespace fuseline

#include "table_h100.h"
#include "table_h200.h"

namespace fuseline {

// The layout for rows of n elements, or null if they are longer than any that the table knows.
inline const RowChoice* choice_for(fuseline_family family, int element_size, int64_t n) {
  if (row_overrides[family].given) return &row_overrides[family].choice;
  const RowChoices& choices = kRowChoices[family][element_size == 4];
  for (int i = 0; i < choices.count; ++i) {
    if (n <= choices.first[i].longest) return &choices.first[i];
  }
  return nullptr;
}

// Whether a GPU's memory is more like an H200's (4,917 GB/s) than an H100's (3,352).
inline bool has_fast_memory(int memory_gbs) { return memory_gbs >= 4100; }

// The same of a GPU whose memory has this speed: the layout of its own for rows of exactly n elements, if there is one.
inline const RowChoice* choice_for(fuseline_family family, int element_size, int64_t n, int memory_gbs) {
  if (!row_overrides[family].given && has_fast_memory(memory_gbs) && element_size == 2) {
    const RowChoices& widths = h200::kWidths[family];
    for (int i = 0; i < widths.count; ++i) {
      if (n == widths.first[i].longest) return &widths.first[i];
    }
  }
  return choice_for(family, element_size, n);
}

}  // namespace fuseline
