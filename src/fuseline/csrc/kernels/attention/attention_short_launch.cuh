// Attention over short sequences, the host's half: tiles for a problem, bytes of shared memory, the launch.
#pragma once

#include "attention_short.cuh"
#include "attention_short_products.cuh"
#include "attention_short_turns.cuh"

namespace fuseline::short_attention {

// Bytes of shared memory that a block asks for. In the backward, problems of 128 x 128 have one room for p and grad_s, in
// turn, and a second place for queries, and for grad_out where shared memory allows, so that the next problem's are on
// their way throughout: their blocks are too few for one to compute while another waits. Problems of 64 x 32 have both
// second places too. Measured: 363 us with them, 378 without, 367 with that for queries alone in six blocks, 369 without
// any in six, and with both in four.
template <int kS>
constexpr bool kOneRoom = kS == 128;
template <int kS, int kD>
constexpr bool kQueriesAhead = kOneRoom<kS> || (kS == 64 && kD == 32);
template <int kS, int kD>
constexpr bool kGradientsAhead = (kOneRoom<kS> && kD != 64) || (kS == 64 && kD == 32);
template <int kS>
constexpr int kOrderBytes = Turns::kBytes + Blocks<kS, true>::kBytes;  // behind the tiles
// Forward problems whose tensors have a second place each, so that the next one's are on their way throughout, and whose
// copies ask the L2 for the other heads' rows beside theirs, of 64 bytes in lines of 256. Measured: at 32 x 32 223 us with
// both, 233 with the lines alone, 236 with neither, at 16 x 32 232, 240, 244; at 64 x 32 the places gain nothing, and the
// lines lose 11 of 195 us. In the backward they lose 5 of 348 at 32 x 32 and gain 5 of 454 at 16 x 32.
template <int kS, int kD>
constexpr bool kForwardAhead = kS <= 32 && kD == 32;
template <int kS, int kD>
constexpr int kForwardBytes = (kForwardAhead<kS, kD> ? 6 : 3) * kS * kD * 2 + kOrderBytes<kS>;
template <int kS, int kD>
constexpr int kBackwardBytes = (4 + kQueriesAhead<kS, kD> + kGradientsAhead<kS, kD>)*kS * kD * 2 +
                               (kOneRoom<kS> ? 1 : 2) * kS * kS * 2 + kOrderBytes<kS>;

// Problems that are large enough to be counted: of smaller ones there are so many that they wait for the counter. Measured:
// forward at 16 x 64 203 us with it and 189 without, at 32 x 64 183 and 189; backward at 16 x 32 186 and 173, at 16 x 64
// 343 and 354.
template <int kS, int kD>
constexpr bool kForwardCounts = kS * kD >= 2048;
template <int kS, int kD>
constexpr bool kBackwardCounts = kS * kD >= 1024;

// Packed sequences of up to this have products of warps; longer ones those of warpgroups alone.
constexpr int kPackedWarps = 64;

// Call run(std::integral_constant<int, size>{}) with the size of the smallest tiles that hold the problem.
template <class Run>
int with_head_dim(int head_dim, Run&& run) {
  if (head_dim <= 32) return run(std::integral_constant<int, 32>{});
  if (head_dim <= 64) return run(std::integral_constant<int, 64>{});
  return run(std::integral_constant<int, 128>{});
}

template <class Run>
int with_length(const ShortAttention& a, Run&& run) {
  const int length = std::max({a.seqlen_q, a.seqlen_k, a.starts_q != nullptr ? kPackedWarps : 1});
  if (length <= 16) return run(std::integral_constant<int, 16>{});
  if (length <= 32) return run(std::integral_constant<int, 32>{});
  if (length <= 64) return run(std::integral_constant<int, 64>{});
  return run(std::integral_constant<int, 128>{});
}

// Whether blocks of 16 x 16 of a longest problem are hidden as a whole.
inline bool skips(const ShortAttention& a) {
  return a.bounded || std::min(a.seqlen_q, a.seqlen_k) <= kLongest - 16;
}

// Blocks that stay, each taking problem after problem; `counts`: by a counter, if there is one. They come while the kernel
// before ends (overlap.cuh).
inline int launch_problems(void (*kernel)(ShortAttention), const ShortAttention& a, int threads, size_t shared, bool counts,
                           const Device& device, void* stream) {
  if (int(shared) > device.shared_a_block) return FUSELINE_UNSUPPORTED;
  int count = 0;
  const cudaError_t error = resident_clusters(kernel, device, threads, shared, 1, count);
  if (error != cudaSuccess) return int(error);
  if (count == 0) return FUSELINE_UNSUPPORTED;
  ShortAttention given = a;
  if (!counts || a.problems <= count) given.counter = nullptr;
  return launch(kernel, given, std::min(a.problems, count), dim3(threads), shared, 1, stream, device.clusters);
}

// attention_short_forward.cu and attention_short_backward.cu have them in bf16 for problems of up to 64 rows and keys,
// attention_short_not_sm90.cu for longer ones and in fp16.
template <class T, int kS>
int forward_of(const ShortAttention& a, const Device& device, void* stream);
template <class T, int kS>
int backward_of(const ShortAttention& a, const Device& device, void* stream);

}  // namespace fuseline::short_attention
