// Adding up the partial sums over rows that a norm's backward leaves behind: norm_sums.cu.
#pragma once

#include <type_traits>

#include "norm.cuh"

namespace fuseline {

// grad_weight, grad_bias and grad_x_bias, those that are wanted of the first `sums`, from `count` partial sums each. dtype: that
// of y, which gradients have unless weights are fp32. early: the kernel before lets the next one start.
int add_partials(const NormBackward& a, int dtype, int sums, int count, bool early, void* stream);

template <class Y>
int add_partials(const NormBackward& a, int sums, int count, bool early, void* stream) {
  constexpr int dtype = std::is_same_v<Y, float>    ? FUSELINE_FLOAT32
                        : std::is_same_v<Y, __half> ? FUSELINE_FLOAT16
                                                    : FUSELINE_BFLOAT16;
  return add_partials(a, dtype, sums, count, early, stream);
}

}  // namespace fuseline
