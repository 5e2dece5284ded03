// The gradient of an additive mask. Where the kernel of rows (attention_backward_wgmma.cuh) computes dy on its way to grad_q,
// it leaves it for some tiles of rows at a time, and what is added up here is read from that scratch. Else, with packed
// sequences, other dtypes than bf16, a soft cap, one entry for all rows or keys, too few blocks in the scratch, or no grad_q,
// device/attention_grad_mask.cuh computes the scores once more: how its work is cut, and the sums over the pieces.
//
// Measured (B 8, H 16, T 1024, D 64, one bias a head; forward and backward): 759 us by what is left, 852 by computing it
// again; a bias for every sequence too 861 and 1304. Tiles by the batch or read backwards, of which more is in the L2, gain
// nothing; fewer at a time, so that the L2 holds them all, lose 10 to 20.

#include "attention_launches.h"
#include "device/attention_grad_mask.cuh"

namespace fuseline {

// attention_grad_mask_sm90a.cu: by products of warpgroups, to head dim 128, in bf16.
int launch_grad_mask_panels(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);

// attention_not_sm90.cu
extern template int launch_grad_mask_tiles<__half, 64>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);
extern template int launch_grad_mask_tiles<__half, 128>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);
extern template int launch_grad_mask_tiles<__nv_bfloat16, 64>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);
extern template int launch_grad_mask_tiles<__nv_bfloat16, 128>(const AttentionGradMask& of, const AttentionLaunch& by, void* stream);

namespace {

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) sum_pieces(const float* pieces, int count, int64_t size, void* to, int dtype) {
  const int64_t at = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= size) return;
  float sum = 0.f;
  for (int piece = 0; piece < count; ++piece) sum += pieces[piece * size + at];
  store_as(to, dtype, at, sum);
}

// ---- from what the kernel of rows has left ----

constexpr int kLeftThreads = 128;

struct LeftSums {
  Attention a;
  LeftScores left;
  void* to;
  int to_dtype;
  int64_t strides[4];
  int batches, heads, over_batches, over_heads;
  bool in_vectors;  // eight keys of the gradient in one store, or two of fp32
};

// A block has a step's keys of a tile of rows; a thread some rows' eight keys.
template <int kStep>
__global__ void __launch_bounds__(kLeftThreads) sum_left(const __grid_constant__ LeftSums g) {
  constexpr int kVectors = kLeftRows * kStep / 8, kOwn = kVectors / kLeftThreads;
  const fuseline_attention& c = g.a.call;
  const int steps = g.left.steps, thread = threadIdx.x;
  unsigned block = blockIdx.x;
  const auto next = [&](int count) {
    const int index = int(block % unsigned(count));
    block /= unsigned(count);
    return index;
  };
  const int step = next(steps), head0 = next(g.heads), tile = next(g.left.tiles), batch0 = int(block);
  const Sequence sequence(c, batch0);
  const int row = (g.left.first_tile + tile) * kLeftRows, key = step * kStep;
  const int last = min(row + kLeftRows, sequence.rows) - 1;
  const bool seen = key + kStep > sequence.keys_from(g.a, row) && key < sequence.keys_to(g.a, last);
  float sums[kOwn][8] = {};
  if (seen) {
    for (int head = 0; head < g.over_heads; ++head) {
#pragma unroll 2
      for (int batch = 0; batch < g.over_batches; ++batch) {
        const int64_t place = (int64_t(tile) * c.batch + batch0 + batch) * c.heads + head0 + head;
        const uint4* const from = g.left.at + (place * steps + step) * kVectors + thread;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const uint4 vector = __ldcs(from + i * kLeftThreads);
          const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 pair = unpack_pair<__nv_bfloat16>(words[w]);
            sums[i][2 * w] += pair.x, sums[i][2 * w + 1] += pair.y;
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int y = row + thread / 32 * 16 + i % 2 * 8 + thread % 32 / 4, x = key + i / 2 * 32 + thread % 4 * 8;
    if (y >= sequence.rows) continue;
    const int64_t to = batch0 * g.strides[0] + head0 * g.strides[1] + y * g.strides[2] + x * g.strides[3];
    if (g.in_vectors && x + 8 <= sequence.keys) {
      if (g.to_dtype == FUSELINE_FLOAT32) {
        float4* const at = reinterpret_cast<float4*>(static_cast<float*>(g.to) + to);
        at[0] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        at[1] = make_float4(sums[i][4], sums[i][5], sums[i][6], sums[i][7]);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[w] = g.to_dtype == FUSELINE_BFLOAT16 ? pack_pair<__nv_bfloat16>(sums[i][2 * w], sums[i][2 * w + 1])
                                                     : pack_pair<__half>(sums[i][2 * w], sums[i][2 * w + 1]);
        }
        *reinterpret_cast<uint4*>(static_cast<char*>(g.to) + 2 * to) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (x + e < sequence.keys) store_as(g.to, g.to_dtype, to + e * g.strides[3], sums[i][e]);
      }
    }
  }
}

// Hopper has fp16 and wide heads by the widest tiles alone (plans/attention_backward.h).
template <class T>
int launch_grad_mask_of(const AttentionGradMask& of, const AttentionLaunch& by, void* stream) {
  if (by.kernel == AttentionKernel::grad_mask_panels) return launch_grad_mask_panels(of, by, stream);
  if (by.width == 64) return launch_grad_mask_tiles<T, 64>(of, by, stream);
  if constexpr (!std::is_same_v<T, float>) {
    if (by.width == 128) return launch_grad_mask_tiles<T, 128>(of, by, stream);
  }
  return launch_grad_mask_tiles<T, kWidestHead>(of, by, stream);
}

}  // namespace

int launch_sum_left(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const LeftScores& left,
                    const AttentionLaunch& by, void* stream) {
  const fuseline_attention& c = gradients.call;
  LeftSums of{};
  of.a = g.a, of.left = left, of.to = gradients.grad_mask, of.to_dtype = gradients.grad_mask_dtype;
  std::copy(gradients.grad_mask_strides, gradients.grad_mask_strides + 4, of.strides);
  const bool batches = of.strides[0] != 0, heads = of.strides[1] != 0;
  of.batches = int(batches ? c.batch : 1), of.over_batches = int(batches ? 1 : c.batch);
  of.heads = int(heads ? c.heads : 1), of.over_heads = int(heads ? 1 : c.heads);
  const int size = of.to_dtype == FUSELINE_FLOAT32 ? 4 : 2;
  const int64_t outer[3] = {of.strides[0], of.strides[1], of.strides[2]};
  of.in_vectors = of.strides[3] == 1 && in_vectors(of.to, outer, size);
  const auto kernel = backward_panels(by.width, false).step == 64 ? sum_left<64> : sum_left<32>;
  return launch(kernel, of, by.shape.grid, dim3(unsigned(by.shape.threads)), 0, 1, stream);
}

int launch_grad_mask(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const AttentionPlan& plan,
                     const AttentionLaunch& by, void* scratch, void* stream) {
  AttentionGradMask of{};
  static_cast<MaskGradientParts&>(of) = plan.mask;
  std::copy(gradients.grad_mask_strides, gradients.grad_mask_strides + 4, of.strides);
  of.g = g;
  of.to = of.pieces > 1 ? scratch : gradients.grad_mask;
  of.to_dtype = of.pieces > 1 ? int(FUSELINE_FLOAT32) : gradients.grad_mask_dtype;
  const auto on = static_cast<cudaStream_t>(stream);
  if (by.kernel == AttentionKernel::zeros) {
    return int(cudaMemsetAsync(of.to, 0, of.pieces * of.size * (of.to_dtype == FUSELINE_FLOAT32 ? sizeof(float) : 2), on));
  }
  if (by.kernel == AttentionKernel::sum_pieces) {
    sum_pieces<<<unsigned(by.shape.grid), unsigned(by.shape.threads), 0, on>>>(
        static_cast<const float*>(of.to), of.pieces, of.size, gradients.grad_mask, gradients.grad_mask_dtype);
    return int(cudaGetLastError());
  }
  return with_dtype(g.a.call.dtype, [&](auto type) { return launch_grad_mask_of<decltype(type)>(of, by, stream); });
}

}  // namespace fuseline
