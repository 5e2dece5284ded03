// The norms' forward for many rows at odd addresses, as the table tells it: false for rows that it does not take. With the
// bytes of workspace, at a multiple of 16, that it needs.
#pragma once

#include "norm.cuh"

namespace fuseline {

bool norm_forward_odd(const NormForward& a, const RowChoice& requested, void* workspace, int dtype, const Device& device,
                      void* stream, int& error);
size_t norm_forward_odd_bytes(int64_t n, int dtype);

}  // namespace fuseline
