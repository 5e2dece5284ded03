// What the norms' kernels take, the same for all of them: layer norm and RMS norm, of x or of a sum that is made on the
// way (residual + dropout(x + x_bias)). What is normalized is of dtype X; y, and with a residual x, are of dtype Y, which
// is X or 16 bits of an fp32 X.
#pragma once

#include "../plans/norm_backward.h"
#include "../plans/norm_forward.h"
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
  const void* x;         // what was normalized, X; or of it (x - mean) * rstd, Y
  const void* weight;
  const float* mean;  // null for an RMS norm, and where x is normalized
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
  bool centred;       // a layer norm
  bool normalized;    // x is
  bool fp32_weights;
  int cluster;
  int stages;  // rows in the ring of the kernel for long ones
  bool beside;  // the rows of a block, or of a cluster, stand beside each other

  __host__ __device__ bool wants_rows() const { return grad_x || grad_dropped || grad_x_bias; }
};

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

// Calls run(X{}, Y{}) with the types of what is normalized and of y.
template <class Run>
int with_dtypes(int dtype, int y_dtype, Run&& run) {
  if (dtype == y_dtype) return with_dtype(dtype, [&](auto type) { return run(type, type); });
  if (dtype != FUSELINE_FLOAT32) return FUSELINE_UNSUPPORTED;
  return with_dtype(y_dtype, [&](auto type) { return run(float{}, type); });
}

// What a launcher needs besides arguments and plan.
struct NormCall {
  int dtype, y_dtype;  // fuseline_dtype
  const Device& device;
  void* stream;
  NormGrants& grants;
};

// A launcher's answer where the device holds fewer clusters than its plan asks for: nothing ran, and the grants say less now.
constexpr int kPlanAnew = -1000;

// Lets a kernel have the memory and the clusters of its plan. `count`: clusters, or blocks that are alone, that the device
// holds at once.
template <class Arguments>
int grant(void (*kernel)(Arguments), const LaunchShape& shape, const NormCall& call, int& count) {
  if (shape.cluster > kMaxCluster) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  const cudaError_t error =
      resident_clusters(kernel, call.device, shape.threads * shape.beside, shape.shared, shape.cluster, count);
  if (error == cudaSuccess && count > 0) return 0;
  cudaGetLastError();
  if (shape.cluster <= kMaxCluster) return error == cudaSuccess ? int(FUSELINE_UNSUPPORTED) : int(error);
  call.grants.large_clusters = false;
  return kPlanAnew;
}

// Adds up what a backward has left behind, `count` partial sums each, to the first `kinds` of grad_weight, grad_bias and
// grad_x_bias, those that are wanted.
int add_partials(const NormBackward& a, int kinds, int count, const NormCall& call);

// The launchers, one or more for each kernel of a plan; norms.cu picks by the plan alone.
int launch_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);
int launch_add_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);
int launch_masked_norm_held(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);
int launch_norm_fetched(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);
int launch_norm_added(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);
int launch_norm_rows(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);
int launch_norm_streamed(const NormForward& a, const NormForwardPlan& plan, const NormCall& call);

int launch_norm_backward_few(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call);
int launch_layer_norm_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call);
int launch_rms_norm_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call);
int launch_add_norm_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call);
int launch_norm_backward_general(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call);

}  // namespace fuseline
