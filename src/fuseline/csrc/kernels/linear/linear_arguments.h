// The arguments of the linears' kernels out of a call of the C API.
#pragma once

#include "linear_call.cuh"

namespace fuseline {

inline bool power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Answers 0, or why there can be no such call.
inline int read_arguments(const fuseline_linear& call, LinearArguments& a) {
  const bool int4 = call.format == FUSELINE_WEIGHT_INT4;
  if (call.format < FUSELINE_WEIGHT_16 || call.format > FUSELINE_WEIGHT_INT4) return FUSELINE_UNSUPPORTED;
  if (call.m < 0 || call.n < 0 || call.k < 0) return FUSELINE_BAD_SIZE;
  if (call.m > 0x3fffffff || call.n > 0x3fffffff || call.k > 0x3fffffff) return FUSELINE_UNSUPPORTED;
  if (int4 && (call.group_size < 32 || !power_of_two(call.group_size))) return FUSELINE_UNSUPPORTED;
  if (call.format != FUSELINE_WEIGHT_16 && offset_in_vector(call.weight)) return FUSELINE_UNSUPPORTED;
  a.x = static_cast<const char*>(call.x), a.weight = static_cast<const char*>(call.weight);
  a.scales = static_cast<const uint32_t*>(call.scales), a.zeros = static_cast<const uint32_t*>(call.zeros);
  a.bias = static_cast<const char*>(call.bias), a.y = static_cast<char*>(call.y);
  a.x_stride = 2 * call.x_stride, a.weight_stride = 2 * call.weight_stride;
  a.m = int(call.m), a.n = int(call.n), a.k = int(call.k);
  a.tiles = int(divide_up(call.n, kTileRows)), a.chunks = int(divide_up(call.k, kTileColumns));
  a.groups = int4 ? int(divide_up(call.k, call.group_size)) : 1;
  a.group_shift = 0;
  while (int4 && (int64_t(32) << a.group_shift) < call.group_size) ++a.group_shift;
  return 0;
}

}  // namespace fuseline
