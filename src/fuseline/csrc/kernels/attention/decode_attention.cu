// Attention of one new token a row over a cache, with what comes before it: norm and rotary turn of its queries and key,
// and the write of key and value. See fuseline_decode.h.

#include "decode_attention.cuh"

namespace fuseline {
namespace {

struct Layout {
  int heads_a_block, parts, splits;
  bool clustered;
};

// FUSELINE_UNSUPPORTED or how the work is spread.
int lay_out(const fuseline_decode& call, Layout& layout) {
  if (call.batch < 0 || call.heads < 1 || call.kv_heads < 1 || call.count < 1) return FUSELINE_BAD_SIZE;
  if (call.head_dim != 64 && call.head_dim != 128) return FUSELINE_UNSUPPORTED;
  if (call.heads % call.kv_heads || !known_dtype(call.dtype)) return FUSELINE_UNSUPPORTED;
  if (call.cache < FUSELINE_CACHE_SAME || call.cache > FUSELINE_CACHE_FP8) return FUSELINE_UNSUPPORTED;
  if (call.cache != FUSELINE_CACHE_SAME && call.dtype == FUSELINE_FLOAT32) return FUSELINE_UNSUPPORTED;
  const int64_t size = call.cache != FUSELINE_CACHE_SAME ? 8 : call.dtype == FUSELINE_FLOAT32 ? 4 : 8;
  if (call.batch_stride % size || call.head_stride % size || offset_in_vector(call.k) || offset_in_vector(call.v)) {
    return FUSELINE_UNSUPPORTED;
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  const int64_t group = call.heads / call.kv_heads;
  layout.heads_a_block = group == 1 ? 1 : 4;
  layout.parts = int(divide_up(group, layout.heads_a_block));
  const int64_t blocks = call.batch * call.kv_heads * layout.parts;
  if (call.batch > 0xffff || call.kv_heads * layout.parts > 0xffff) return FUSELINE_UNSUPPORTED;
  const int64_t wanted = blocks ? divide_up(2 * device.processors, blocks) : 1;
  const int64_t most = std::min<int64_t>(divide_up(call.count, kLeastKeys), kMostBlocks);
  layout.splits = int(std::max<int64_t>(1, std::min(wanted, most)));
  // A cluster meets in a third of the time that counting in memory takes, and twice as many blocks do not make up for it.
  // Of long contexts they do: 5 blocks for each of 64 heads took 71 us for 4,000 positions, clusters of 4 80 us.
  const int together = layout.splits >= kClustered ? kClustered : layout.splits > 2 ? 4 : 2;
  layout.clustered = device.clusters && layout.splits > 1 && layout.splits <= 2 * kClustered &&
                     (call.count <= kShortContext || 8 * together >= 7 * layout.splits);
  if (layout.clustered) layout.splits = together;
  return 0;
}

template <class T, bool kByte, int D, int G>
int launch_step(const DecodeArguments& a, const Layout& layout, const fuseline_decode& call, void* stream) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (call.overlap && device.clusters) attributes[count++] = overlapping();
  if (layout.clustered) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = unsigned(layout.splits);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(layout.splits), unsigned(call.kv_heads * layout.parts), unsigned(call.batch));
  config.blockDim = dim3(kDecodeThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  const cudaError_t launched = cudaLaunchKernelEx(&config, decode_attention<T, kByte, D, G>, a);
  const cudaError_t after = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : after);
}

template <class T, bool kByte>
int launch_step(const DecodeArguments& a, const Layout& layout, const fuseline_decode& call, void* stream) {
  if (call.head_dim == 64) {
    return layout.heads_a_block == 1 ? launch_step<T, kByte, 64, 1>(a, layout, call, stream)
                                     : launch_step<T, kByte, 64, 4>(a, layout, call, stream);
  }
  return layout.heads_a_block == 1 ? launch_step<T, kByte, 128, 1>(a, layout, call, stream)
                                   : launch_step<T, kByte, 128, 4>(a, layout, call, stream);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int64_t fuseline_decode_attention_partials(const fuseline_decode* call) {
  Layout layout{};
  const int refused = lay_out(*call, layout);
  if (refused) return refused < 0 ? refused : -refused;
  if (layout.splits == 1 || layout.clustered) return 0;
  return call->batch * call->kv_heads * layout.parts * layout.splits * layout.heads_a_block * (call->head_dim + 2);
}

int fuseline_decode_attention(const fuseline_decode* call, void* stream) {
  Layout layout{};
  const int refused = lay_out(*call, layout);
  if (refused) return refused;
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
  a.parts = layout.parts, a.splits = layout.splits, a.clustered = layout.clustered, a.window = int(call->window);
  a.eps = float(call->eps), a.scale = float(call->scale * 1.4426950408889634);
  a.fp8 = call->cache == FUSELINE_CACHE_FP8;
  if (call->cache == FUSELINE_CACHE_SAME) {
    return with_dtype(call->dtype, [&](auto element) -> int {
      return launch_step<decltype(element), false>(a, layout, *call, stream);
    });
  }
  if (call->dtype == FUSELINE_FLOAT16) return launch_step<__half, true>(a, layout, *call, stream);
  return launch_step<__nv_bfloat16, true>(a, layout, *call, stream);
}
