/* A step of AdamW over all parameters of a model in one launch, and the norm of all gradients in one. */
#ifndef FUSELINE_OPTIMIZER_H
#define FUSELINE_OPTIMIZER_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 1 if the driver launches kernels with 32 KB of arguments, which both functions below need; else 0. */
FUSELINE_API int fuseline_launches_large_arguments(void);

/* One parameter with its state: `count` elements each, dense and in the same order. */
typedef struct {
  void *weight, *exp_avg, *exp_avg_sq;
  const void* grad;
  float* step;        /* one value: the steps taken before, and one more afterwards */
  const float* lr_at; /* one value: the learning rate; null: lr */
  int64_t count;
  float lr, beta1, beta2, eps, weight_decay;
} fuseline_adamw_parameter;

/* One step of AdamW (Loshchilov, Hutter 2019) for each parameter:
 *   g = grad * min(1, max_norm / (norm + 1e-6)); without a norm g = grad
 *   w -= lr * weight_decay * w
 *   m = beta1 * m + (1 - beta1) * g,  v = beta2 * v + (1 - beta2) * g^2
 *   w -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps), t being step + 1
 * in fp32, with the bits of torch's fused kernel; the results are rounded to dtype, and the weights use the moments
 * before rounding.
 *
 * dtype: of weights, gradients and moments. norm, found_inf: one value each, or null; where found_inf is 1 nothing changes.
 * arrived: one word, zero before and after. */
FUSELINE_API int fuseline_adamw(const fuseline_adamw_parameter* parameters, int64_t count, int dtype, const float* norm,
                                double max_norm, const float* found_inf, uint32_t* arrived, void* stream);

/* One launch of a call: `tensors` of the call from `first` on, in pieces of 16 KB. Blocks take as many pieces each. */
typedef struct {
  const char *kernel, *reason;
  int64_t first, tensors, pieces, blocks;
  int threads; /* of a block */
} fuseline_tensors_launch;

/* What that call would launch; only the parameters' counts are read. `launches` has room for `most`, and no more are written.
 * Answers how many there are, or a negative code. */
FUSELINE_API int64_t fuseline_adamw_explain(const fuseline_adamw_parameter* parameters, int64_t count, int dtype,
                                            fuseline_tensors_launch* launches, int64_t most);

/* Floats of scratch that fuseline_gradient_norm needs on the current device for gradients of these lengths; -1 if the
 * device does not answer. */
FUSELINE_API int64_t fuseline_gradient_norm_workspace(const int64_t* counts, const int* dtypes, int64_t tensors);

/* norm = sqrt(sum(x^2)) over the elements of all tensors, added up in fp32 in a fixed order, the blocks' sums in fp64.
 *
 * grads[i]: counts[i] elements of dtypes[i]. norm: one value. workspace: uninitialized. arrived: one word, zero before and
 * after. */
FUSELINE_API int fuseline_gradient_norm(const void* const* grads, const int64_t* counts, const int* dtypes,
                                        int64_t tensors, float* norm, float* workspace, uint32_t* arrived, void* stream);

/* What that call would launch on the current device, as above. */
FUSELINE_API int64_t fuseline_gradient_norm_explain(const int64_t* counts, const int* dtypes, int64_t tensors,
                                                    fuseline_tensors_launch* launches, int64_t most);

#ifdef __cplusplus
}
#endif

#endif
