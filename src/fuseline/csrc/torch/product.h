// A product of two matrices, by the algorithm of cuBLASLt that was measured to be the fastest for its shape.

#pragma once

#include <optional>

#include "fuseline_torch.h"

namespace fuseline {

// Whether a matrix is a view that exchanges rows and columns of a contiguous one.
inline bool is_turned(const Tensor& x) { return x.dim() == 2 && !x.is_contiguous() && x.t().is_contiguous(); }

// Contiguous or turned, as `product` takes it.
inline Tensor dense(const Tensor& x) { return is_turned(x) ? x : x.contiguous(); }

// left right + bias, [m, n]; a turned operand is given transposed, [k, m] or [n, k]. bias is [n]. Matrices that are neither
// contiguous nor such views, of 16 bits and on a GPU at multiples of 256 bytes go to torch's own product. The result is of
// `out_type`, if it is given: on a GPU it may be float32 beside operands of 16 bits, unrounded and without a bias.
Tensor product(const Tensor& left, bool turned_left, const Tensor& right, bool turned_right,
               const std::optional<Tensor>& bias = std::nullopt, std::optional<at::ScalarType> out_type = std::nullopt);

}  // namespace fuseline
