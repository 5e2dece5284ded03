// The C API of the small attention layer: what fits, and which arithmetic it gets.

#include "small_layer.cuh"

namespace fuseline {
namespace {

constexpr int64_t kLongest = 128;
constexpr int64_t kWidestHead = 128;
constexpr int64_t kMostTokens = 1 << 20;

// Sizes that the kernels are written for; shared memory is asked about apart.
int check(const fuseline_small_layer& layer) {
  const int64_t sizes[] = {layer.batch, layer.seqlen, layer.embed_dim, layer.num_heads, layer.head_dim, layer.out_dim};
  for (const int64_t size : sizes) {
    if (size < 0) return FUSELINE_BAD_SIZE;
    if (size == 0) return FUSELINE_UNSUPPORTED;
  }
  if (!known_dtype(layer.dtype) || layer.num_kv_heads <= 0 || layer.num_heads % layer.num_kv_heads != 0) {
    return FUSELINE_UNSUPPORTED;
  }
  const int64_t unit = layer.dtype == FUSELINE_FLOAT32 ? 8 : 16;  // of a head, in one product of a warp
  if (layer.head_dim % unit != 0 || layer.head_dim > kWidestHead || layer.seqlen > kLongest) return FUSELINE_UNSUPPORTED;
  if (layer.embed_dim % 8 != 0 || layer.out_dim % 8 != 0 || layer.batch * layer.seqlen > kMostTokens) {
    return FUSELINE_UNSUPPORTED;
  }
  if (layer.shared_projection &&
      (layer.num_kv_heads != layer.num_heads || layer.embed_dim != layer.num_heads * layer.head_dim)) {
    return FUSELINE_UNSUPPORTED;
  }
  return 0;
}

bool aligned(std::initializer_list<const void*> pointers) {
  for (const void* at : pointers) {
    if (offset_in_vector(at) != 0) return false;
  }
  return true;
}

// Calls run(Math{}) with the arithmetic of the layer.
template <class Run>
int with_math(const fuseline_small_layer& layer, const Run& run) {
  switch (layer.dtype) {
    case FUSELINE_FLOAT32:
      return layer.tf32 ? run(Tf32{}) : run(Exact{});
    case FUSELINE_BFLOAT16:
      return run(Sixteen<__nv_bfloat16>{});
    default:
      return FUSELINE_UNSUPPORTED;  // fp16: no model has small layers of it
  }
}

// The device, if it can run these kernels at all: they meet in clusters.
int find_device(Device& device) {
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  return device.clusters ? 0 : FUSELINE_UNSUPPORTED;
}

int forward(const fuseline_small_layer& layer, bool only_asking, void* stream) {
  Device device;
  if (const int code = check(layer)) return code;
  if (const int code = find_device(device)) return code;
  return with_math(layer, [&](auto math) { return run_forward<decltype(math)>(layer, device, only_asking, stream); });
}

int backward(const fuseline_small_layer& layer, const fuseline_small_layer_gradients* gradients, bool only_asking,
             void* stream) {
  Device device;
  if (const int code = check(layer)) return code;
  if (const int code = find_device(device)) return code;
  return with_math(layer, [&](auto math) {
    return run_backward<decltype(math)>(layer, gradients, device, only_asking, stream);
  });
}

}  // namespace
}  // namespace fuseline

int fuseline_small_layer_fits(const fuseline_small_layer* layer, int backward) {
  if (fuseline::forward(*layer, true, nullptr) != 0) return 0;
  return !backward || fuseline::backward(*layer, nullptr, true, nullptr) == 0;
}

int fuseline_small_layer_forward(const fuseline_small_layer* layer, void* stream) {
  const auto& a = *layer;
  if (a.batch == 0 || a.seqlen == 0) return 0;
  if (!fuseline::aligned({a.x, a.qkv_weight, a.out_weight, a.qkv, a.attended, a.out})) return FUSELINE_UNSUPPORTED;
  return fuseline::forward(a, false, stream);
}

int fuseline_small_layer_backward(const fuseline_small_layer* layer, const fuseline_small_layer_gradients* gradients,
                                  void* stream) {
  const auto& a = *layer;
  const auto& g = *gradients;
  if (!fuseline::aligned({a.x, a.qkv_weight, a.out_weight, a.qkv, a.attended, g.grad_out, g.grad_qkv, g.grad_kv,
                          g.grad_x, g.grad_qkv_weight, g.grad_out_weight})) {
    return FUSELINE_UNSUPPORTED;
  }
  return fuseline::backward(a, gradients, false, stream);
}

int fuseline_is_captured(void* stream) { return fuseline::is_being_captured(stream); }
