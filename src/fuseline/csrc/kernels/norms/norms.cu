// The C functions of the norms: they check what can be checked and pick the family's kernels.
#include "norm.cuh"

namespace fuseline {
namespace {

bool keeps_to_vectors(const fuseline_norm& norm) {
  bool all = norm.n % (norm.dtype == FUSELINE_FLOAT32 ? kVector<float> : kVector<__half>) == 0;
  for (const void* tensor : {norm.x, norm.residual, norm.x_bias, norm.weight, norm.bias, static_cast<const void*>(norm.y),
                             static_cast<const void*>(norm.sum)}) {
    all = all && offset_in_vector(tensor) == 0;
  }
  return all;
}

// The table's layout for many rows of one dtype; null where rules lay them out. `adds`: 1 of a sum, 2 with a mask or a bias.
const RowChoice* choice_for_many(const fuseline_norm& norm, int adds, bool backward, const Device& device) {
  const auto rules = backward ? FUSELINE_LAYER_NORM_BACKWARD : FUSELINE_LAYER_NORM_FORWARD;
  if (norm.dtype != norm.y_dtype || !device.clusters || row_overrides[rules].given) return nullptr;
  if (!backward && !keeps_to_vectors(norm)) return nullptr;
  const int size = norm.dtype == FUSELINE_FLOAT32 ? 4 : 2;
  const int kind = norm.kind == FUSELINE_LAYER_NORM ? 0 : 1;
  const auto family = fuseline_family(FUSELINE_MANY_NORMS + 2 * (2 * adds + kind) + (backward ? 1 : 0));
  if (!are_many(norm.rows, norm.rows * norm.n * size, device) && !row_overrides[family].given) return nullptr;
  const RowChoice* const choice = choice_for(family, size, norm.n);
  return choice && choice->kernel != RowKernel::rules ? choice : nullptr;
}

// y has the dtype of what is normalized, or 16 bits where that is fp32; weights have y's dtype or fp32.
bool dtypes_fit(const fuseline_norm& norm, bool weights) {
  if (!known_dtype(norm.dtype) || !known_dtype(norm.y_dtype)) return false;
  if (norm.y_dtype != norm.dtype && norm.dtype != FUSELINE_FLOAT32) return false;
  return !weights || weights_fit(norm.weight_dtype, norm.y_dtype);
}

// The requested layout; false where there is no such kernel. `adds`: as above.
bool forward_as(const RowChoice& requested, const NormForward& a, int adds, int dtype, const Device& device, void* stream,
                int& error) {
  switch (requested.kernel) {
    case RowKernel::held:
    case RowKernel::packed:
      return (adds == 0   ? norm_forward_held
              : adds == 1 ? add_norm_forward_held
                          : add_norm_forward_masked)(a, dtype, device, stream, error, &requested);
    case RowKernel::copied:
    case RowKernel::light:
      return (adds == 0 ? norm_forward_copied : add_norm_forward_copied)(a, dtype, device, stream, error, &requested);
    default:
      return false;
  }
}

NormForward arguments_of(const fuseline_norm& norm) {
  NormForward a{};
  a.x = norm.x, a.residual = norm.residual, a.x_bias = norm.x_bias, a.weight = norm.weight, a.bias = norm.bias;
  a.y = norm.y, a.sum = norm.sum, a.mean = norm.mean, a.rstd = norm.rstd;
  a.rows = norm.rows, a.n = norm.n, a.eps = float(norm.eps);
  a.dropout = dropout_of(norm.seed, norm.dropout);
  a.centred = norm.kind == FUSELINE_LAYER_NORM;
  a.fp32_weights = norm.weight_dtype == FUSELINE_FLOAT32;
  return a;
}

// What a forward adds, as above.
int added_by(const NormForward& a) { return !a.residual ? 0 : a.x_bias || a.dropout.seed ? 2 : 1; }

int forward(const fuseline_norm& norm, void* stream) {
  if (norm.rows < 0 || norm.n < 0) return FUSELINE_BAD_SIZE;
  const bool weights = norm.weight || norm.bias || norm.x_bias;
  if (!dtypes_fit(norm, weights)) return FUSELINE_UNSUPPORTED;
  if (norm.rows == 0 || norm.n == 0) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const NormForward a = arguments_of(norm);
  const auto run = norm.residual ? add_norm_forward : norm_forward;
  int failed = 0;
  const int adds = added_by(a);
  const RowChoice* const choice = choice_for_many(norm, adds, false, device);
  const bool measured = choice && choice->longest == INT64_MAX;  // it is to be
  if (choice && forward_as(*choice, a, adds, norm.dtype, device, stream, failed)) return failed;
  if (measured) return FUSELINE_UNSUPPORTED;
  return run(a, norm.dtype, norm.y_dtype, device, stream);
}

// Whether the backward has more to do than that of a norm alone.
bool adds(const fuseline_norm& norm) {
  return norm.grad_sum || norm.grad_dropped || norm.grad_x_bias || (norm.kind == FUSELINE_RMS_NORM && norm.grad_bias);
}

// That of its sums, and its layout.
int added_sums(const fuseline_norm& norm) {
  return norm.grad_dropped || norm.grad_x_bias ? 2 : norm.grad_sum ? 1 : 0;
}

const RowChoice* choice_of_backward(const fuseline_norm& norm, const Device& device) {
  if (norm.kind == FUSELINE_RMS_NORM && norm.grad_bias) return nullptr;
  return choice_for_many(norm, added_sums(norm), true, device);
}

int backward(const fuseline_norm& norm, void* workspace, void* stream) {
  const bool sums = norm.grad_weight || norm.grad_bias || norm.grad_x_bias;
  if (norm.rows < 0 || norm.n < 0) return FUSELINE_BAD_SIZE;
  if (!dtypes_fit(norm, norm.weight || sums)) return FUSELINE_UNSUPPORTED;
  if (norm.n == 0) return 0;
  if (norm.rows == 0) {
    const size_t bytes = size_t(norm.n) * (norm.weight_dtype == FUSELINE_FLOAT32 ? 4 : 2);
    for (void* gradient : {norm.grad_weight, norm.grad_bias, norm.grad_x_bias}) {
      if (!gradient) continue;
      const cudaError_t error = cudaMemsetAsync(gradient, 0, bytes, static_cast<cudaStream_t>(stream));
      if (error != cudaSuccess) return int(error);
    }
    return 0;
  }
  if (!norm.grad_x && !norm.grad_dropped && !sums) return 0;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  NormBackward a{};
  a.grad_y = norm.grad_y, a.grad_sum = norm.grad_sum, a.x = norm.x, a.weight = norm.weight;
  a.mean = norm.kind == FUSELINE_LAYER_NORM ? norm.mean : nullptr, a.rstd = norm.rstd;
  a.grad_x = norm.grad_x, a.grad_dropped = norm.grad_dropped;
  a.grad_weight = norm.grad_weight, a.grad_bias = norm.grad_bias, a.grad_x_bias = norm.grad_x_bias;
  a.partials = sums ? static_cast<float*>(workspace) : nullptr;
  a.rows = norm.rows, a.n = norm.n, a.columns = columns_of_partials(norm.n);
  a.inverse_n = float(1.0 / double(norm.n));
  a.dropout = dropout_of(norm.seed, norm.dropout);
  a.fp32_weights = norm.weight_dtype == FUSELINE_FLOAT32;
  const bool added = adds(norm), centred = norm.kind == FUSELINE_LAYER_NORM;
  const auto ring = added ? add_norm_backward_ring : centred ? layer_norm_backward_ring : rms_norm_backward_ring;
  const auto run = added ? add_norm_backward : centred ? layer_norm_backward : rms_norm_backward;
  int failed = 0;
  const RowChoice* const choice = choice_of_backward(norm, device);
  const bool measured = choice && choice->longest == INT64_MAX;  // it is to be
  if (choice) {
    if (choice->kernel == RowKernel::held) {
      failed = run(a, norm.dtype, norm.y_dtype, device, stream, choice);
      if (failed != FUSELINE_UNSUPPORTED) return failed;
    } else if (ring(a, norm.dtype, norm.y_dtype, device, stream, failed, choice)) {
      return failed;
    }
    if (measured) return FUSELINE_UNSUPPORTED;
    failed = 0;
  }
  if (norm_backward_few(a, norm.dtype, norm.y_dtype, device, stream, failed)) return failed;
  if (ring(a, norm.dtype, norm.y_dtype, device, stream, failed, nullptr)) return failed;
  failed = run(a, norm.dtype, norm.y_dtype, device, stream, nullptr);
  if (failed != FUSELINE_UNSUPPORTED || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) return failed;
  failed = 0;
  if (norm_backward_odd_tiles(a, norm.dtype, norm.y_dtype, device, stream, failed)) return failed;
  return norm_backward_general(a, norm.dtype, norm.y_dtype, device, stream);
}

// Of the largest partial sums of any kernel that may take the rows: some go by addresses, which are not known here.
size_t workspace_bytes(const fuseline_norm& norm, bool sums) {
  Device device;
  if (norm.rows <= 0 || norm.n <= 0 || !sums || current_device(device) != cudaSuccess) return 0;
  const bool added = adds(norm), centred = norm.kind == FUSELINE_LAYER_NORM;
  const int kinds = added ? kSumsOfAddedNorm : centred ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  const auto blocks_of =
      added ? add_norm_backward_blocks : centred ? layer_norm_backward_blocks : rms_norm_backward_blocks;
  const auto ring_blocks_of = added     ? add_norm_backward_ring_blocks
                              : centred ? layer_norm_backward_ring_blocks
                                        : rms_norm_backward_ring_blocks;
  const int64_t few_blocks = norm.rows <= kMostFewRows ? kMostFewClusters : 0;
  int64_t requested_blocks = 0;
  if (const RowChoice* const choice = choice_of_backward(norm, device)) {
    const int clusters = std::max(choice->cluster, 1), beside = choice->kernel == RowKernel::held && clusters > 1 ? 2 : 1;
    requested_blocks = std::min(norm.rows, divide_up(beside * device.processors, clusters));
  }
  const int64_t blocks = std::max({requested_blocks, blocks_of(norm.rows, norm.n, norm.dtype, norm.y_dtype, device),
                                   ring_blocks_of(norm.rows, norm.n, norm.dtype, norm.y_dtype, device), few_blocks});
  const int64_t odd_tiles = norm.n <= kLongestOddTile ? kSumsOfAddedNorm * std::min<int64_t>(norm.rows, device.processors) : 0;
  const int64_t bytes = std::max(kinds * blocks, odd_tiles) * columns_of_partials(norm.n) * int64_t(sizeof(float));
  return size_t(std::max(bytes, norm_backward_general_bytes(norm.rows, norm.n, norm.grad_x_bias, device)));
}

}  // namespace
}  // namespace fuseline

int fuseline_norm_forward(const fuseline_norm* norm, void* stream) { return fuseline::forward(*norm, stream); }

size_t fuseline_norm_backward_workspace(const fuseline_norm* norm) {
  return fuseline::workspace_bytes(*norm, norm->grad_weight || norm->grad_bias || norm->grad_x_bias);
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
  return fuseline::workspace_bytes(norm, true);
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
