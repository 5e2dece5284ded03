/* The C API of libfuseline_kernels: fused row operations for anyone who holds device pointers.
 *
 * What every launch function keeps to:
 *  - Pointers are device memory of the current device; the work is queued on `stream` (a cudaStream_t, null
 *    for the default stream) and nothing waits for it. Calls may be captured into a CUDA graph once each has
 *    been made outside of one.
 *  - Rows are contiguous, one after the other, with unit stride. Any row length and any alignment of the
 *    base pointers is right; it is fastest when pointers and rows start at multiples of 16 bytes.
 *  - Arithmetic is in fp32 whatever the storage dtype, and results are the same bits from run to run.
 *  - The answer is 0, a cudaError_t value, or one of the negative codes below; fuseline_error_string() says
 *    it in words. No rows is not an error.
 */
#ifndef FUSELINE_KERNELS_H
#define FUSELINE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FUSELINE_API __attribute__((visibility("default")))
#else
#define FUSELINE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a signature or the meaning of an argument below changes. */
#define FUSELINE_KERNELS_ABI_VERSION 1

enum {
  FUSELINE_UNSUPPORTED = -1, /* a dtype, pair of dtypes or mask kind that is not listed here */
  FUSELINE_BAD_SIZE = -2     /* a negative size */
};

typedef enum { FUSELINE_FLOAT32 = 0, FUSELINE_FLOAT16 = 1, FUSELINE_BFLOAT16 = 2 } fuseline_dtype;

typedef enum {
  FUSELINE_MASK_NONE = 0,
  FUSELINE_MASK_BOOL = 1,    /* one byte an element: nonzero keeps the score, zero hides it */
  FUSELINE_MASK_ADD = 2,     /* added to the scaled score; dtype of x */
  FUSELINE_MASK_ADD_FP32 = 3 /* added to the scaled score; fp32 */
} fuseline_mask_kind;

/* The kernels whose layout by row length is a table (device/tuning.h). */
typedef enum {
  FUSELINE_SOFTMAX_FORWARD = 0,
  FUSELINE_SOFTMAX_BACKWARD = 1,
  FUSELINE_CROSS_ENTROPY = 2,
  FUSELINE_LAYER_NORM_FORWARD = 3,
  FUSELINE_LAYER_NORM_BACKWARD = 4,
  FUSELINE_FAMILIES = 5
} fuseline_family;

/* For measuring: the layout that the kernels of a family take in calls of this thread, in place of the table's.
 * held: 16-byte vectors of a row that a thread holds (0: the table's layout again); block: threads of a block at
 * most; cluster: blocks that share a row; stages: 0, or rows ahead of the one computed, in blocks that stay. A call
 * for which the layout does not work then answers FUSELINE_UNSUPPORTED. */
FUSELINE_API int fuseline_plan_override(int family, int held, int block, int cluster, int stages);

FUSELINE_API int fuseline_kernels_abi_version(void);
FUSELINE_API const char* fuseline_error_string(int code);

/* y = (x - mean) * rstd * weight + bias for each of `rows` rows of `n`.
 *
 * mean = sum(x) / n and rstd = 1 / sqrt(sum((x - mean)^2) / n + eps).
 * x, y: [rows, n] of dtype; y may be x. weight, bias: [n] of weight_dtype, which is dtype or fp32; each null for
 * none.
 * mean, rstd: [rows] fp32, each null if not wanted. (Ba, Kiros, Hinton 2016, equations 3 and 4.) */
FUSELINE_API int fuseline_layer_norm_forward(const void* x, const void* weight, const void* bias, void* y,
                                             float* mean, float* rstd, int64_t rows, int64_t n, double eps,
                                             int dtype, int weight_dtype, void* stream);

/* Bytes of scratch that fuseline_layer_norm_backward needs on the current device for the gradients of weight
 * and bias. With neither wanted it needs none, and workspace may be null. */
FUSELINE_API size_t fuseline_layer_norm_backward_workspace(int64_t rows, int64_t n, int dtype);

/* Gradients of the layer norm, x and grad_out read once:
 *   grad_x = rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat)), x_hat = (x - mean) * rstd
 *   grad_weight = sum over rows of g * x_hat, grad_bias = sum over rows of g.
 *
 * grad_out, x, grad_x: [rows, n] of dtype; weight (null for ones), grad_weight, grad_bias: [n] of
 * weight_dtype, which is dtype or fp32; mean, rstd: [rows] fp32 from the forward. A gradient whose pointer is null is not computed.
 * workspace: 16-byte aligned, uninitialized. With no rows, grad_weight and grad_bias are zero. */
FUSELINE_API int fuseline_layer_norm_backward(const void* grad_out, const void* x, const void* weight,
                                              const float* mean, const float* rstd, void* grad_x,
                                              void* grad_weight, void* grad_bias, void* workspace,
                                              int64_t rows, int64_t n, int dtype, int weight_dtype,
                                              void* stream);

/* y = softmax(scale * x + mask) over the last dimension of [B, H, T, S]; y may be x.
 *
 * mask_kind: a fuseline_mask_kind. mask[b, h, t, s] stands at b * mask_strides[0] + h * mask_strides[1] +
 * t * mask_strides[2] + s * mask_strides[3] elements; a stride of 0 broadcasts. mask and mask_strides may be
 * null with kind 0. causal: with 1, key s is visible to query t if s <= t + S - T, and keys that are not
 * visible are not read. A row with nothing visible, or of -inf only, gives zeros. */
FUSELINE_API int fuseline_softmax_forward(const void* x, const void* mask, int mask_kind,
                                          const int64_t mask_strides[4], int64_t B, int64_t H, int64_t T,
                                          int64_t S, double scale, int causal, void* y, int dtype,
                                          void* stream);

/* grad_x = scale * y * (grad_out - sum(grad_out * y)) for each of `rows` rows of `n`. Where y is 0 (masked)
 * the gradient is 0. grad_x may be grad_out. For 16-bit rows the inner sum is divided by sum(y), which their
 * rounding keeps from being 1. */
FUSELINE_API int fuseline_softmax_backward(const void* grad_out, const void* y, void* grad_x, int64_t rows,
                                           int64_t n, double scale, int dtype, void* stream);

/* ---- activations, rotary positions, embeddings ---- */

typedef enum {
  FUSELINE_SILU = 0,
  FUSELINE_GELU_TANH = 1, /* 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) */
  FUSELINE_GELU_ERF = 2   /* x * Phi(x), Phi the normal distribution */
} fuseline_activation;

/* y = gelu(x + bias) of `rows` rows of `n`. approximate: FUSELINE_GELU_TANH or FUSELINE_GELU_ERF.
 *
 * x, y: [rows, n] of dtype. bias: [n] of bias_dtype, which is dtype or fp32; null for none.
 * (Hendrycks, Gimpel 2016.) */
FUSELINE_API int fuseline_gelu_forward(const void* x, const void* bias, void* y, int64_t rows, int64_t n,
                                       int approximate, int dtype, int bias_dtype, void* stream);

/* Bytes of scratch that fuseline_gelu_backward needs on the current device for the gradient of bias. Without
 * that it needs none, and workspace may be null. */
FUSELINE_API size_t fuseline_gelu_backward_workspace(int64_t rows, int64_t n, int dtype);

/* grad_x = grad_out * gelu'(x + bias), grad_bias = the sum of grad_x over the rows, before it is rounded.
 *
 * A gradient whose pointer is null is not computed; grad_bias: [n] of bias_dtype. workspace: 16-byte aligned,
 * uninitialized. With no rows grad_bias is zero. */
FUSELINE_API int fuseline_gelu_backward(const void* grad_out, const void* x, const void* bias, void* grad_x,
                                        void* grad_bias, void* workspace, int64_t rows, int64_t n,
                                        int approximate, int dtype, int bias_dtype, void* stream);

/* y = activation(gate) * up: SwiGLU with FUSELINE_SILU, GeGLU with either GELU. (Shazeer 2020, equation 6.)
 *
 * y: [rows, n], contiguous. gate and up: rows of n that stand `stride` elements apart, so that both may be
 * halves of the rows of one tensor. */
FUSELINE_API int fuseline_glu_forward(const void* gate, const void* up, void* y, int64_t rows, int64_t n,
                                      int64_t stride, int activation, int dtype, void* stream);

/* grad_gate = grad_out * up * activation'(gate), grad_up = grad_out * activation(gate); rows `grad_stride`
 * apart. A gradient whose pointer is null is not computed. */
FUSELINE_API int fuseline_glu_backward(const void* grad_out, const void* gate, const void* up, void* grad_gate,
                                       void* grad_up, int64_t rows, int64_t n, int64_t stride,
                                       int64_t grad_stride, int activation, int dtype, void* stream);

/* Rotary positions over [B, H, T, D]: of the first `rotary` elements of each head, pair i is turned by
 * position * base^(-2 i / rotary); the others are copied. (Su et al. 2021, equation 34.)
 *
 * x, y: strides of batch, head and token in elements, so that [B, T, H, D] and parts of larger tensors need no
 * copy; unit stride within a head; y may be x. interleaved: pair i is elements 2 i and 2 i + 1 (GPT-J), else i
 * and i + rotary / 2 (GPT-NeoX, Llama). rotary is even. cos, sin: [table_rows, rotary / 2], a row for each
 * position; with null the angles are computed, for rotary up to 512. positions: that of token t of batch b at
 * b * positions_stride + t; null for 0, 1, ... A position outside the table gives NaN. backward: turns by minus
 * the angle, which is the gradient. */
FUSELINE_API int fuseline_rope(const void* x, void* y, const int64_t x_strides[3], const int64_t y_strides[3],
                               const float* cos, const float* sin, int64_t table_rows, double base,
                               const int64_t* positions, int64_t positions_stride, int64_t B, int64_t H,
                               int64_t T, int64_t D, int64_t rotary, int interleaved, int backward, int dtype,
                               void* stream);

/* y[i] = dropout(table[tokens[i]] + position_table[position of i]) for i < items, rows of n.
 *
 * table: [rows, n]; position_table: [position_rows, n] or null; y: [items, n]; all of dtype. The position of item
 * i is positions[i % period], or with null i % period. seed, p: dropout with the mask of that seed (one int64 in
 * device memory) as in device/philox.cuh; null for none. An id outside its table gives NaN. */
FUSELINE_API int fuseline_embedding_forward(const int64_t* tokens, const void* table, const int64_t* positions,
                                            const void* position_table, void* y, int64_t items, int64_t n,
                                            int64_t rows, int64_t period, int64_t position_rows,
                                            const int64_t* seed, double p, int dtype, void* stream);

/* Bytes of scratch for fuseline_embedding_backward. */
FUSELINE_API size_t fuseline_embedding_backward_workspace(int64_t items, int64_t n);

/* grad_table[r] = the sum of dropout(grad_out[i]) over the items whose id, ids[i % period], is r; zero where none
 * is, and for r = skipped. Summed in fp32, the items in order. grad_out: [items, n], grad_table: [rows, n] of
 * dtype. workspace: 16-byte aligned, uninitialized. */
FUSELINE_API int fuseline_embedding_backward(const void* grad_out, const int64_t* ids, int64_t period,
                                             int64_t skipped, void* grad_table, void* workspace,
                                             int64_t items, int64_t n, int64_t rows, const int64_t* seed,
                                             double p, int dtype, void* stream);

/* The same where the id of item i is i % period: no sort, and no scratch. */
FUSELINE_API int fuseline_embedding_position_backward(const void* grad_out, void* grad_table, int64_t items,
                                                      int64_t n, int64_t rows, int64_t period,
                                                      const int64_t* seed, double p, int dtype, void* stream);

#ifdef __cplusplus
}
#endif

#endif
