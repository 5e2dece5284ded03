/* A linear layer with GELU at its end, and the product of a backward with GELU's gradient at its end (Hopper). Part of
 * fuseline_kernels.h in all but name. */
#ifndef FUSELINE_LINEAR_GELU_H
#define FUSELINE_LINEAR_GELU_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Forward: out = gelu(z + bias), z = left right^T rounded, of left [rows, width], right [inner, width], bias [inner] or null.
 * slope: gelu'(z + bias), or null.
 * Backward: out = (left right) * slope, of left [rows, width], right [width, inner]; sums: of each 64 rows their sum,
 * [ceil(rows / 64), inner] fp32, or null.
 * turned: right lies transposed, forward [width, inner] and backward [inner, width].
 *
 * slope, out: [rows, inner]. All of one dtype, contiguous, 16-byte aligned. approximate, of the forward: FUSELINE_GELU_TANH or
 * FUSELINE_GELU_ERF. FUSELINE_UNSUPPORTED where fuseline_linear_gelu_takes says no. */
typedef struct {
  const void *left, *right, *bias;
  void *slope, *out;
  float* sums;
  int64_t rows, inner, width;
  int approximate, turned, dtype;
} fuseline_linear_gelu;

/* Whether this device takes both products of an MLP [rows, width] to [rows, inner] to [rows, out]: Hopper, bf16, inner, width
 * and out multiples of 8, width and out 768 to 1,600, and so many tiles that each multiprocessor has some, and few are left
 * without work in the end. */
FUSELINE_API int fuseline_linear_gelu_takes(int64_t rows, int64_t inner, int64_t width, int64_t out, int dtype);
FUSELINE_API int fuseline_linear_gelu_forward(const fuseline_linear_gelu* call, void* stream);
FUSELINE_API int fuseline_linear_gelu_backward(const fuseline_linear_gelu* call, void* stream);

#ifdef __cplusplus
}
#endif

#endif
