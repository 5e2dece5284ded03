/* The loss of a linear head whose logits are never in memory. Part of fuseline_kernels.h in all but name. */
#ifndef FUSELINE_HEAD_LOSS_H
#define FUSELINE_HEAD_LOSS_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of each row of hidden [rows, k] times weight [width, k] transposed, fp32 logits of whose columns the first n count:
 *   loss = w[t] * (lse - logit[t]) + z_loss * lse^2, as fuseline_cross_entropy_forward has it.
 *
 * hidden, weight: bf16 or fp16, 16-byte aligned. target: [rows] of int32 or int64 (target_bytes 4 or 8). class_weight: [n]
 * fp32, or null for ones. loss: [rows] fp32. workspace: 16-byte aligned, uninitialized. */
typedef struct {
  const void *hidden, *weight, *target;
  const float* class_weight;
  float* loss;
  void* workspace;
  int64_t rows, n, width, k, ignore_index;
  double z_loss;
  int target_bytes, dtype;
  int variant, group; /* trial */
} fuseline_head_loss;

/* Whether this device takes it (Hopper, where the product is large enough): asks for hidden, weight, rows, n, width, k and
 * dtype. Elsewhere the forward answers FUSELINE_UNSUPPORTED. */
FUSELINE_API int fuseline_head_loss_takes(const fuseline_head_loss* call);
FUSELINE_API size_t fuseline_head_loss_workspace(int64_t rows, int64_t width);
FUSELINE_API int fuseline_head_loss_forward(const fuseline_head_loss* call, void* stream);

#ifdef __cplusplus
}
#endif

#endif
