// The C API of attention forward: which kernel takes a call.

#include "device/attention_launch.cuh"
#include "attention_split.h"

namespace fuseline {

template <class T, bool kPlain>
int launch_forward(const Attention& a, void* stream);
// The same by products of warpgroups, of head dims to 128; FUSELINE_UNSUPPORTED if shared memory is too small.
template <class T, bool kPlain>
int launch_forward_panels(const Attention& a, const Device& device, void* stream);

namespace {

template <class T>
int launch_forward_of(const Attention& a, void* stream) {
  const bool plain = takes_plain(a);
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  if (takes_panels(a, device)) {
    const int code = plain_but_for_dropout(a) ? launch_forward_panels<T, true>(a, device, stream)
                                              : launch_forward_panels<T, false>(a, device, stream);
    if (code != FUSELINE_UNSUPPORTED) return code;
  }
  return plain ? launch_forward<T, true>(a, stream) : launch_forward<T, false>(a, stream);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

size_t fuseline_attention_forward_workspace(const fuseline_attention* call) { return split_workspace(*call); }

int fuseline_attention_forward(const fuseline_attention* call, void* stream) {
  const fuseline_attention& c = *call;
  if (const int refusal = attention_refusal(c)) return refusal;
  if (c.batch == 0 || c.heads == 0 || c.seqlen_q == 0) return 0;
  const int size = c.dtype == FUSELINE_FLOAT32 ? 4 : 2;
  if (!in_vectors(c.q, c.q_strides, size) || !in_vectors(c.k, c.k_strides, size) ||
      !in_vectors(c.v, c.v_strides, size) || !in_vectors(c.out, c.out_strides, size)) {
    return FUSELINE_UNSUPPORTED;
  }
  const Attention a = attention_of(c);
  if (split_workspace(c) != 0) return launch_split(a, stream);
  switch (c.dtype) {
    case FUSELINE_FLOAT16:
      return launch_forward_of<__half>(a, stream);
    case FUSELINE_BFLOAT16:
      return launch_forward_of<__nv_bfloat16>(a, stream);
    default:
      return launch_forward<float, false>(a, stream);
  }
}
