// The sum of each column of a matrix: the gradient of a linear layer's bias.

#pragma once

#include "fuseline_torch.h"

namespace fuseline {

// The sums over the rows of `rows` [m, n], contiguous: [n] of that dtype. In 16 bits and in fp32 they are added up in fp32.
Tensor column_sums(const Tensor& rows, at::ScalarType dtype);

}  // namespace fuseline
