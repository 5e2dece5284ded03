// The layout that a kernel takes for a row length: from the table of tuning.h, or set by fuseline_plan_override.
#pragma once

#include <cstdint>

#include "../fuseline_kernels.h"

namespace fuseline {

// The kernels of a family that has several for a row. Some fields of RowChoice mean something else to some of them: in
// `copied`, `held` is 0 and `stages` is 2 where x leaves the L2 first; in `held`, `stages` is 1 where the weights are fetched
// together with the row; `tiles` ignores these fields.
enum class RowKernel : int {
  rules,   // as the launchers lay out what no table was measured for
  held,    // registers
  packed,  // registers, as the row came
  copied,  // shared memory, in bulk copies, by blocks that end with their row
  light,   // the same by threads of fewer registers
  ring,    // rows ahead in shared memory, by blocks that stay
  tiles    // several short rows a copy
};

// A line of the table: rows of up to `longest` elements are laid out so.
struct RowChoice {
  int64_t longest;
  int held;     // 16-byte vectors of a row that a thread holds
  int block;    // threads of a block at most; rows that need fewer share one if it is their layout
  int cluster;  // blocks that share a row
  int stages;   // 0: each block has one row (or several short ones) and ends. Else blocks stay, and this many rows are
                // on their way through shared memory while one is computed; 1 in the norms' forward: blocks end with their
                // row, which waits there
  RowKernel kernel = RowKernel::rules;
};

struct RowChoices {
  const RowChoice* first;
  int count;
};

// What fuseline_plan_override set for the calls of this thread.
struct RowOverride {
  bool given;
  RowChoice choice;
};

inline thread_local RowOverride row_overrides[FUSELINE_FAMILIES];

}  // namespace fuseline

#include "tuning.h"

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

}  // namespace fuseline
