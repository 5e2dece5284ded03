// Attention of few query rows over many keys, as attention_forward.cu asks for it.
#pragma once

#include "device/attention_call.cuh"

namespace fuseline {

// Bytes of scratch that it takes; 0 if it is not for this call.
size_t split_workspace(const fuseline_attention& call);

int launch_split(const Attention& a, void* stream);

}  // namespace fuseline
