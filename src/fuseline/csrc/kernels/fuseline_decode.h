/* One decoding step of attention: what stands between the product that makes queries, keys and values of a new token
 * and the product that takes what the heads gathered, in one launch. */
#ifndef FUSELINE_DECODE_H
#define FUSELINE_DECODE_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  FUSELINE_CACHE_SAME = 0, /* keys and values of qkv's dtype */
  FUSELINE_CACHE_INT8 = 1, /* 8 bits and a scale a position: x = scale * q; qkv of 16 bits */
  FUSELINE_CACHE_FP8 = 2   /* e4m3 */
} fuseline_cache_kind;

/* Row b holds lengths[b] positions; the new token stands at that one, and sees itself and those before it. */
typedef struct {
  const void* qkv;        /* [batch, (heads + 2 kv_heads) head_dim], rows qkv_stride elements apart */
  void* y;                /* [batch, heads, head_dim] */
  void* k;                /* [batch, kv_heads, positions, head_dim], the last two dense; the new key is written */
  void* v;                /* likewise, of the same strides */
  float* k_scales;        /* [batch, kv_heads, positions], dense rows; null for FUSELINE_CACHE_SAME */
  float* v_scales;
  const int64_t* lengths; /* [batch] */
  const float* cos;       /* [.., head_dim / 2] by position: queries and keys are turned, half-split; or null */
  const float* sin;
  const void* q_norm;     /* [head_dim] of qkv's dtype: RMSNorm of each head before it is turned; or null */
  const void* k_norm;
  float* partials;        /* fuseline_decode_attention_partials() floats; may be null if that is 0 */
  int* arrivals;          /* [batch * heads], zero before and after */
  int64_t batch, heads, kv_heads, head_dim;
  int64_t count;          /* no row holds more positions than this, the new one included */
  int64_t qkv_stride;
  int64_t batch_stride, head_stride;             /* of k and v, elements */
  int64_t scale_batch_stride, scale_head_stride; /* of the scales */
  int64_t window;         /* positions that a position sees, itself among them; 0 for all */
  double eps, scale;      /* of the norms; factor on the scores */
  int dtype;              /* of qkv and y, a fuseline_dtype */
  int cache;              /* a fuseline_cache_kind */
  int overlap;            /* of all that is read only qkv was written by the launch before this: the rest may be read
                             while that ends */
} fuseline_decode;

/* Floats of scratch, or a negative code if this cannot be computed: head_dim 64 and 128 can. */
FUSELINE_API int64_t fuseline_decode_attention_partials(const fuseline_decode* call);
FUSELINE_API int fuseline_decode_attention(const fuseline_decode* call, void* stream);

#ifdef __cplusplus
}
#endif

#endif
