// Attention over short sequences by products of warpgroups (attention_short_wgmma.cuh), in bf16, as attention_short.cu asks for it.
#pragma once

#include "attention_short.cuh"

namespace fuseline::short_attention {

// Whether these products are for a problem: with fewer rows and keys a warpgroup would be half idle.
inline bool is_longest(const ShortAttention& a) { return 2 * std::max(a.seqlen_q, a.seqlen_k) > kLongest; }

// attention_short_sm90a.cu has them. FUSELINE_UNSUPPORTED where the device is no Hopper.
int forward_by_warpgroups(const ShortAttention& a, const Device& device, void* stream);
int backward_by_warpgroups(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
