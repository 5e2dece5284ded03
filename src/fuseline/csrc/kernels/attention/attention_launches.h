// The launches of attention's families, each as a plan of theirs says.
#pragma once

#include "device/attention_call.cuh"
#include "plans/attention_backward.h"

namespace fuseline {

// attention_short.cu
int launch_short_forward(const fuseline_attention& call, const AttentionPlan& plan, void* stream);
int launch_short_backward(const fuseline_attention_gradients& gradients, const AttentionPlan& plan, void* stream);

// attention_split.cu
int launch_split(const Attention& a, const AttentionPlan& plan, void* stream);

// attention_grad_mask.cu: the sums of what rows_leaving has left; zeros, the gradient or its pieces, and their sum.
int launch_sum_left(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const LeftScores& left,
                    const AttentionLaunch& by, void* stream);
int launch_grad_mask(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const AttentionPlan& plan,
                     const AttentionLaunch& by, void* scratch, void* stream);

}  // namespace fuseline
