// What the norms' kernels take, the same for all of them: layer norm and RMS norm, of x or of a sum that is made on the
// way (residual + dropout(x + x_bias)). What is normalized is of dtype X; y, and with a residual x, are of dtype Y, which
// is X or 16 bits of an fp32 X.
#pragma once

#include "device/launch.cuh"
#include "device/philox.cuh"
#include "device/shifted.cuh"
#include "device/weights.cuh"

namespace fuseline {

struct NormForward {
  const void* x;
  const void* residual;  // null: x alone is normalized
  const void* x_bias;
  const void* weight;
  const void* bias;
  void* y;
  void* sum;  // what is normalized, rounded to X; null without residual
  float* mean;
  float* rstd;
  int64_t rows, n;
  float eps;
  Dropout dropout;
  bool centred;       // the mean is taken out: a layer norm
  bool fp32_weights;  // weight, bias, x_bias
  int cluster;
};

struct NormBackward {
  const void* grad_y;
  const void* grad_sum;  // added to the gradient of what was normalized; null for none
  const void* x;         // what was normalized
  const void* weight;
  const float* mean;  // null for an RMS norm
  const float* rstd;
  void* grad_x;        // of what was normalized
  void* grad_dropped;  // the same, behind the dropout, in Y
  void* grad_weight;
  void* grad_bias;
  void* grad_x_bias;
  float* partials;  // [sums, blocks that share no columns, columns], for weight, bias, x_bias; null if none is wanted
  int64_t rows, n;
  int64_t columns;  // n, up to a multiple of four
  float inverse_n;
  Dropout dropout;
  bool fp32_weights;
  int cluster;
  int stages;  // rows in the ring of the kernel for long ones
  bool beside;  // whether the rows of a block, or of a cluster, stand beside each other

  __host__ __device__ bool wants_rows() const { return grad_x || grad_dropped || grad_x_bias; }
};

// Whether rows of all tensors and the weights stand in whole vectors, of kSize elements.
template <int kSize>
bool in_vectors(const NormBackward& a) {
  bool aligned = a.n % kSize == 0;
  for (const void* tensor : {a.grad_y, a.grad_sum, a.x, a.weight, static_cast<const void*>(a.grad_x),
                             static_cast<const void*>(a.grad_dropped)}) {
    aligned = aligned && offset_in_vector(tensor) == 0;
  }
  return aligned;
}

// Dropout's multipliers of elements first .. first + kCount of the tensor; kAnywhere: first is no multiple of 4, and may
// be negative, where a vector of memory begins before the tensor.
template <int kCount, bool kAnywhere>
__device__ __forceinline__ void dropout_row(const Dropout& dropout, uint64_t seed, int64_t first,
                                            float (&multipliers)[kCount]) {
  if constexpr (!kAnywhere) {
    dropout_multipliers(dropout, seed, first, multipliers);
  } else {
    uint32_t words[kCount + 4];
#pragma unroll
    for (int i = 0; i < kCount + 4; i += 4) {
      uint32_t bits[4];
      random_bits(seed, (first & ~int64_t(3)) + i, bits);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i + j] = bits[j];
    }
    shift_words<2>(words, int(first & 3));
#pragma unroll
    for (int i = 0; i < kCount; ++i) multipliers[i] = words[i] >= dropout.threshold ? dropout.scale : 0.f;
  }
}

inline int64_t columns_of_partials(int64_t n) { return (n + 3) / 4 * 4; }

// How many sums over rows a backward has.
constexpr int kSumsOfLayerNorm = 2, kSumsOfRmsNorm = 1, kSumsOfAddedNorm = 3;

// Calls run(X{}, Y{}) with the types of what is normalized and of y.
template <class Run>
int with_dtypes(int dtype, int y_dtype, Run&& run) {
  if (dtype == y_dtype) return with_dtype(dtype, [&](auto type) { return run(type, type); });
  if (dtype != FUSELINE_FLOAT32) return FUSELINE_UNSUPPORTED;
  return with_dtype(y_dtype, [&](auto type) { return run(float{}, type); });
}

// The kernels of each family, by dtypes (fuseline_dtype). Backward ones each with the blocks whose partial sums it keeps.
// `requested`: the layout to take, or none: null for that of their rules.
int layer_norm_backward(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream,
                        const RowChoice* requested = nullptr);
int rms_norm_backward(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream,
                      const RowChoice* requested = nullptr);
int add_norm_backward(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream,
                      const RowChoice* requested = nullptr);
int64_t layer_norm_backward_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device);
int64_t rms_norm_backward_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device);
int64_t add_norm_backward_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device);

// Those for long rows; false for rows that they do not take.
bool layer_norm_backward_ring(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                              const RowChoice* requested = nullptr);
bool rms_norm_backward_ring(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                            const RowChoice* requested = nullptr);
bool add_norm_backward_ring(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error,
                            const RowChoice* requested = nullptr);
int64_t layer_norm_backward_ring_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device);
int64_t rms_norm_backward_ring_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device);
int64_t add_norm_backward_ring_blocks(int64_t rows, int64_t n, int dtype, int y_dtype, const Device& device);

// That of all families for rows that no other takes, with so many bytes of workspace where sums are wanted.
int norm_backward_general(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream);
int64_t norm_backward_general_bytes(int64_t rows, int64_t n, bool x_bias, const Device& device);

// That of all families for many short rows at odd addresses; false for others. It has the partial sums of an added norm.
constexpr int64_t kLongestOddTile = 128;  // elements
bool norm_backward_odd_tiles(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error);

// That of all families for few rows: for up to kMostFewRows, with partial sums of kMostFewClusters at most.
constexpr int64_t kMostFewRows = 512;
constexpr int kMostFewClusters = 8;
bool norm_backward_few(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream, int& error);

int norm_forward(const NormForward& a, int dtype, int y_dtype, const Device& device, void* stream);
// Those that they take, of x of y's dtype: false for others.
bool norm_forward_held(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                       const RowChoice* requested = nullptr);
bool norm_forward_copied(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                         const RowChoice* requested = nullptr);
bool add_norm_forward_held(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                           const RowChoice* requested = nullptr);
bool add_norm_forward_masked(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                             const RowChoice* requested = nullptr);
bool add_norm_forward_copied(const NormForward& a, int dtype, const Device& device, void* stream, int& error,
                             const RowChoice* requested = nullptr);
// Of an fp32 residual and x of 16 bits; false for rows that it does not take.
bool add_norm_forward_ring(const NormForward& a, int y_dtype, const Device& device, void* stream, int& error);
int add_norm_forward(const NormForward& a, int dtype, int y_dtype, const Device& device, void* stream);

}  // namespace fuseline
