// Which of the attention kernels takes a call on the GPU.

#pragma once

#include "fuseline_attention.h"

namespace fuseline {

// Bytes of scratch that the launch of a call takes.
size_t attention_forward_workspace(const fuseline_attention& call);
size_t attention_backward_workspace(const fuseline_attention_gradients& gradients);

// Answers as the kernels do: 0, or a code for check_launch.
int launch_attention_forward(const fuseline_attention& call, void* stream);
int launch_attention_backward(const fuseline_attention_gradients& gradients, void* stream);

}  // namespace fuseline
