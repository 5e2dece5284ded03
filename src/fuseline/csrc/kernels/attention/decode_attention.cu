// Attention of one new token a row over a cache, with what comes before it: norm and rotary turn of its queries and key,
// and the write of key and value. See fuseline_decode.h.

#include "decode_attention.cuh"

namespace fuseline {
namespace {

template <class T, bool kByte, int D, int G>
int launch_step(const DecodeArguments& a, const DecodeAttentionPlan& plan, const Device& device, const fuseline_decode& call,
                void* stream) {
  const int cluster = plan.shape.cluster;
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (call.overlap && device.clusters) attributes[count++] = overlapping();
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = unsigned(cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.splits), unsigned(call.kv_heads * plan.parts), unsigned(call.batch));
  config.blockDim = dim3(unsigned(plan.shape.threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  const cudaError_t launched = cudaLaunchKernelEx(&config, decode_attention<T, kByte, D, G>, a);
  const cudaError_t after = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : after);
}

template <class T, bool kByte>
int launch_step(const DecodeArguments& a, const DecodeAttentionPlan& plan, const Device& device, const fuseline_decode& call,
                void* stream) {
  if (call.head_dim == 64) {
    return plan.heads_a_block == 1 ? launch_step<T, kByte, 64, 1>(a, plan, device, call, stream)
                                   : launch_step<T, kByte, 64, 4>(a, plan, device, call, stream);
  }
  return plan.heads_a_block == 1 ? launch_step<T, kByte, 128, 1>(a, plan, device, call, stream)
                                 : launch_step<T, kByte, 128, 4>(a, plan, device, call, stream);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int64_t fuseline_decode_attention_partials(const fuseline_decode* call) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return -int(error);
  const DecodeAttentionPlan plan = plan_decode_attention(*call, device);
  return plan.code != 0 ? plan.code : plan.partials;
}

int fuseline_decode_attention(const fuseline_decode* call, void* stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const DecodeAttentionPlan plan = plan_decode_attention(*call, device);
  if (plan.code != 0) return plan.code;
  if (call->batch == 0) return 0;
  DecodeArguments a{};
  a.qkv = static_cast<const char*>(call->qkv), a.y = static_cast<char*>(call->y);
  a.k = static_cast<char*>(call->k), a.v = static_cast<char*>(call->v);
  a.k_scales = call->k_scales, a.v_scales = call->v_scales, a.lengths = call->lengths;
  a.cos = call->cos, a.sin = call->sin;
  a.q_norm = static_cast<const char*>(call->q_norm), a.k_norm = static_cast<const char*>(call->k_norm);
  a.partials = call->partials, a.arrivals = call->arrivals;
  a.qkv_stride = call->qkv_stride, a.batch_stride = call->batch_stride, a.head_stride = call->head_stride;
  a.scale_batch_stride = call->scale_batch_stride, a.scale_head_stride = call->scale_head_stride;
  a.heads = int(call->heads), a.kv_heads = int(call->kv_heads), a.group = int(call->heads / call->kv_heads);
  a.parts = plan.parts, a.splits = plan.splits, a.clustered = plan.shape.cluster > 1, a.window = int(call->window);
  a.eps = float(call->eps), a.scale = float(call->scale * 1.4426950408889634);
  a.fp8 = call->cache == FUSELINE_CACHE_FP8;
  if (call->cache == FUSELINE_CACHE_SAME) {
    return with_dtype(call->dtype, [&](auto element) -> int {
      return launch_step<decltype(element), false>(a, plan, device, *call, stream);
    });
  }
  if (call->dtype == FUSELINE_FLOAT16) return launch_step<__half, true>(a, plan, device, *call, stream);
  return launch_step<__nv_bfloat16, true>(a, plan, device, *call, stream);
}
