// The sum over the partial sums that blocks leave behind: partials.cu.
#pragma once

#include "plans/device.h"

namespace fuseline {

// result[c] = the sum of partials[p * n + c] over p < count, in a fixed order; `dtype` is the result's.
int run_add_partials(const float* partials, int64_t count, int64_t n, void* result, int dtype, const Device& device,
                     void* stream);

}  // namespace fuseline
