// The C API of attention forward: which kernel takes a call.

#include "device/attention_launch.cuh"
#include "device/attention_split.h"

namespace fuseline {

template <class T, bool kPlain>
int launch_forward(const Attention& a, void* stream);

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
  const bool plain = plain_scores(a);
  switch (c.dtype) {
    case FUSELINE_FLOAT16:
      return plain ? launch_forward<__half, true>(a, stream) : launch_forward<__half, false>(a, stream);
    case FUSELINE_BFLOAT16:
      return plain ? launch_forward<__nv_bfloat16, true>(a, stream) : launch_forward<__nv_bfloat16, false>(a, stream);
    default:
      return launch_forward<float, false>(a, stream);
  }
}
