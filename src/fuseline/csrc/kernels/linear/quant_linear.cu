// The C API of linear layers for few rows: what it refuses, and the launch of what the plan says.

#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include "linear_arguments.h"
#include "linear_kernels.h"

namespace fuseline {
namespace {

LinearProblem problem_of(const LinearArguments& a, const fuseline_linear& call) {
  LinearProblem p{call.format, call.dtype == FUSELINE_BFLOAT16, a.m, a.n, a.k};
  p.group_shift = a.group_shift, p.zeros = a.zeros != nullptr, p.x_vectors = a.x_vectors;
  p.weight_vectors = !p.plain() || (call.k % 8 == 0 && call.weight_stride % 8 == 0 && offset_in_vector(call.weight) == 0);
  p.norm = a.norm != FUSELINE_NORM_NONE, p.activation = a.activation != FUSELINE_ACTIVATION_NONE;
  p.swiglu = a.halves > 0, p.residual = a.residual != nullptr;
  p.next_weight = a.next_weight != nullptr, p.workspace = a.workspace != nullptr;
  p.requested = call.kernel, p.requested_splits = call.splits;
  return p;
}

LinearFunction kernel_of(const LinearPlan& plan, const LinearProblem& p) {
  switch (plan.kernel) {
    case LinearKernel::gemv:
    case LinearKernel::gemv_team:
      return gemv_kernel_of(plan, p.bf16);
    case LinearKernel::gemv_quantized:
      return gemv_quantized_kernel_of(plan, p.format);
    case LinearKernel::stream:
      return p.plain() ? stream_16_kernel_of(plan, p.bf16)
             : p.int4() ? stream_int4_kernel_of(plan, p.bf16)
                        : stream_int8_kernel_of(plan, p.bf16);
    case LinearKernel::slices:
      return slices_kernel_of(plan, p.format);
    default:
      return p.int4() ? tiles_int4_kernel_of(plan) : tiles_int8_kernel_of(plan);
  }
}

// Asks the device, within what launch bounds promise: plans count on no more.
struct Residents {
  const LinearProblem& problem;
  const Device& device;

  int operator()(const LinearPlan& plan) const {
    const int count = plan.kernel == LinearKernel::few_weights ? residents_65_to_256(plan, problem.format, device)
                                                               : resident_of(kernel_of(plan, problem), plan, device);
    return std::min(count, linear_plans::bounded_blocks(plan, problem, device) * device.processors / plan.shape.cluster);
  }
};

// 64 bits that stand nowhere else: a count, mixed with where and when this library was loaded (splitmix64).
uint64_t new_token() {
  static std::atomic<uint64_t> count{uint64_t(std::chrono::system_clock::now().time_since_epoch().count()) ^
                                     reinterpret_cast<uintptr_t>(&count)};
  uint64_t z = count += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// Nearly all memory of a multiprocessor is to be shared memory, so that as many blocks fit as the plan says.
int prefer_shared(LinearFunction kernel, const Device& device) {
  static thread_local std::set<std::pair<LinearFunction, int>> asked;
  if (asked.count({kernel, device.index})) return 0;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) asked.insert({kernel, device.index});
  return int(error);
}

void take_work(LinearArguments& a, const LinearPlan& plan, const Device& device) {
  a.splits = plan.splits, a.units = plan.units, a.base = plan.base, a.extra = plan.extra;
  a.steps = plan.steps, a.steps_a_split = plan.steps_a_split, a.groups_a_slice = plan.groups_a_slice;
  a.x_bytes = int(plan.x_bytes), a.scale_bytes = int(plan.scale_bytes), a.prefetched = plan.prefetched;
  a.ordered = plan.ordered;
  a.y_pairs = a.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % 4 == 0;
  if (plan.kernel == LinearKernel::tiles && plan.splits == 1) {
    a.flags = reinterpret_cast<uint64_t*>(a.workspace + tiled_x_bytes(a.m, a.k));
    a.token = new_token();
    a.partials = reinterpret_cast<char*>(a.flags) + tiled_flag_bytes(device.processors);
  }
}

int launch_plan(LinearArguments a, const LinearPlan& plan, const LinearProblem& p, const Device& device, void* stream) {
  take_work(a, plan, device);
  if (plan.kernel == LinearKernel::few_weights) return launch_65_to_256(a, plan, p.format, device, stream);
  const LinearFunction kernel = kernel_of(plan, p);
  if (plan.shape.shared > 0 && resident_of(kernel, plan, device) == 0) return FUSELINE_UNSUPPORTED;
  const bool two = plan.kernel == LinearKernel::tiles && tiles_sizes(p.format, plan.x_rows, plan.any_groups).blocks == 2;
  if (two || plan.kernel == LinearKernel::slices) {
    const int error = prefer_shared(kernel, device);
    if (error != 0) return error;
  }
  if (plan.ordered) {
    const int error = launch_order_x(a, plan.x_rows, stream);
    if (error != 0) return error;
    a.overlap = true;  // that launch lets this one start when its weights stand
  }
  return launch(kernel, a, plan.shape, device, stream);
}

// Rows of x beyond those of a launch follow in others.
int run(const LinearArguments& a, const LinearProblem& whole, const Device& device, void* stream) {
  LinearProblem p = whole;
  for (int first = 0; first < a.m;) {
    const LinearPlan plan = plan_linear(p, device, Residents{p, device});
    if (plan.kernel == LinearKernel::unsupported) return FUSELINE_UNSUPPORTED;
    LinearArguments some = a;
    const int rows = plan.rows_at_once > 0 ? plan.rows_at_once : int(p.m);
    some.m = rows;
    some.x = a.x + first * a.x_stride;
    const int64_t written = int64_t(first) * (a.halves ? a.n / 2 : a.n) * 2;
    some.y = a.y + written;
    if (a.residual) some.residual = a.residual + written;
    const int answer = launch_plan(some, plan, p, device, stream);
    if (answer != 0) return answer;
    first += rows;
    if (rows < p.m) p.requested = FUSELINE_LINEAR_STREAM;  // alone takes some rows at once
    p.m = std::min<int64_t>(rows, a.m - first);
  }
  return 0;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_quant_linear(const fuseline_linear* call, void* stream) {
  LinearArguments a{};
  const int refused = read_arguments(*call, a);
  if (refused) return refused;
  if (call->dtype != FUSELINE_FLOAT16 && call->dtype != FUSELINE_BFLOAT16) return FUSELINE_UNSUPPORTED;
  if (call->m == 0 || call->n == 0) return 0;
  a.x_vectors = call->k % 8 == 0 && call->x_stride % 8 == 0 && offset_in_vector(call->x) == 0;
  a.overlap = call->overlap;
  a.workspace = static_cast<char*>(call->workspace);
  a.norm = call->norm, a.eps = float(call->eps);
  a.norm_weight = static_cast<const char*>(call->norm_weight), a.norm_bias = static_cast<const char*>(call->norm_bias);
  a.activation = call->activation, a.residual = static_cast<const char*>(call->residual);
  if (a.norm && (!a.norm_weight || !a.x_vectors || offset_in_vector(a.norm_weight) || offset_in_vector(a.norm_bias))) {
    return FUSELINE_UNSUPPORTED;
  }
  if (a.activation == FUSELINE_ACTIVATION_SWIGLU) {
    if (call->n % (2 * kTileRows)) return FUSELINE_UNSUPPORTED;
    a.halves = a.tiles / 2;
  }
  if (call->next_weight && offset_in_vector(call->next_weight) == 0) {
    a.next_weight = static_cast<const char*>(call->next_weight);
    a.next_pieces = int(std::min<int64_t>(call->next_bytes / kPieceBytes, 1 << 30));
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return run(a, problem_of(a, *call), device, stream);
}

int64_t fuseline_quant_linear_workspace(int format, int64_t m, int64_t k) {
  Device device;
  if (format == FUSELINE_WEIGHT_16 || current_device(device) != cudaSuccess) return 0;
  return tiled_bytes(m, k, device.processors);
}

uint64_t fuseline_capture_id(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();  // the stream that others being captured exclude: nothing is known of it
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

