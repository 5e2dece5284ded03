/* Dropout by a mask that is a function of a seed and a position, alone or after ReLU; part of fuseline_kernels.h. */
#ifndef FUSELINE_DROPOUT_H
#define FUSELINE_DROPOUT_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = dropout(x), or dropout(relu(x)) with `relu`, of `count` elements. An element is set to zero with probability p, to
 * the nearest 2^-16, and the others are scaled; the mask is that of device/philox.cuh for the word `seed` on the device. */
FUSELINE_API int fuseline_dropout(const void* x, void* y, int64_t count, double p, const int64_t* seed, int relu,
                                  int dtype, void* stream);

/* grad_x = grad_y / (1 - p) where y, the result of dropout(relu(x)), is not zero, and 0 elsewhere. */
FUSELINE_API int fuseline_relu_dropout_backward(const void* grad_y, const void* y, void* grad_x, int64_t count,
                                                double p, int dtype, void* stream);

/* The same of [rows, n], and sums: [n] of dtype, those of grad_x over its rows, added up in fp32. workspace: 16-byte
 * aligned, uninitialized, of fuseline_column_sums_workspace(rows, n, dtype) bytes. FUSELINE_UNSUPPORTED for no rows, rows
 * that are no whole steps of 16 bytes, and at most 1,024 rows of fp32. */
FUSELINE_API int fuseline_relu_dropout_backward_sums(const void* grad_y, const void* y, void* grad_x, void* sums,
                                                     void* workspace, int64_t rows, int64_t n, double p, int dtype,
                                                     void* stream);

#ifdef __cplusplus
}
#endif

#endif
