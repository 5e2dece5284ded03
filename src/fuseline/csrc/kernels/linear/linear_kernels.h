// The kernel of a linear layer's plan (plans/linear.h): one function for each source of kernels.
#pragma once

#include "linear_call.cuh"
#include "plans/linear.h"

namespace fuseline {

using LinearFunction = void (*)(LinearArguments);

LinearFunction gemv_kernel_of(const LinearPlan& plan, bool bf16);
LinearFunction gemv_quantized_kernel_of(const LinearPlan& plan, int format);
LinearFunction stream_16_kernel_of(const LinearPlan& plan, bool bf16);
LinearFunction stream_int8_kernel_of(const LinearPlan& plan, bool bf16);
LinearFunction stream_int4_kernel_of(const LinearPlan& plan, bool bf16);
LinearFunction slices_kernel_of(const LinearPlan& plan, int format);
LinearFunction tiles_int8_kernel_of(const LinearPlan& plan);
LinearFunction tiles_int4_kernel_of(const LinearPlan& plan);

// Its arguments have tensor maps, too.
int residents_65_to_256(const LinearPlan& plan, int format, const Device& device);
int launch_65_to_256(const LinearArguments& a, const LinearPlan& plan, int format, const Device& device, void* stream);

int launch_order_x(const LinearArguments& a, int rows, void* stream);  // linear_tiles_order.cu

// Clusters of a plan's kernel that the device holds at once, none where it has no machine code for it. The kernel may have the
// plan's shared memory from then on.
template <class Arguments>
int resident_of(void (*kernel)(Arguments), const LinearPlan& plan, const Device& device) {
  int count = 0;
  const cudaError_t error = resident_clusters(kernel, device, plan.shape.threads, plan.shape.shared, plan.shape.cluster, count);
  if (error == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace fuseline
