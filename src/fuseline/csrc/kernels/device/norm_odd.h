// The norms' forward for many long rows at odd addresses: false for rows that it does not take. With the bytes of workspace,
// at a multiple of 16, that it needs; 0 for rows that it never takes.
#pragma once

#include "norm.cuh"

namespace fuseline {

bool norm_forward_odd(const NormForward& a, const RowChoice* choice, void* workspace, int dtype, int y_dtype,
                      const Device& device, void* stream, int& error);
size_t norm_forward_odd_bytes(const NormForward& a, int dtype);

}  // namespace fuseline
