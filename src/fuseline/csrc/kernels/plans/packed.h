// Which rows registers hold as they come (device/packed_rows.cuh).
#pragma once

#include <cstdint>

namespace fuseline {

constexpr int kPackedVectors = 4;  // of a thread

// Whether threads enough for a row of `vectors` vectors have no more than their last outside of it.
inline bool packs(int64_t threads, int64_t vectors) { return threads * (kPackedVectors - 1) <= vectors; }

}  // namespace fuseline
