// A whole decoding step for one row in one launch: the C API, and what it refuses. The kernel is step/step_kernel.cuh.

#include "step_plan.cuh"
#include "device/vector.cuh"

namespace fuseline {

template <class T>
int run_step(StepArguments& a, const Device& device, void* stream);  // decode_step_bfloat16.cu, decode_step_float16.cu

namespace {

bool in_steps(const void* at) { return offset_in_vector(at) == 0; }

// 0, or why the call cannot be.
int read_step(const fuseline_step& call, StepArguments& a) {
  const int64_t sizes[] = {call.num_layers, call.embed_dim, call.heads, call.kv_heads, call.head_dim, call.ffn_dim,
                           call.vocab_size};
  for (const int64_t size : sizes) {
    if (size < 0) return FUSELINE_BAD_SIZE;
    if (size == 0 || size > 0xffffff) return FUSELINE_UNSUPPORTED;
  }
  if (call.dtype != FUSELINE_FLOAT16 && call.dtype != FUSELINE_BFLOAT16) return FUSELINE_UNSUPPORTED;
  if (call.num_layers > FUSELINE_STEP_LAYERS || call.heads % call.kv_heads) return FUSELINE_UNSUPPORTED;
  if (call.head_dim != 64 && call.head_dim != 128) return FUSELINE_UNSUPPORTED;
  const int64_t widest = std::max({2 * call.ffn_dim, call.vocab_size, (call.heads + 2 * call.kv_heads) * call.head_dim});
  if (widest * std::max(call.embed_dim, call.ffn_dim) >= int64_t(1) << 31) return FUSELINE_UNSUPPORTED;  // offsets of 32 bits
  if (call.embed_dim % 8 || call.ffn_dim % 8 || call.head_stride % 8) return FUSELINE_UNSUPPORTED;
  if (call.norm != FUSELINE_NORM_RMS && call.norm != FUSELINE_NORM_LAYER) return FUSELINE_UNSUPPORTED;
  if (call.activation < FUSELINE_ACTIVATION_GELU || call.activation > FUSELINE_ACTIVATION_SWIGLU) return FUSELINE_UNSUPPORTED;
  const auto bytes = [](const void* at) { return static_cast<const char*>(at); };
  bool aligned = in_steps(call.head_weight) && in_steps(call.workspace);
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
    for (const char* const weight : to.weights) aligned = aligned && in_steps(weight);
    aligned = aligned && in_steps(to.k) && in_steps(to.v);
  }
  if (!aligned) return FUSELINE_UNSUPPORTED;
  const bool swiglu = call.activation == FUSELINE_ACTIVATION_SWIGLU;
  const int width = int(call.embed_dim), gathered = int(call.heads * call.head_dim), inner = int(call.ffn_dim);
  a.products[kQkv] = {int((call.heads + 2 * call.kv_heads) * call.head_dim), width, 1, 0, 0};
  a.products[kOut] = {width, gathered, 1, 0, 0};
  a.products[kUp] = {inner, width, swiglu ? 2 : 1, 0, 0};
  a.products[kDown] = {width, inner, 1, 0, 0};
  a.products[kHead] = {int(call.vocab_size), width, 1, 0, 0};
  a.token_table = bytes(call.token_table), a.position_table = bytes(call.position_table);
  a.cos = call.cos, a.sin = call.sin;
  a.norm_weight = bytes(call.norm_weight), a.norm_bias = bytes(call.norm_bias), a.head_weight = bytes(call.head_weight);
  a.length = call.length, a.token = call.token;
  a.logits = static_cast<char*>(call.logits);
  a.head_stride = call.head_stride, a.window = int(call.window);
  a.num_layers = int(call.num_layers), a.embed_dim = width, a.ffn_dim = inner;
  a.heads = int(call.heads), a.kv_heads = int(call.kv_heads), a.head_dim = int(call.head_dim);
  a.group = a.heads / a.kv_heads;
  a.norm = call.norm, a.activation = call.activation;
  a.eps = float(call.eps), a.scale = float(call.scale * 1.4426950408889634);
  a.place(static_cast<char*>(call.workspace));
  return 0;
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int64_t fuseline_decode_step_workspace(const fuseline_step* call) {
  StepArguments a{};
  const int refused = read_step(*call, a);
  if (refused) return refused;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return -int64_t(error);
  const auto nothing = [](auto) { return 0; };
  const int answer = call->dtype == FUSELINE_FLOAT16 ? with_shape<__half>(a, device, nothing)
                                                     : with_shape<__nv_bfloat16>(a, device, nothing);
  return answer ? answer : a.place(nullptr);
}

int fuseline_decode_step(const fuseline_step* call, void* stream) {
  StepArguments a{};
  const int refused = read_step(*call, a);
  if (refused) return refused;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return call->dtype == FUSELINE_FLOAT16 ? run_step<__half>(a, device, stream) : run_step<__nv_bfloat16>(a, device, stream);
}
