// The gradient of an additive mask, as attention_backward.cu asks for it.
#pragma once

#include "attention_call.cuh"
#include "launch.cuh"

namespace fuseline {

// Bytes of scratch that it takes.
size_t grad_mask_workspace(const fuseline_attention_gradients& gradients);

// dy of some tiles of rows in 16 bits, as the kernel of rows (attention_backward_wgmma.cuh) leaves it on its way to grad_q:
// for [tile of rows][sequence][head][step of keys] 64 rows and the step's keys, vectors of eight keys as threads hold them.
struct LeftScores {
  uint4* at;
  int first_tile, tiles;  // of rows
  int steps;              // of all keys
};

// Tiles of rows whose dy are left at a time, for the mask's gradient to be their sum; 0: it is computed from q, k, v again.
int64_t left_tiles(const fuseline_attention_gradients& gradients, const Device& device);

// Adds them up. `step`: keys of a step.
int launch_sum_left(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const LeftScores& left, int step,
                    void* stream);

int launch_grad_mask(const AttentionBackward& g, const fuseline_attention_gradients& gradients, void* workspace,
                     void* stream);

}  // namespace fuseline
