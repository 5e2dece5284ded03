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
#define FUSELINE_KERNELS_ABI_VERSION 7

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

/* The kernels whose layout by row length is a table (rows/table_h100.h). */
typedef enum {
  FUSELINE_SOFTMAX_FORWARD = 0,
  FUSELINE_SOFTMAX_BACKWARD = 1,
  FUSELINE_CROSS_ENTROPY = 2,
  FUSELINE_LAYER_NORM_FORWARD = 3, /* of few rows, at any address, of two dtypes; all norms */
  FUSELINE_LAYER_NORM_BACKWARD = 4,
  FUSELINE_MANY_NORMS = 5, /* rows that fill the chip: a forward and a backward of a layer norm and of an RMS norm, of x, then
                            * of residual + x, then of residual + dropout(x + x_bias) */
  FUSELINE_FAMILIES = 17
} fuseline_family;

/* For measuring: the layout that the kernels of a family take in calls of this thread, in place of the table's.
 * held: 16-byte vectors of a row that a thread holds (0: the table's layout again); block: threads of a block at
 * most; cluster: blocks that share a row; stages: 0, or rows ahead of the one computed, in blocks that stay;
 * kernel: a RowKernel of rows/choice.h, for families that have several, or 0. A call for which the layout
 * does not work then answers FUSELINE_UNSUPPORTED. */
FUSELINE_API int fuseline_plan_override(int family, int held, int block, int cluster, int stages, int kernel);

FUSELINE_API int fuseline_kernels_abi_version(void);
FUSELINE_API const char* fuseline_error_string(int code);

/* ---- norms, of x or of a sum made on the way ---- */

typedef enum { FUSELINE_LAYER_NORM = 0, FUSELINE_RMS_NORM = 1 } fuseline_norm_kind;

/* One norm, forward or backward; begin from zeros and fill in what applies. A pointer that is null is not there, or
 * not wanted. Tensors are [rows, n]: what is normalized, its gradients and grad_sum of dtype, y and grad_y of y_dtype,
 * which is dtype, or 16 bits where dtype is fp32. weight, bias, x_bias and their gradients are [n] of weight_dtype, which
 * is y_dtype or fp32; mean, rstd [rows] fp32.
 *
 * With residual, what is normalized is sum = residual + dropout(x + x_bias), rounded to dtype, and x and its gradient
 * (grad_dropped) are of y_dtype, residual and its gradient (grad_x) of dtype; without, it is x.
 *   layer norm: y = (sum - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((sum - mean)^2) + eps)
 *   RMS norm:   y = sum * rstd * weight + bias,          rstd = 1 / sqrt(mean(sum^2) + eps)  (Zhang, Sennrich 2019)
 * dropout: the probability that an element is made zero, by Philox words of the seed (one int64 on the device):
 * element i of the tensor takes 16 bits of block i / 8, and is kept where these are at least dropout * 2^16, to the nearest
 * whole number (device/philox.cuh). */
typedef struct {
  int kind; /* a fuseline_norm_kind */
  int dtype, y_dtype, weight_dtype;
  int64_t rows, n;
  double eps;
  double dropout;
  const int64_t* seed;
  const void* x; /* forward: the input. Backward: what was normalized, x or the sum */
  const void *residual, *x_bias, *weight, *bias;
  void *y, *sum;      /* forward's results; y may be x */
  float *mean, *rstd; /* forward: written where wanted. Backward: read; an RMS norm has no mean */
  /* For the backward alone. */
  const void* grad_y;
  const void* grad_sum; /* the gradient of the returned sum: the norm's own is added to it */
  void* grad_x;         /* the gradient of x, or of residual where there is one */
  void* grad_dropped;   /* the gradient of x behind the dropout, for where that or dtypes make it another than grad_x */
  void *grad_weight, *grad_bias;
  void* grad_x_bias; /* needs grad_dropped, or without dropout grad_x */
} fuseline_norm;

FUSELINE_API int fuseline_norm_forward(const fuseline_norm* norm, void* stream);

/* Bytes of scratch that fuseline_norm_backward needs on the current device for the same struct; with no gradient of
 * weight, bias or x_bias wanted workspace may be null. */
FUSELINE_API size_t fuseline_norm_backward_workspace(const fuseline_norm* norm);

/* All gradients that are wanted, every tensor read once; inputs twice and more of few rows, and of those that no cluster
 * holds or that do not keep to 16-byte steps. workspace: 16-byte aligned, uninitialized. With no rows, the gradients of
 * weight, bias and x_bias are zero. */
FUSELINE_API int fuseline_norm_backward(const fuseline_norm* norm, void* workspace, void* stream);

/* The layer norm alone: y = (x - mean) * rstd * weight + bias for each of `rows` rows of `n`.
 *
 * mean = sum(x) / n and rstd = 1 / sqrt(sum((x - mean)^2) / n + eps).
 * x, y: [rows, n] of dtype; y may be x. weight, bias: [n] of weight_dtype, which is dtype or fp32; each null for
 * none.
 * mean, rstd: [rows] fp32, each null if not wanted. (Ba, Kiros, Hinton 2016, equations 3 and 4.) */
FUSELINE_API int fuseline_layer_norm_forward(const void* x, const void* weight, const void* bias, void* y,
                                             float* mean, float* rstd, int64_t rows, int64_t n, double eps,
                                             int dtype, int weight_dtype, void* stream);

/* Bytes of scratch that fuseline_layer_norm_backward needs on the current device for the gradients of weight
 * and bias. With neither wanted workspace may be null. */
FUSELINE_API size_t fuseline_layer_norm_backward_workspace(int64_t rows, int64_t n, int dtype);

/* Gradients of the layer norm, x and grad_out read once (twice and more as above):
 *   grad_x = rstd * (g * w - mean(g * w) - x_hat * mean(g * w * x_hat)), x_hat = (x - mean) * rstd
 *   grad_weight = sum over rows of g * x_hat, grad_bias = sum over rows of g.
 *
 * grad_out, x, grad_x: [rows, n] of dtype; weight (null for ones), grad_weight, grad_bias: [n] of
 * weight_dtype, which is dtype or fp32; mean, rstd: [rows] fp32 from the forward. A gradient whose pointer is null is
 * not computed. workspace: 16-byte aligned, uninitialized. With no rows, grad_weight and grad_bias are zero. */
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

/* ---- cross-entropy ---- */

/* The cross-entropy of each row of logits with its target, and its gradient in the same pass if grad is given:
 *   z = soft_cap * tanh(logits / soft_cap) (soft_cap 0: z = logits), lse = log(sum(e^z)) over the first n columns
 *   loss = (1 - s) * w[t] * (lse - z[t]) + s / n * sum(w * (lse - z)) + z_loss * lse^2, s being label_smoothing.
 *
 * logits, grad: [rows, width] of dtype, of whose columns the first n count; the gradient of the others is 0. grad
 * may be logits. target: [rows] of int32 or int64 (target_bytes 4 or 8). A row whose target is ignore_index has
 * loss and gradient 0; one whose target is outside 0 .. n - 1 otherwise has NaN. weight: [n] fp32 or null for ones,
 * weight_sum: its sum, one value. total: one fp32 value that the gradient is divided by, or null; with `counted` the
 * launch ahead on the stream is the fuseline_cross_entropy_reduce that makes it, beside which this one may begin.
 * loss: [rows] fp32. statistics: [rows, 2] fp32, 8-byte aligned: the largest z, and sum(e^(z - that)). */
FUSELINE_API int fuseline_cross_entropy_forward(const void* logits, const void* target, int target_bytes,
                                                const float* weight, const float* weight_sum, const float* total,
                                                int counted, float* loss, float* statistics, void* grad, int64_t rows,
                                                int64_t n, int64_t width, int64_t ignore_index,
                                                double label_smoothing, double soft_cap, double z_loss, int dtype,
                                                void* stream);

/* The gradient alone, from the forward's statistics. grad_out: the gradient of each row's loss, fp32: `rows` values, or
 * one for all with one_grad_out. */
FUSELINE_API int fuseline_cross_entropy_backward(const void* logits, const void* target, int target_bytes,
                                                 const float* weight, const float* weight_sum, const float* total,
                                                 const float* statistics, const float* grad_out, int one_grad_out,
                                                 void* grad, int64_t rows, int64_t n, int64_t width,
                                                 int64_t ignore_index, double label_smoothing, double soft_cap,
                                                 double z_loss, int dtype, void* stream);

/* Bytes of scratch that fuseline_cross_entropy_reduce needs. */
FUSELINE_API size_t fuseline_cross_entropy_reduce_workspace(int64_t rows);

/* Adds up rows in a fixed order: total = the sum of w[t] over the rows that are not ignored; sum = sum(loss), divided
 * by that total if `mean`. Each is one fp32 value; sum (and loss with it) or total may be null, weight too, for ones.
 * What makes loss, if it lets this launch begin before it ends, did so when target and weight were there.
 * workspace: 16-byte aligned, uninitialized. */
FUSELINE_API int fuseline_cross_entropy_reduce(const float* loss, const void* target, int target_bytes,
                                               const float* weight, float* sum, float* total, void* workspace,
                                               int64_t rows, int64_t n, int64_t ignore_index, int mean, void* stream);

/* Multiplies the rows of x [rows, n] by factors (fp32: `rows`, or one for all with one_factor), in place. Rows whose
 * factor is 1 are not touched. */
FUSELINE_API int fuseline_scale_rows(void* x, const float* factors, int one_factor, int64_t rows, int64_t n, int dtype,
                                     void* stream);

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

/* Bytes of scratch that fuseline_column_sums needs on the current device. */
FUSELINE_API size_t fuseline_column_sums_workspace(int64_t rows, int64_t n, int dtype);

/* sums[c] = the sum of x[r, c] over the rows r, added up in fp32: a bias's gradient.
 *
 * x: [rows, n] of dtype. sums: [n] of sums_dtype. workspace: 16-byte aligned, uninitialized. With no rows sums are zero. */
FUSELINE_API int fuseline_column_sums(const void* x, void* sums, void* workspace, int64_t rows, int64_t n, int dtype,
                                      int sums_dtype, void* stream);

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
 * copy; unit stride within a head; y does not overlap x. interleaved: pair i is elements 2 i and 2 i + 1 (GPT-J), else i
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
 * is, and for r = skipped. Summed in fp32, the items in order. `adds`: the sums are added to what grad_table has.
 * grad_out: [items, n], grad_table: [rows, n] of dtype. workspace: 16-byte aligned, uninitialized. */
FUSELINE_API int fuseline_embedding_backward(const void* grad_out, const int64_t* ids, int64_t period,
                                             int64_t skipped, void* grad_table, int adds, void* workspace,
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
