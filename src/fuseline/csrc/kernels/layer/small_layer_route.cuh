// Which of its two forms the small attention layer's forward takes: everything in one launch (small_layer_forward.cuh), or
// in two that fill the device and overlap (small_layer_heads.cuh, small_layer_out.cuh).
#pragma once

#include "small_layer_forward.cuh"
#include "small_layer_heads.cuh"
#include "small_layer_out.cuh"

namespace fuseline {

// A second launch keeps the host busy for 2.5 us, which are hidden where the first form takes more than about 12. Bytes of x
// from which two launches are faster, of 16 bits and of fp32: 8 x 64 x 256 in bf16 takes 11.0 us in one and 8.5 in two.
inline bool takes_two_launches(const fuseline_small_layer& layer, void* stream) {
  if (!comes_in_clusters(layer)) return false;
  const bool wide = layer.dtype == FUSELINE_FLOAT32;
  const int64_t bytes = layer.batch * layer.seqlen * layer.embed_dim * (wide ? 4 : 2);
  const int64_t least = wide ? 192 << 10 : 384 << 10, least_captured = 64 << 10;
  return bytes >= least || (bytes >= least_captured && is_being_captured(stream));
}

template <class Math>
int run_forward(const fuseline_small_layer& layer, const Device& device, bool only_asking, void* stream) {
  if (!only_asking && takes_two_launches(layer, stream)) {
    const int code = run_heads_forward<Math>(layer, device, stream);
    if (code == 0) return run_out<Math>(layer, device, stream);
    if (code != FUSELINE_UNSUPPORTED) return code;
  }
  return run_in_one_launch<Math>(layer, device, only_asking, stream);
}

}  // namespace fuseline
