// The gradient of an additive mask. Where the kernel of rows (attention_backward_wgmma.cuh) computes dy on its way to grad_q,
// it leaves it for some tiles of rows at a time, and what is added up here is read from that scratch. Else, with packed
// sequences, other dtypes than bf16, a soft cap, one entry for all rows or keys, too few blocks in the scratch, or no grad_q,
// device/attention_grad_mask.cuh computes the scores once more: how its work is cut, and the sums over the pieces.
//
// Measured (B 8, H 16, T 1024, D 64, one bias a head; forward and backward): 759 us by what is left, 852 by computing it
// again; a bias for every sequence too 861 and 1304. Tiles by the batch or read backwards, of which more is in the L2, gain
// nothing; fewer at a time, so that the L2 holds them all, lose 10 to 20.

#include "device/attention_grad_mask.cuh"
#include "device/attention_grad_mask.h"

namespace fuseline {

// attention_grad_mask_sm90a.cu: by products of warpgroups, to head dim 128, in bf16.
int launch_grad_mask_panels(const AttentionGradMask& of, int64_t blocks, void* stream);

// attention_not_sm90.cu
extern template int launch_grad_mask_tiles<__half, 64>(const AttentionGradMask& of, int64_t blocks, void* stream);
extern template int launch_grad_mask_tiles<__half, 128>(const AttentionGradMask& of, int64_t blocks, void* stream);
extern template int launch_grad_mask_tiles<__nv_bfloat16, 64>(const AttentionGradMask& of, int64_t blocks, void* stream);
extern template int launch_grad_mask_tiles<__nv_bfloat16, 128>(const AttentionGradMask& of, int64_t blocks, void* stream);

namespace {

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) sum_pieces(const float* pieces, int count, int64_t size, void* to, int dtype) {
  const int64_t at = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= size) return;
  float sum = 0.f;
  for (int piece = 0; piece < count; ++piece) sum += pieces[piece * size + at];
  store_as(to, dtype, at, sum);
}

// Everything but pointers.
AttentionGradMask lay_out(const fuseline_attention_gradients& gradients) {
  const fuseline_attention& c = gradients.call;
  const int tile = c.dtype == FUSELINE_FLOAT32 && c.head_dim > 64 ? 32 : 64;  // rows and keys of a block
  const bool packed = c.cu_seqlens_q != nullptr;
  AttentionGradMask of{};
  for (int i = 0; i < 4; ++i) of.strides[i] = gradients.grad_mask_strides[i];
  const int64_t sizes[4] = {c.batch, c.heads, c.seqlen_q, c.seqlen_k};
  of.size = 1;
  for (int i = 0; i < 4; ++i) of.size *= of.strides[i] != 0 ? sizes[i] : 1;
  const bool one_row = of.strides[2] == 0, one_key = of.strides[3] == 0;
  const auto part = [](bool apart, int64_t count, int& places, int& over) {
    places = int(apart ? count : 1), over = int(apart ? 1 : count);
  };
  part(packed ? !one_row || !one_key : of.strides[0] != 0, packed ? c.sequences : c.batch, of.batches, of.over_batches);
  part(of.strides[1] != 0, c.heads, of.heads, of.over_heads);
  part(!one_row, divide_up(packed ? c.max_seqlen_q : c.seqlen_q, tile), of.row_tiles, of.over_rows);
  part(!one_key, divide_up(packed ? c.max_seqlen_k : c.seqlen_k, tile), of.key_tiles, of.over_keys);
  // Blocks for a large device, as long as each has some way to go and the pieces' memory stays small.
  constexpr int64_t kBlocks = 528, kMostPieces = 64, kMostBytes = int64_t(64) << 20;
  const int64_t places = int64_t(of.batches) * of.heads * of.row_tiles * of.key_tiles;
  const int64_t way = int64_t(of.over_batches) * of.over_heads * of.over_rows * of.over_keys;
  const int64_t pieces = std::min({divide_up(kBlocks, std::max<int64_t>(1, places)), way, kMostPieces,
                                   kMostBytes / std::max<int64_t>(4, of.size * 4)});
  of.pieces = int(std::max<int64_t>(1, pieces));
  of.mask_stays = of.over_heads * of.over_rows * of.over_keys == 1 && (of.over_batches == 1 || c.mask_strides[0] == 0) && !packed;
  return of;
}

// ---- from what the kernel of rows has left ----

constexpr int kLeftRows = 64, kLeftThreads = 128;

int64_t left_bytes(const fuseline_attention& c) {  // of a tile of rows
  return c.batch * c.heads * divide_up(c.seqlen_k, kLeftRows) * kLeftRows * kLeftRows * 2;
}

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

template <class T>
int launch_grad_mask_of(const AttentionGradMask& of, int64_t blocks, void* stream) {
  const int64_t head_dim = of.g.a.call.head_dim;
  // No model trains biases of fp16, or of fp32 with wide heads: Hopper has one kernel for the first, the second one of wide tiles.
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (device.warpgroups && head_dim <= 128) return launch_grad_mask_panels(of, blocks, stream);
  }
  if constexpr (std::is_same_v<T, float>) {
    if (head_dim <= 64) return launch_grad_mask_tiles<T, 64>(of, blocks, stream);
  } else if (!device.warpgroups) {
    if (head_dim <= 64) return launch_grad_mask_tiles<T, 64>(of, blocks, stream);
    if (head_dim <= 128) return launch_grad_mask_tiles<T, 128>(of, blocks, stream);
  }
  return launch_grad_mask_tiles<T, kWidestHead>(of, blocks, stream);
}

}  // namespace

int64_t left_tiles(const fuseline_attention_gradients& gradients, const Device& device) {
  constexpr int64_t kMostBytes = int64_t(256) << 20, kFewestBlocks = 3;  // of a multiprocessor, unless all tiles fit
  const fuseline_attention& c = gradients.call;
  const bool each = gradients.grad_mask_strides[2] != 0 && gradients.grad_mask_strides[3] != 0;  // row and key has its own
  const bool fits = gradients.grad_mask && gradients.grad_q && c.mask_kind > FUSELINE_MASK_BOOL && each && !c.cu_seqlens_q &&
                    c.soft_cap == 0 && c.dtype == FUSELINE_BFLOAT16 && c.head_dim <= 128 && device.warpgroups &&
                    c.batch > 0 && c.heads > 0 && c.seqlen_q > 0 && c.seqlen_k > 0;
  if (!fits) return 0;
  const int64_t all = divide_up(c.seqlen_q, kLeftRows), most = kMostBytes / left_bytes(c);
  if (all <= most) return all;
  return most * c.batch * c.heads >= kFewestBlocks * device.processors ? most : 0;
}

int launch_sum_left(const AttentionBackward& g, const fuseline_attention_gradients& gradients, const LeftScores& left, int step,
                    void* stream) {
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
  const int64_t blocks = int64_t(left.steps) * left.tiles * of.heads * of.batches;
  if (blocks > 0x7fffffff) return int(cudaErrorInvalidConfiguration);
  const auto on = static_cast<cudaStream_t>(stream);
  const auto launch = [&](auto* kernel) {
    kernel<<<unsigned(blocks), kLeftThreads, 0, on>>>(of);
    return int(cudaGetLastError());
  };
  return launch(step == 64 ? sum_left<64> : sum_left<32>);
}

size_t grad_mask_workspace(const fuseline_attention_gradients& gradients) {
  if (gradients.grad_mask == nullptr) return 0;
  Device device;
  if (current_device(device) == cudaSuccess) {
    if (const int64_t tiles = left_tiles(gradients, device); tiles > 0) return size_t(tiles * left_bytes(gradients.call));
  }
  const AttentionGradMask of = lay_out(gradients);
  return of.pieces > 1 ? size_t(of.pieces) * of.size * sizeof(float) : 0;
}

int launch_grad_mask(const AttentionBackward& g, const fuseline_attention_gradients& gradients, void* workspace,
                     void* stream) {
  const fuseline_attention& c = gradients.call;
  AttentionGradMask of = lay_out(gradients);
  of.g = g;
  of.to = of.pieces > 1 ? workspace : gradients.grad_mask;
  of.to_dtype = of.pieces > 1 ? int(FUSELINE_FLOAT32) : gradients.grad_mask_dtype;
  if (of.size == 0) return 0;
  const int64_t blocks = int64_t(of.batches) * of.heads * of.row_tiles * of.key_tiles * of.pieces;
  const auto on = static_cast<cudaStream_t>(stream);
  if (c.cu_seqlens_q != nullptr || blocks == 0) {  // no block writes what lies between sequences
    const size_t element = of.to_dtype == FUSELINE_FLOAT32 ? sizeof(float) : 2;
    const cudaError_t error = cudaMemsetAsync(of.to, 0, of.pieces * of.size * element, on);
    if (error != cudaSuccess) return int(error);
  }
  const int code = with_dtype(c.dtype, [&](auto type) { return launch_grad_mask_of<decltype(type)>(of, blocks, stream); });
  if (code != 0 || of.pieces == 1) return code;
  sum_pieces<<<unsigned(divide_up(of.size, kSumThreads)), kSumThreads, 0, on>>>(
      static_cast<const float*>(of.to), of.pieces, of.size, gradients.grad_mask, gradients.grad_mask_dtype);
  return int(cudaGetLastError());
}

}  // namespace fuseline
