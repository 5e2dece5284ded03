// A whole decoding step for one row in one launch: the C API, which launches what the plan says (step_kernel.cuh).

#include "step_kernel.cuh"

namespace fuseline {
namespace {

StepArguments arguments_of(const fuseline_step& call, const StepPlan& plan) {
  StepArguments a{};
  const auto bytes = [](const void* at) { return static_cast<const char*>(at); };
  for (int64_t i = 0; i < call.num_layers; ++i) {
    const fuseline_step_layer& from = call.layers[i];
    StepLayer& to = a.layers[i];
    to.weights[kQkv] = bytes(from.qkv_weight), to.weights[kOut] = bytes(from.out_weight);
    to.weights[kUp] = bytes(from.up_weight), to.weights[kDown] = bytes(from.down_weight);
    to.norm_weight = bytes(from.norm_weight), to.norm_bias = bytes(from.norm_bias);
    to.mlp_norm_weight = bytes(from.mlp_norm_weight), to.mlp_norm_bias = bytes(from.mlp_norm_bias);
    to.qkv_bias = bytes(from.qkv_bias), to.out_bias = bytes(from.out_bias);
    to.up_bias = bytes(from.up_bias), to.down_bias = bytes(from.down_bias);
    to.k = static_cast<char*>(from.k), to.v = static_cast<char*>(from.v);
  }
  std::copy_n(plan.products, int(kStepProducts), a.products);
  a.token_table = bytes(call.token_table), a.position_table = bytes(call.position_table);
  a.cos = call.cos, a.sin = call.sin;
  a.norm_weight = bytes(call.norm_weight), a.norm_bias = bytes(call.norm_bias), a.head_weight = bytes(call.head_weight);
  a.length = call.length, a.token = call.token;
  a.logits = static_cast<char*>(call.logits);
  a.head_stride = call.head_stride, a.window = int(call.window);
  a.num_layers = int(call.num_layers), a.embed_dim = int(call.embed_dim), a.ffn_dim = int(call.ffn_dim);
  a.heads = int(call.heads), a.kv_heads = int(call.kv_heads), a.head_dim = int(call.head_dim);
  a.group = a.heads / a.kv_heads, a.layout = plan.layout;
  a.norm = call.norm, a.activation = call.activation;
  a.eps = float(call.eps), a.scale = float(call.scale * 1.4426950408889634);
  place_buffers(a.to, static_cast<char*>(call.workspace), call, plan);
  return a;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int64_t fuseline_decode_step_workspace(const fuseline_step* call) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return -int64_t(error);
  const StepPlan plan = plan_decode_step(*call, device);
  return plan.code != 0 ? plan.code : plan.workspace;
}

int fuseline_decode_step(const fuseline_step* call, void* stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const StepPlan plan = plan_decode_step(*call, device);
  if (plan.code != 0) return plan.code;
  return launch_step(arguments_of(*call, plan), plan, stream);
}

int fuseline_decode_step_explain(const fuseline_step* call, fuseline_attention_plan* plan) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const StepPlan found = plan_decode_step(*call, device);
  const LaunchShape& shape = found.shape;
  *plan = {found.code, found.reason, size_t(found.workspace), found.code == 0};
  if (found.code == 0) plan->launches[0] = {"decode_step", shape.grid, shape.threads, shape.shared};
  return 0;
}
