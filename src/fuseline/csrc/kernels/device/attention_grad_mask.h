// The gradient of an additive mask, as attention_backward.cu asks for it.
#pragma once

#include "attention_call.cuh"

namespace fuseline {

// Bytes of scratch that it takes.
size_t grad_mask_workspace(const fuseline_attention_gradients& gradients);

int launch_grad_mask(const AttentionBackward& g, const fuseline_attention_gradients& gradients, void* workspace,
                     void* stream);

}  // namespace fuseline
