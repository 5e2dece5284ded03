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
  const float* factors; /* of rows [rows], by which the gradient of hidden is multiplied; or null */
} fuseline_head_product;
FUSELINE_API int fuseline_head_product_forward(const fuseline_head_product* call, void* stream);

/* The loss of each row, as fuseline_head_loss_forward has it, and what the gradients' products need. With p the softmax of a
 * row's logits, a = w[t] + 2 z_loss lse and y 1 at its target and 0 elsewhere, the gradient of its loss by its logits is
 *   a p - w[t] y = factor * power,   power = exp(logit - shift) - y w[t] sum(exp(logit - shift)) / a,
 * so that no pass over the logits is left: the product writes their powers, of which one a row is changed.
 *
 *   weight   [n, k]; what lies behind it is not read
 *   powers   [rows, words] bf16, 16-byte aligned; words from n on (padding) do not count, and have zeros. words is a multiple
 *            of 8, n need not be
 *   factors  [rows] fp32, divided by *divisor if that is given: what the gradient of hidden, powers * weight, is multiplied by
 *   scaled   [rows, k] bf16, 16-byte aligned, hidden * factor: the gradient of weight is powers^T * scaled. Or null
 *
 * A row's shift comes from the largest of 192 of its logits; where that turns out to be too far from the largest of all (by
 * 126), the logits of the chunk are multiplied out twice more, for the largest of each row. Of ignored rows loss, factor and
 * scaled are 0, and powers are finite; where the target is no class, loss and factor are NaN. hidden, weight: bf16, 16-byte
 * aligned; the rest as for fuseline_head_loss_forward. */
typedef struct {
  const void *hidden, *weight, *target;
  const float *class_weight, *divisor;
  void *powers, *scaled;
  float *factors, *loss;
  void* workspace;
  int64_t rows, words, n, k, ignore_index;
  double z_loss;
  int target_bytes;
} fuseline_head_powers;

/* Whether this device takes it (Hopper, where the product is large enough): asks for hidden, weight, rows, words, n and k. */
FUSELINE_API int fuseline_head_powers_takes(const fuseline_head_powers* call);
FUSELINE_API size_t fuseline_head_powers_workspace(int64_t rows, int64_t words);
FUSELINE_API int fuseline_head_powers_forward(const fuseline_head_powers* call, void* stream);

#ifdef __cplusplus
}
#endif

#endif
