/* A whole layer of multi-head self-attention for small batches and short sequences, forward in one launch or two:
 *
 *   q, k, v = x W_qkv^T + b_qkv,  a = dropout(softmax(softmax_scale q k^T + mask)) v,  out = a W_out^T + b_out
 *
 * What fuseline_kernels.h says of launch functions holds here. All tensors of a dtype are contiguous and start at
 * multiples of 16 bytes.
 */
#ifndef FUSELINE_SMALL_LAYER_H
#define FUSELINE_SMALL_LAYER_H

#include "fuseline_attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Begin from zeros and fill in what applies; a pointer that is null is not there. N = (num_heads + 2 num_kv_heads) D,
 * D = head_dim. With `shared_projection` one projection [3 D, D] is applied to each head's part of x, and
 * embed_dim = num_heads D, num_kv_heads = num_heads; qkv and its gradient are then [B * S, H, 3, D]. */
typedef struct {
  const void* x;          /* [B, S, embed_dim] */
  const void* qkv_weight; /* [N, embed_dim]: rows of q, then of k, then of v; or [3 D, D] */
  const void* qkv_bias;   /* [N] or [3 D] */
  const void* out_weight; /* [out_dim, num_heads D] */
  const void* out_bias;   /* [out_dim] */
  const unsigned char* mask; /* one byte for (batch, head, query, key) at these strides */
  int64_t mask_strides[4];
  int mask_hides;         /* what a nonzero byte does: 1 hides the key, 0 keeps it */
  const int64_t* seed;    /* of dropout, one element on the device */
  void* qkv;              /* [B * S, N]; kept for the backward if not null */
  void* attended;         /* a, [B * S, num_heads D]; always written */
  void* out;              /* [B, S, out_dim] */
  int64_t batch, seqlen, embed_dim, num_heads, num_kv_heads, head_dim, out_dim;
  int causal, shared_projection;
  double softmax_scale, dropout;
  int dtype;
  int tf32;               /* fp32 products in TF32 */
} fuseline_small_layer;

/* Gradients, of a layer whose forward kept qkv. grad_qkv is scratch of qkv's shape and always written, and so is grad_kv,
 * [B * S, 2, num_heads, D], where num_kv_heads < num_heads; of the others those that are null are not wanted. */
typedef struct {
  const void* grad_out; /* [B, S, out_dim] */
  void *grad_qkv, *grad_kv, *grad_x, *grad_qkv_weight, *grad_qkv_bias, *grad_out_weight, *grad_out_bias;
} fuseline_small_layer_gradients;

/* Whether the kernels run this layer on the current device: 1 or 0. Looks at sizes and dtype, and at pointers that are not null. */
FUSELINE_API int fuseline_small_layer_fits(const fuseline_small_layer* layer, int backward);

/* Answer FUSELINE_UNSUPPORTED for what does not fit. */
FUSELINE_API int fuseline_small_layer_forward(const fuseline_small_layer* layer, void* stream);
FUSELINE_API int fuseline_small_layer_backward(const fuseline_small_layer* layer,
                                               const fuseline_small_layer_gradients* gradients, void* stream);

/* The plan on the current device of the backward with these gradients, of which only what is null counts, or where `gradients` is
 * null of the forward on the stream. */
FUSELINE_API int fuseline_small_layer_explain(const fuseline_small_layer* layer, const fuseline_small_layer_gradients* gradients,
                                              void* stream, fuseline_attention_plan* plan);

/* Whether what is launched on the stream now goes into a graph: 1 or 0. */
FUSELINE_API int fuseline_is_captured(void* stream);

#ifdef __cplusplus
}
#endif

#endif
