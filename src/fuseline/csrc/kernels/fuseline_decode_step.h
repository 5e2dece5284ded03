/* One whole decoding step of a small language model in one launch: a token in, logits and the likeliest token out. */
#ifndef FUSELINE_DECODE_STEP_H
#define FUSELINE_DECODE_STEP_H

#include "fuseline_attention.h"
#include "fuseline_quant.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FUSELINE_STEP_LAYERS = 64 }; /* at most */

/* One layer: x += out(attention(qkv(norm(x)))), then x += down(activation(up(norm(x)))). All of the call's dtype; weights
 * are [outputs, inputs] as torch.nn.Linear keeps them and start at multiples of 16 bytes; a bias may be null. */
typedef struct {
  const void *norm_weight, *norm_bias;         /* [embed_dim] */
  const void *qkv_weight, *qkv_bias;           /* (heads + 2 kv_heads) head_dim rows */
  const void *out_weight, *out_bias;
  const void *mlp_norm_weight, *mlp_norm_bias; /* [embed_dim] */
  const void *up_weight, *up_bias;             /* ffn_dim rows; with SwiGLU twice as many, gates first */
  const void *down_weight, *down_bias;
  void *k, *v;                                 /* [kv_heads, positions, head_dim], the last two dense; the new one is written */
} fuseline_step_layer;

typedef struct {
  fuseline_step_layer layers[FUSELINE_STEP_LAYERS];
  const void* token_table;    /* [vocab_size or more, embed_dim] */
  const void* position_table; /* [positions, embed_dim], added; or null */
  const float *cos, *sin;     /* [positions, head_dim / 2]: queries and keys are turned, half-split; or null */
  const void *norm_weight, *norm_bias; /* of the last norm */
  const void* head_weight;    /* [vocab_size or more, embed_dim] */
  int64_t* length;            /* [1]: positions held, and then one more; the token stands at that one */
  int64_t* token;             /* [1]: the token, and then the likeliest one after it */
  void* logits;               /* [vocab_size] */
  void* workspace;            /* fuseline_decode_step_workspace() bytes, zero before the first step */
  int64_t num_layers, embed_dim, heads, kv_heads, head_dim, ffn_dim, vocab_size;
  int64_t head_stride;        /* of k and v, elements */
  int64_t window;             /* positions that a position sees, itself among them; 0 for all */
  double eps, scale;          /* of the norms; factor on the scores */
  int dtype;                  /* bf16 */
  int norm;                   /* a fuseline_linear_norm, not NONE */
  int activation;             /* a fuseline_linear_activation, not NONE */
} fuseline_step;

/* Bytes of workspace, or a negative code if this cannot be computed. Two launches must not share one at a time. */
FUSELINE_API int64_t fuseline_decode_step_workspace(const fuseline_step* call);
FUSELINE_API int fuseline_decode_step(const fuseline_step* call, void* stream);

/* What that call would launch on the current device, and why or why not. */
FUSELINE_API int fuseline_decode_step_explain(const fuseline_step* call, fuseline_attention_plan* plan);

#ifdef __cplusplus
}
#endif

#endif
