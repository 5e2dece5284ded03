/* Matrices in 8-bit floating point, as a scaled matrix product takes them. */
#ifndef FUSELINE_FP8_H
#define FUSELINE_FP8_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FUSELINE_E4M3 = 0, FUSELINE_E5M2 = 1 } fuseline_fp8_format;

/* y = x * columns / scale in a fuseline_fp8_format, scale = max(max |x * columns| / largest, 1e-37) of each row, where
 * largest is the format's: 448 or 57,344.
 *
 * x: rows of `dtype`, n a multiple of 16, rows `stride` elements apart and at multiples of 16 bytes; columns: [n], at a
 * multiple of 16 bytes, or null for ones; y: [rows, n] bytes, at multiples of 16; scales: [rows]. */
FUSELINE_API int fuseline_to_fp8(const void* x, const float* columns, void* y, float* scales, int64_t rows, int64_t n,
                                 int64_t stride, int dtype, int format, void* stream);

/* y = x transposed, of bytes: x is [rows, n], y [n, rows], both sizes multiples of 16 and both addresses, too. */
FUSELINE_API int fuseline_fp8_transpose(const void* x, void* y, int64_t rows, int64_t n, void* stream);

/* An activation between two layers, and the rows of its result as e4m3 with their scales. `activation` is a
 * fuseline_activation:
 *   FUSELINE_SILU, as SwiGLU: y = silu(x[:, :n]) * x[:, n:], x [rows, 2 n]; bias is null
 *   FUSELINE_GELU_*:          y = gelu(x + bias),            x [rows, n];   bias [n], or null
 * x and y are of `dtype`, bf16, contiguous; y8: bytes; all at multiples of 16 bytes. n is a multiple of 16, 8,192 at
 * most. */
FUSELINE_API int fuseline_activation_fp8_forward(const void* x, const float* bias, void* y, void* y8, float* scales,
                                                 int64_t rows, int64_t n, int activation, int dtype, void* stream);

/* The gradient of its x, the rows of grad_x * columns in `format` with their scales, and if grad_bias [n] is not null the
 * sum of grad_x over rows. grad_out: [rows, n]; grad_x and grad_x8 as x; columns: as many as x has, or null for ones.
 * partials: [fuseline_activation_fp8_partials(rows, n), n]; null without grad_bias. */
FUSELINE_API int64_t fuseline_activation_fp8_partials(int64_t rows, int64_t n);
FUSELINE_API int fuseline_activation_fp8_backward(const void* grad_out, const void* x, const float* bias,
                                                  const float* columns, void* grad_x, void* grad_x8, float* scales,
                                                  float* grad_bias, float* partials, int64_t rows, int64_t n,
                                                  int activation, int dtype, int format, void* stream);

#ifdef __cplusplus
}
#endif

#endif
