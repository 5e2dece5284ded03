/* A linear head on Hopper: its loss without logits in memory, and its products. Part of fuseline_kernels.h in all but name. */
#ifndef FUSELINE_LINEAR_HEAD_H
#define FUSELINE_LINEAR_HEAD_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of each row of hidden [rows, k] times weight [n, k] transposed, fp32 logits:
 *   loss = w[t] * (lse - logit[t]) + z_loss * lse^2, as fuseline_cross_entropy_forward has it.
 *
 * hidden, weight: bf16 or fp16, 16-byte aligned. target: [rows] of int32 or int64 (target_bytes 4 or 8). class_weight: [n]
 * fp32, or null for ones. loss: [rows] fp32. workspace: 16-byte aligned, uninitialized. */
typedef struct {
  const void *hidden, *weight, *target;
  const float* class_weight;
  float* loss;
  void* workspace;
  int64_t rows, n, k, ignore_index;
  double z_loss;
  int target_bytes, dtype;
} fuseline_head_loss;

/* Whether this device takes it (Hopper, where the product is large enough): asks for hidden, weight, rows, n, k and dtype.
 * Elsewhere the forward answers FUSELINE_UNSUPPORTED. */
FUSELINE_API int fuseline_head_loss_takes(const fuseline_head_loss* call);
FUSELINE_API size_t fuseline_head_loss_workspace(int64_t rows, int64_t n);
FUSELINE_API int fuseline_head_loss_forward(const fuseline_head_loss* call, void* stream);

/* out = left right, rounded from fp32 sums, of hidden [rows, width], weight [words, width] and logits [rows, words]:
 *   FUSELINE_HEAD_LOGITS       logits = hidden weight^T
 *   FUSELINE_HEAD_GRAD_HIDDEN  gradient of hidden = that of the logits times weight
 *   FUSELINE_HEAD_GRAD_WEIGHT  gradient of weight = that of the logits, transposed, times hidden
 *
 * bf16 or fp16, contiguous. FUSELINE_UNSUPPORTED where it is not faster than cuBLAS (gradients in fp16, or of a width over
 * 1,024), or cannot be taken: on other devices, where words or width are no multiples of 8, where the sums are over
 * fewer than 768, where the tiles leave many
 * multiprocessors without work, or where something is not 16-byte aligned. */
enum { FUSELINE_HEAD_LOGITS, FUSELINE_HEAD_GRAD_HIDDEN, FUSELINE_HEAD_GRAD_WEIGHT };
typedef struct {
  const void *left, *right;
  void* out;
  int64_t rows, words, width;
  int product, dtype;
} fuseline_head_product;
FUSELINE_API int fuseline_head_product_forward(const fuseline_head_product* call, void* stream);

#ifdef __cplusplus
}
#endif

#endif
