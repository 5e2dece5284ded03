// The gradient of an additive mask: device/attention_grad_mask.cuh, how its work is cut, and the sums over the pieces.

#include "device/attention_grad_mask.cuh"
#include "device/attention_grad_mask.h"

namespace fuseline {

// attention_grad_mask_*_sm90a.cu: by products of warpgroups, to head dim 128.
template <class T>
int launch_grad_mask_panels(const AttentionGradMask& of, int64_t blocks, void* stream);

namespace {

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) sum_pieces(const float* pieces, int count, int64_t size, void* to, int dtype) {
  const int64_t at = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= size) return;
  float sum = 0.f;
  for (int piece = 0; piece < count; ++piece) sum += pieces[piece * size + at];
  store_as(to, dtype, at, sum);
}

// Everything but pointers. `tile`: rows and keys of a block.
AttentionGradMask lay_out(const fuseline_attention_gradients& gradients, int tile) {
  const fuseline_attention& c = gradients.call;
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

struct Layout {
  AttentionGradMask of;
  bool wide;
};

template <class T>
int launch_grad_mask_of(const AttentionGradMask& of, bool wide, int64_t blocks, void* stream) {
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  const int64_t head_dim = of.g.a.call.head_dim;
  const bool panels = device.warpgroups && head_dim <= 128;
  return panels ? launch_grad_mask_panels<T>(of, blocks, stream) : launch_grad_mask_tiles<T>(of, wide, blocks, stream);
}

// Tiles of 128 x 128 where products are of warps, and they fit the device, and the mask.
Layout lay_out(const fuseline_attention_gradients& gradients) {
  const fuseline_attention& c = gradients.call;
  const bool packed = c.cu_seqlens_q != nullptr, exact = c.dtype == FUSELINE_FLOAT32;
  Device device;
  const bool known = current_device(device) == cudaSuccess;
  const int64_t shorter = std::min(packed ? c.max_seqlen_q : c.seqlen_q, packed ? c.max_seqlen_k : c.seqlen_k);
  if (!exact && !(known && device.warpgroups) && c.head_dim <= 64 && shorter > 64) {
    Layout wide{lay_out(gradients, 128), true};
    wide.of.g.a.call = c;
    if (known && grad_mask_shared<GradMaskTiles<__half, 64, true>>(wide.of) <= device.shared_a_block) return wide;
  }
  return {lay_out(gradients, exact && c.head_dim > 128 ? 32 : 64), false};
}

}  // namespace

size_t grad_mask_workspace(const fuseline_attention_gradients& gradients) {
  if (gradients.grad_mask == nullptr) return 0;
  const AttentionGradMask of = lay_out(gradients).of;
  return of.pieces > 1 ? size_t(of.pieces) * of.size * sizeof(float) : 0;
}

int launch_grad_mask(const AttentionBackward& g, const fuseline_attention_gradients& gradients, void* workspace,
                     void* stream) {
  const fuseline_attention& c = gradients.call;
  const Layout layout = lay_out(gradients);
  AttentionGradMask of = layout.of;
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
  int code = 0;
  if (c.dtype == FUSELINE_FLOAT16) code = launch_grad_mask_of<__half>(of, layout.wide, blocks, stream);
  else if (c.dtype == FUSELINE_BFLOAT16) code = launch_grad_mask_of<__nv_bfloat16>(of, layout.wide, blocks, stream);
  else code = launch_grad_mask_tiles<float>(of, layout.wide, blocks, stream);
  if (code != 0 || of.pieces == 1) return code;
  sum_pieces<<<unsigned(divide_up(of.size, kSumThreads)), kSumThreads, 0, on>>>(
      static_cast<const float*>(of.to), of.pieces, of.size, gradients.grad_mask, gradients.grad_mask_dtype);
  return int(cudaGetLastError());
}

}  // namespace fuseline
