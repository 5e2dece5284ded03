// The C functions of the norms: they check what can be checked, ask the plan, and launch what it says.
#include "norm.cuh"

#include <initializer_list>

namespace fuseline {
namespace {

// y has the dtype of what is normalized, or 16 bits where that is fp32; weights have y's dtype or fp32.
bool dtypes_fit(const fuseline_norm& norm, bool weights) {
  if (!known_dtype(norm.dtype) || !known_dtype(norm.y_dtype)) return false;
  if (norm.y_dtype != norm.dtype && norm.dtype != FUSELINE_FLOAT32) return false;
  return !weights || weights_fit(norm.weight_dtype, norm.y_dtype);
}

int bytes_of(int dtype) { return dtype == FUSELINE_FLOAT32 ? 4 : 2; }

bool are_aligned(std::initializer_list<const void*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const void* tensor) { return offset_in_vector(tensor) == 0; });
}

// ---- forward ----

NormForward arguments_of_forward(const fuseline_norm& norm) {
  NormForward a{};
  a.x = norm.x, a.residual = norm.residual, a.x_bias = norm.x_bias, a.weight = norm.weight, a.bias = norm.bias;
  a.y = norm.y, a.sum = norm.sum, a.mean = norm.mean, a.rstd = norm.rstd;
  a.rows = norm.rows, a.n = norm.n, a.eps = float(norm.eps);
  a.dropout = dropout_of(norm.seed, norm.dropout);
  a.centred = norm.kind == FUSELINE_LAYER_NORM;
  a.fp32_weights = norm.weight_dtype == FUSELINE_FLOAT32;
  return a;
}

NormForwardProblem problem_of(const NormForward& a, int dtype, int y_dtype) {
  NormForwardProblem p{};
  p.x_size = bytes_of(dtype), p.y_size = bytes_of(y_dtype), p.fp16 = y_dtype == FUSELINE_FLOAT16;
  p.rows = a.rows, p.n = a.n, p.centred = a.centred;
  p.drops = a.dropout.seed;
  p.of = !a.residual ? NormOf::x : a.x_bias || p.drops ? NormOf::masked_sum : NormOf::sum;
  p.fp32_weights = p.y_size == 2 && a.fp32_weights && (a.weight || a.bias);
  p.rows_aligned = are_aligned({a.x, a.residual, a.y, a.sum});
  p.weights_aligned = are_aligned({a.weight, a.bias, a.x_bias});
  return p;
}

int launch_forward(const NormForward& a, const NormForwardPlan& plan, const NormCall& call) {
  switch (plan.kernel) {
    case NormForwardKernel::held:
    case NormForwardKernel::packed:
    case NormForwardKernel::few:
      return (!a.residual                     ? launch_norm_held
              : a.x_bias || a.dropout.seed ? launch_masked_norm_held
                                              : launch_add_norm_held)(a, plan, call);
    case NormForwardKernel::fetched:
      return launch_norm_fetched(a, plan, call);
    case NormForwardKernel::added:
      return launch_norm_added(a, plan, call);
    case NormForwardKernel::rows:
    case NormForwardKernel::waiting:
      return launch_norm_rows(a, plan, call);
    case NormForwardKernel::streamed:
      return launch_norm_streamed(a, plan, call);
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

int forward(const fuseline_norm& norm, void* stream) {
  if (norm.rows < 0 || norm.n < 0) return FUSELINE_BAD_SIZE;
  if (!dtypes_fit(norm, norm.weight || norm.bias || norm.x_bias)) return FUSELINE_UNSUPPORTED;
  if (norm.rows == 0 || norm.n == 0) return 0;
  Device device;
  const cudaError_t failed = current_device(device);
  if (failed != cudaSuccess) return int(failed);
  const NormForward a = arguments_of_forward(norm);
  const NormForwardProblem problem = problem_of(a, norm.dtype, norm.y_dtype);
  NormGrants grants;
  int error = kPlanAnew;
  while (error == kPlanAnew) {
    const NormForwardPlan plan = plan_norm_forward(problem, device, grants);
    error = launch_forward(a, plan, {norm.dtype, norm.y_dtype, device, stream, grants});
  }
  return error;
}

// ---- backward ----

NormBackward arguments_of_backward(const fuseline_norm& norm) {
  NormBackward a{};
  a.grad_y = norm.grad_y, a.grad_sum = norm.grad_sum, a.x = norm.x, a.weight = norm.weight;
  a.centred = norm.kind == FUSELINE_LAYER_NORM, a.normalized = norm.normalized;
  a.mean = a.centred && !a.normalized ? norm.mean : nullptr, a.rstd = norm.rstd;
  a.grad_x = norm.grad_x, a.grad_dropped = norm.grad_dropped;
  a.grad_weight = norm.grad_weight, a.grad_bias = norm.grad_bias, a.grad_x_bias = norm.grad_x_bias;
  a.rows = norm.rows, a.n = norm.n, a.columns = norm_backward_plans::columns_of_partials(norm.n);
  a.inverse_n = float(1.0 / double(norm.n));
  a.dropout = dropout_of(norm.seed, norm.dropout);
  a.fp32_weights = norm.weight_dtype == FUSELINE_FLOAT32;
  return a;
}

NormBackwardProblem problem_of(const fuseline_norm& norm) {
  NormBackwardProblem p{};
  p.x_size = bytes_of(norm.dtype), p.y_size = bytes_of(norm.y_dtype), p.fp16 = norm.y_dtype == FUSELINE_FLOAT16;
  p.rows = norm.rows, p.n = norm.n, p.centred = norm.kind == FUSELINE_LAYER_NORM;
  p.drops = norm.seed && norm.dropout > 0, p.normalized = norm.normalized;
  p.weighted = norm.weight, p.fp32_weights = norm.weight_dtype == FUSELINE_FLOAT32;
  p.rows_aligned = are_aligned({norm.grad_y, norm.grad_sum, norm.x, norm.grad_x, norm.grad_dropped});
  p.weight_aligned = are_aligned({norm.weight});
  p.grad_sum = norm.grad_sum, p.grad_x = norm.grad_x, p.grad_dropped = norm.grad_dropped;
  p.grad_weight = norm.grad_weight, p.grad_bias = norm.grad_bias, p.grad_x_bias = norm.grad_x_bias;
  for (const void* const result : {norm.grad_x, norm.grad_dropped}) {
    p.over_inputs = p.over_inputs || (result && (result == norm.x || result == norm.grad_y));
  }
  return p;
}

int launch_backward(const NormBackward& a, const NormBackwardPlan& plan, const NormCall& call) {
  switch (plan.kernel) {
    case NormBackwardKernel::apart:
    case NormBackwardKernel::few:
      return launch_norm_backward_few(a, plan, call);
    case NormBackwardKernel::tiled:
    case NormBackwardKernel::ring:
    case NormBackwardKernel::held:
      return (plan.sums == kSumsOfAddedNorm   ? launch_add_norm_backward
              : plan.sums == kSumsOfLayerNorm ? launch_layer_norm_backward
                                              : launch_rms_norm_backward)(a, plan, call);
    case NormBackwardKernel::general:
      return launch_norm_backward_general(a, plan, call);
    default:
      return FUSELINE_UNSUPPORTED;
  }
}

// Sums over no rows.
int write_zeros(const fuseline_norm& norm, void* stream) {
  for (void* gradient : {norm.grad_weight, norm.grad_bias, norm.grad_x_bias}) {
    if (!gradient) continue;
    const size_t bytes = size_t(norm.n) * bytes_of(norm.weight_dtype);
    const cudaError_t error = cudaMemsetAsync(gradient, 0, bytes, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return int(error);
  }
  return 0;
}

int backward(const fuseline_norm& norm, void* workspace, void* stream) {
  if (norm.rows < 0 || norm.n < 0) return FUSELINE_BAD_SIZE;
  const NormBackwardProblem problem = problem_of(norm);
  if (!dtypes_fit(norm, norm.weight || problem.wants_sums())) return FUSELINE_UNSUPPORTED;
  if (norm.normalized && norm.dtype == norm.y_dtype) return FUSELINE_UNSUPPORTED;
  if (norm.n == 0) return 0;
  if (norm.rows == 0) return write_zeros(norm, stream);
  if (!norm.grad_x && !norm.grad_dropped && !problem.wants_sums()) return 0;
  Device device;
  const cudaError_t failed = current_device(device);
  if (failed != cudaSuccess) return int(failed);
  NormBackward a = arguments_of_backward(norm);
  a.partials = problem.wants_sums() ? static_cast<float*>(workspace) : nullptr;
  NormGrants grants;
  int error = kPlanAnew;
  while (error == kPlanAnew) {
    const NormBackwardPlan plan = plan_norm_backward(problem, device, grants);
    error = launch_backward(a, plan, {norm.dtype, norm.y_dtype, device, stream, grants});
  }
  return error;
}

size_t workspace_bytes(const NormBackwardProblem& problem) {
  Device device;
  if (problem.rows <= 0 || problem.n <= 0 || !problem.wants_sums() || current_device(device) != cudaSuccess) return 0;
  return norm_backward_workspace(problem, device);
}

}  // namespace
}  // namespace fuseline

int fuseline_norm_forward(const fuseline_norm* norm, void* stream) { return fuseline::forward(*norm, stream); }

size_t fuseline_norm_backward_workspace(const fuseline_norm* norm) {
  return fuseline::workspace_bytes(fuseline::problem_of(*norm));
}

int fuseline_norm_backward(const fuseline_norm* norm, void* workspace, void* stream) {
  return fuseline::backward(*norm, workspace, stream);
}

int fuseline_layer_norm_forward(const void* x, const void* weight, const void* bias, void* y, float* mean, float* rstd,
                                int64_t rows, int64_t n, double eps, int dtype, int weight_dtype, void* stream) {
  fuseline_norm norm{};
  norm.kind = FUSELINE_LAYER_NORM, norm.rows = rows, norm.n = n, norm.eps = eps;
  norm.dtype = norm.y_dtype = dtype, norm.weight_dtype = weight_dtype;
  norm.x = x, norm.weight = weight, norm.bias = bias, norm.y = y, norm.mean = mean, norm.rstd = rstd;
  return fuseline::forward(norm, stream);
}

size_t fuseline_layer_norm_backward_workspace(int64_t rows, int64_t n, int dtype) {
  fuseline_norm norm{};
  norm.kind = FUSELINE_LAYER_NORM, norm.rows = rows, norm.n = n, norm.dtype = norm.y_dtype = dtype;
  fuseline::NormBackwardProblem problem = fuseline::problem_of(norm);
  problem.weighted = problem.grad_weight = problem.grad_bias = true;
  size_t bytes = 0;
  for (const bool aligned : {true, false}) {
    for (const bool fp32_weights : {true, false}) {
      for (const bool over_inputs : {true, false}) {  // of whose addresses nothing is known here
        problem.rows_aligned = aligned, problem.fp32_weights = fp32_weights, problem.over_inputs = over_inputs;
        bytes = std::max(bytes, fuseline::workspace_bytes(problem));
      }
    }
  }
  return bytes;
}

int fuseline_layer_norm_backward(const void* grad_out, const void* x, const void* weight, const float* mean,
                                 const float* rstd, void* grad_x, void* grad_weight, void* grad_bias, void* workspace,
                                 int64_t rows, int64_t n, int dtype, int weight_dtype, void* stream) {
  fuseline_norm norm{};
  norm.kind = FUSELINE_LAYER_NORM, norm.rows = rows, norm.n = n;
  norm.dtype = norm.y_dtype = dtype, norm.weight_dtype = weight_dtype;
  norm.grad_y = grad_out, norm.x = x, norm.weight = weight;
  norm.mean = const_cast<float*>(mean), norm.rstd = const_cast<float*>(rstd);
  norm.grad_x = grad_x, norm.grad_weight = grad_weight, norm.grad_bias = grad_bias;
  return fuseline::backward(norm, workspace, stream);
}
