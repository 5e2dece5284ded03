// Attention of few query rows over many keys, as the plan cuts its work. The kernels stand in attention/attention_split.cuh.

#include "attention_split.cuh"

#include "attention_launches.h"

namespace fuseline {

int launch_split(const Attention& a, const AttentionPlan& plan, void* stream) {
  const fuseline_attention& c = a.call;
  Split g{};
  g.a = a;
  g.rows = c.batch * c.heads * c.seqlen_q, g.splits = plan.splits, g.chunks = plan.chunks;
  g.sums = static_cast<float*>(c.workspace);
  g.totals = reinterpret_cast<float2*>(g.sums + plan.splits * g.rows * c.head_dim);
  return c.dtype == FUSELINE_FLOAT16 ? launch_split_parts<__half>(g, plan, stream)
                                     : launch_split_parts<__nv_bfloat16>(g, plan, stream);
}

}  // namespace fuseline
