// The norms' kernels of all families for many long rows, by teams of blocks (norm_teams.cuh): false for rows that they do not
// take, which they tell before anything is launched. Each with the bytes of workspace that it needs; 0 for rows that it never
// takes.
#pragma once

#include "norm.cuh"

namespace fuseline {

bool norm_forward_teams(const NormForward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                        int& error);
size_t norm_forward_teams_bytes(int64_t rows, int64_t n, const Device& device);
bool norm_backward_teams(const NormBackward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                         int& error);
size_t norm_backward_teams_bytes(int64_t rows, int64_t n, const Device& device);

}  // namespace fuseline
