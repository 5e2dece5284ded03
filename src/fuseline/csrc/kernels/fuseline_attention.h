/* The C API of attention. What fuseline_kernels.h says of launches holds here, but for rows: they are read and written
 * through strides.
 *
 * For batch b, head h and query row t, with keys s of head h / (heads / kv_heads):
 *   x[t, s] = softmax_scale * dot(q[t], k[s]);  if soft_cap > 0: x = soft_cap * tanh(x / soft_cap)
 *   y[t, s] = x[t, s] + mask[t, s], and -inf where the key is hidden from the row
 *   p[t, s] = exp(y[t, s] - lse[t]),  lse[t] = log(sum_s exp(y[t, s]) + exp(sinks[h]))      (natural logarithms)
 *   out[t]  = sum_s p[t, s] * dropout[t, s] * v[s]
 * A row from which all keys are hidden has out = 0, and lse = sinks[h], or -inf without sinks.
 *
 * A key is hidden if a boolean mask is zero there, or if it stands outside of
 *   t + shift - window_left <= s <= t + shift + window_right        (a window of -1 hides nothing)
 * where shift = seqlen_k - seqlen_q with FUSELINE_CAUSAL_BOTTOM_RIGHT and 0 otherwise, and where any causal kind makes
 * window_right 0.
 *
 * Packed sequences: with cu_seqlens_q and cu_seqlens_k ([sequences + 1] int32 on the device, rising from 0) batch is 1,
 * and sequence n has the query rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] and sees those keys of cu_seqlens_k alone.
 * t and s, seqlen_q and seqlen_k are then counted within the sequence for causal kinds and windows, and within the whole
 * for mask and dropout. Rows behind the last sequence see nothing.
 *
 * Dropout is a function of the seed: element ((b * heads + h) * seqlen_q + t) * seqlen_k + s by device/philox.cuh,
 * multiplied by 1 / (1 - p) where it is kept. The tensors' last dimension has unit stride, and every pointer and other
 * stride is a multiple of 16 bytes: else, and for head dims that are no multiple of 8 from 8 to 256, the answer is
 * FUSELINE_UNSUPPORTED. */
#ifndef FUSELINE_ATTENTION_H
#define FUSELINE_ATTENTION_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  FUSELINE_CAUSAL_NONE = 0,
  FUSELINE_CAUSAL_TOP_LEFT = 1,    /* row t sees keys 0 .. t */
  FUSELINE_CAUSAL_BOTTOM_RIGHT = 2 /* the last row sees all keys */
} fuseline_causal;

/* One call; begin from zeros (and windows of -1) and fill in what applies. A pointer that is null is not there. Strides
 * are in elements. */
typedef struct {
  int dtype;  /* of q, k, v and out */
  int causal; /* a fuseline_causal */
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;

  const void *q, *k, *v;                                    /* [batch, heads or kv_heads, seqlen, head_dim] */
  void* out;                                                /* like q */
  float* lse;                                               /* [batch, heads, seqlen_q], contiguous */
  int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3]; /* of batch, head, row */

  int64_t window_left, window_right; /* -1: none */
  double softmax_scale, soft_cap;    /* soft_cap 0: none */
  double dropout;                    /* the probability that an element of p is made zero */
  const int64_t* seed;               /* one element, on the device */

  int mask_kind;           /* a fuseline_mask_kind; FUSELINE_MASK_ADD has the dtype of q */
  const void* mask;        /* [batch, heads, seqlen_q, seqlen_k] through its strides, any of them 0 */
  int64_t mask_strides[4]; /* no alignment is asked of the mask */
  const float* sinks;      /* [heads] */

  const int32_t *cu_seqlens_q, *cu_seqlens_k; /* both or none */
  int64_t sequences;
  int64_t max_seqlen_q, max_seqlen_k; /* no sequence is longer */

  void* workspace; /* of fuseline_attention_forward_workspace bytes, 16-byte aligned; null if that is 0, or, where
                    * a block holds whole sequences, for a slower call */
} fuseline_attention;

/* Its gradients. `call` is that of the forward: out and lse are read, workspace is not. */
typedef struct {
  fuseline_attention call;
  const void* grad_out;                                   /* like out */
  const float* grad_lse;                                  /* like lse, or null for zeros */
  void *grad_q, *grad_k, *grad_v;                         /* like q, k, v; null where not wanted */
  int64_t grad_out_strides[3], grad_q_strides[3], grad_k_strides[3], grad_v_strides[3];
  void* grad_mask;               /* of an additive mask: contiguous, 1 long where mask_strides are 0 */
  int64_t grad_mask_strides[4];  /* 0 where the gradient is the sum over that dimension */
  int grad_mask_dtype;
  float* grad_sinks;             /* [heads] */
  void* workspace;               /* of fuseline_attention_backward_workspace bytes, 16-byte aligned */
} fuseline_attention_gradients;

/* What the calls below would launch, in this order; launches[i].blocks of kernels named short_... are problems, which as many
 * blocks take in turn as the device holds. None: `code` is the answer. */
typedef struct {
  int code;
  const char* reason;
  size_t workspace;
  int count;
  struct {
    const char* kernel;
    int64_t blocks;
    int threads;
    size_t shared;
  } launches[8];
} fuseline_attention_plan;

/* The plan on the current device of a call (the gradients' pointers are not read then) or of its gradients. */
FUSELINE_API int fuseline_attention_explain(const fuseline_attention_gradients* gradients, int backward,
                                            fuseline_attention_plan* plan);

FUSELINE_API size_t fuseline_attention_forward_workspace(const fuseline_attention* call);
FUSELINE_API int fuseline_attention_forward(const fuseline_attention* call, void* stream);

FUSELINE_API size_t fuseline_attention_backward_workspace(const fuseline_attention_gradients* gradients);
FUSELINE_API int fuseline_attention_backward(const fuseline_attention_gradients* gradients, void* stream);

#ifdef __cplusplus
}
#endif

#endif
