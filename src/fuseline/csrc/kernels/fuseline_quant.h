/* Linear layers for few rows of activations: y = x W^T + bias with quantized or 16-bit weights, each weight read once.
 *
 * Layouts. Weights of 4 and 8 bits stand in tiles of 16 rows (output features) by 64 columns (inputs), tiles of one
 * row of tiles one after the other; both sizes are rounded up, and what is added must be finite (zero, say). A tile
 * is what the 32 lanes of a warp hand to the tensor cores as they read it: lane 4 g + q holds rows g and g + 8, and of
 * each half h of the columns the eight that start at c = 32 h + 8 q.
 *   int8, 2 x 32 x 16 bytes [h][lane]: W[g][c], W[g + 8][c], W[g][c + 1], W[g + 8][c + 1], ..; two's complement.
 *   int4, 32 x 16 bytes [lane]: word 2 h + j is of columns c = 32 h + 8 q + 4 j ..; its eight nibbles, low ones first,
 *     are W[g][c], W[g + 8][c], W[g][c + 2], W[g + 8][c + 2], W[g][c + 1], W[g + 8][c + 1], W[g][c + 3], W[g + 8][c + 3].
 * Scales of int8 are fp32, one a row. Scales of int4 are bf16, one a row and group of columns, [tile][group][8][2]: rows
 * g and g + 8 beside each other; its zero points are bytes in the same order, and 8 where there are none.
 * A weight is scale * q (int8), scale * (q - zero) (int4). */
#ifndef FUSELINE_QUANT_H
#define FUSELINE_QUANT_H

#include "fuseline_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  FUSELINE_WEIGHT_16 = 0, /* of x's dtype, [n, k] rows as torch.nn.Linear keeps them */
  FUSELINE_WEIGHT_INT8 = 1,
  FUSELINE_WEIGHT_INT4 = 2
} fuseline_weight_format;

typedef enum {
  FUSELINE_LINEAR_ANY = 0,
  FUSELINE_LINEAR_STREAM = 1, /* up to 32 rows of x */
  FUSELINE_LINEAR_TILES = 2,  /* quantized weights on Hopper, x in bf16; nothing around them but a bias; up to 32 rows of */
                              /* x where there are zero points or groups of fewer than 128 columns */
  FUSELINE_LINEAR_GEMV = 3,   /* 16-bit weights and up to 4 rows of x; few quantized weights and one row in bf16 */
  FUSELINE_LINEAR_65_TO_256 = 4, /* quantized weights on Hopper and 65 to 256 rows of x in bf16 at multiples of 16 bytes; */
                               /* nothing around them but a bias, no zero points, groups of 128 and more */
  FUSELINE_LINEAR_SLICES = 5   /* quantized weights on Hopper and up to 32 rows of x in bf16 (int4 16); likewise */
} fuseline_linear_kernel;

typedef enum { FUSELINE_NORM_NONE = 0, FUSELINE_NORM_RMS = 1, FUSELINE_NORM_LAYER = 2 } fuseline_linear_norm;

typedef enum {
  FUSELINE_ACTIVATION_NONE = 0,
  FUSELINE_ACTIVATION_GELU = 1, /* by the error function */
  FUSELINE_ACTIVATION_GELU_TANH = 2,
  FUSELINE_ACTIVATION_SWIGLU = 3 /* silu of the first n / 2 features times the others; n a multiple of 32 */
} fuseline_linear_activation;

typedef struct {
  int format; /* a fuseline_weight_format */
  int dtype;  /* of x, y, bias: fp16 or bf16 */
  const void* x;      /* [m, k], rows x_stride elements apart */
  const void* weight; /* packed: starts at a multiple of 16 bytes */
  const void* scales; /* null for 16 bits */
  const void* zeros;  /* int4 only; may be null */
  const void* bias;   /* [n]; may be null */
  void* y;            /* [m, n] */
  int64_t m, n, k;
  int64_t x_stride;
  /* 16 bits: elements between rows, a multiple of 8; rows begin at multiples of 16 bytes. */
  int64_t weight_stride;
  int64_t group_size;    /* int4: 32 or more, a power of two */
  int kernel;            /* for measuring, a fuseline_linear_kernel; 0 takes the plan */
  int splits;            /* likewise: blocks (1 .. 8) that share the columns of a row; of tiles, as many for each */
  /* y = residual + activation(norm(x) W^T + bias), each part optional (0, null). A norm wants rows of x at multiples of
   * 16 bytes, of k a multiple of 8, and 32 of them at most. */
  int norm;                /* over k, a fuseline_linear_norm; the normed x is rounded to x's dtype */
  const void* norm_weight; /* [k] of x's dtype, at a multiple of 16 bytes */
  const void* norm_bias;   /* [k] likewise; may be null */
  double eps;
  int activation;          /* a fuseline_linear_activation */
  const void* residual;    /* of y's shape and dtype */
  void* workspace;         /* fuseline_quant_linear_workspace bytes at a multiple of 16, or null */
  int overlap;             /* the weight may be read before the launch ahead has ended: a launch without overlap came */
                           /* after all that wrote it */
  const void* next_weight; /* what the next such launch reads, at a multiple of 16 bytes: the L2 is asked for some of it */
  int64_t next_bytes;      /* at the end of this one; or null */
} fuseline_linear;

/* Bytes that many rows want; without them a call answers FUSELINE_UNSUPPORTED. */
FUSELINE_API int64_t fuseline_quant_linear_workspace(int format, int64_t m, int64_t k);

FUSELINE_API int fuseline_quant_linear(const fuseline_linear* call, void* stream);

/* Of the CUDA graph that `stream` is being captured into, 0 if into none. */
FUSELINE_API uint64_t fuseline_capture_id(void* stream);

/* The weights as [n, k] rows of `dtype` (fp32, fp16, bf16), from the same fields of a call; y is where they go. */
FUSELINE_API int fuseline_dequantize(const fuseline_linear* call, void* stream);

#ifdef __cplusplus
}
#endif

#endif
