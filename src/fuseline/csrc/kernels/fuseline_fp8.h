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
 * x: rows of `dtype`, n a multiple of 16, rows `stride` elements apart and at multiples of 16 bytes; columns: [n], or null
 * for ones; y: [rows, n] bytes, at multiples of 16; scales: [rows]. */
FUSELINE_API int fuseline_to_fp8(const void* x, const float* columns, void* y, float* scales, int64_t rows, int64_t n,
                                 int64_t stride, int dtype, int format, void* stream);

/* y = x transposed, of bytes: x is [rows, n], y [n, rows], both sizes multiples of 16 and both addresses, too. */
FUSELINE_API int fuseline_fp8_transpose(const void* x, void* y, int64_t rows, int64_t n, void* stream);

#ifdef __cplusplus
}
#endif

#endif
