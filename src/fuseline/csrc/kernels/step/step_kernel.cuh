// A whole decoding step for one row in one launch. See fuseline_decode_step.h; this is its kernel.
//
// Moves: all weights once. GPT-2 of 124M parameters in 16 bits is 248 MB, 83 us at 3.0 TB/s, while a launch for each part
// of a layer leaves HBM idle for most of 4 us. Limit here: the weights, and a chain of five exchanges a layer between all
// multiprocessors, each of about 1 us.
//
// Threads: one block to a multiprocessor, resident all at once. Row r of a product is of block r mod blocks. A warp takes a
// row, or where rows are longer than a piece (256 kVectors elements) as many warps share it. The pieces of weights that a
// warp will multiply, product after product and layer after layer, are known from the start: every lane copies its own
// bytes into a ring in shared memory several pieces ahead, so that HBM never waits for an exchange.
//
// Exchanges: an element that blocks hand to each other is one word with the number of its layer beside it, so that who
// reads it knows by itself whether it is there: no fence, no counter, no barrier. Every block adds to every exchange but
// that of the heads, and each is complete before any block can be two ahead, so that no buffer is overwritten early.
// Queries, keys, values and what the MLP holds inside are rounded to bf16, the stream stays in fp32.

#pragma once

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "step_heads.cuh"
#include "step_weights.cuh"

namespace fuseline {

// Row by row of this block's share of a product: `publish(row, i, sum, other)` by one thread once row i of the block's is
// summed up. x is in shared memory. What comes next is asked for last: others wait for what is published.
template <class Shape, class Publish>
__device__ __forceinline__ void multiply(int index, const typename Shape::Element* x,
                                         Weights<Shape>& weights, float2* partial, const Publish& publish) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const StepUnit& unit = units_of<Shape>(index)[warp];
  const int grid = int(gridDim.x), together = unit.together, group = unit.group, spread = unit.spread;
  if (spread == 1) {
#pragma unroll 1
    for (int i = group; i < unit.mine; i += together) {
      float sum = weights.product(x), other = 0.f;
#pragma unroll 1
      for (int piece = 1; piece < unit.pieces; ++piece) {
        weights.go_on();
        sum += weights.product(x + piece * Shape::kPiece);
      }
      sum = sum_of_warp(sum);
      if (unit.part_bytes) {
        weights.go_on();
        other = sum_of_warp(weights.product(x));
      }
      if (lane == 0) publish(int(blockIdx.x) + grid * i, i, sum, other);
      weights.go_on();
    }
    return;
  }
  for (int begin = 0; begin < unit.mine; begin += together) {
    const bool valid = group < together && begin + group < unit.mine;
    float sums[2] = {};
    if (valid) {
      const typename Shape::Element* const of = x + unit.first * Shape::kPiece;
      sums[0] = sum_of_warp(weights.product(of));
      if (unit.part_bytes) {
        weights.go_on();
        sums[1] = sum_of_warp(weights.product(of));
      }
    }
    if (begin) __syncthreads();  // the sums before these have been read
    if (valid && lane == 0) partial[warp] = make_float2(sums[0], sums[1]);
    __syncthreads();
    if (threadIdx.x < together && begin + int(threadIdx.x) < unit.mine) {
      float all[2] = {};
#pragma unroll 4
      for (int s = 0; s < spread; ++s) {
        const float2 part = partial[int(threadIdx.x) * spread + s];
        all[0] += part.x, all[1] += part.y;
      }
      const int i = begin + int(threadIdx.x);
      publish(int(blockIdx.x) + grid * i, i, all[0], all[1]);
    }
    if (valid) weights.go_on();
  }
}

__device__ __forceinline__ float sum_of_lanes(float value, int lanes) {  // of each run of so many, a power of two
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <int kThreads>
__device__ __forceinline__ void meet_first_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// stream (unless it is there and `from` null) and x = T(norm(stream)), by the first warps.
template <class Shape>
__device__ __forceinline__ void norm_stream(const StepArguments& a, const uint64_t* from, uint32_t number,
                                            const char* norm_weight, const char* norm_bias, float* stream,
                                            typename Shape::Element* x, float* room) {
  using T = typename Shape::Element;
  constexpr int kWarps = Shape::kNormWarps, kThreads = Shape::kNormThreads, kEach = Shape::kEach;
  const int thread = threadIdx.x, warp = thread / kWarp, n = a.embed_dim;
  const T* const scale = reinterpret_cast<const T*>(norm_weight);
  const T* const shift = reinterpret_cast<const T*>(norm_bias);
  float values[kEach], weight[kEach], bias[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    weight[i] = at < n ? to_float(scale[at]) : 0.f;
    bias[i] = at < n && shift ? to_float(shift[at]) : 0.f;
  }
  // Mean and squares about it of each warp's own elements, and those of all from these, a warp to a lane. Counts and what
  // to divide by are worked out while the elements are on their way.
  const auto count_of = [&](int w) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += max(0, min(kWarp, n - i * kThreads - w * kWarp));
    return float(count);
  };
  const int of = thread % kWarps;
  float count = count_of(of), own_share = 1.f / fmaxf(1.f, count_of(warp)), share = 1.f / float(n);
  make_ready(count), make_ready(own_share), make_ready(share);
  if (from) {
    receive<kEach, kThreads>(from, n, number, values);
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = thread + i * kThreads < n ? stream[thread + i * kThreads] : 0.f;
  }
  const bool layer = a.norm == FUSELINE_NORM_LAYER;
  float own = 0.f, squares = 0.f;
  if (layer) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += values[i];
    own = sum_of_lanes(own, kWarp) * own_share;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    if (at < n) squares = fmaf(values[i] - own, values[i] - own, squares), stream[at] = values[i];
  }
  squares = sum_of_lanes(squares, kWarp);
  if (thread % kWarp == 0) room[warp] = own, room[kWarps + warp] = squares;
  meet_first_warps<kThreads>();
  float mean = 0.f, all = room[kWarps + of];
  if (layer) {
    const float theirs = room[of];
    mean = sum_of_lanes(theirs * count, kWarps) * share;
    all = fmaf((theirs - mean) * (theirs - mean), count, all);
  }
  all = sum_of_lanes(all, kWarps);
  const float rstd = rsqrtf(fmaf(all, share, a.eps));
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread + i * kThreads;
    if (at < n) x[at] = from_float<T>(fmaf((values[i] - mean) * rstd, weight[i], bias[i]));
  }
}

// The same for all to go on with.
template <class Shape>
__device__ __forceinline__ void take_normed(const StepArguments& a, const uint64_t* from, uint32_t number,
                                            const char* norm_weight, const char* norm_bias, float* stream,
                                            typename Shape::Element* x, float* room) {
  if (threadIdx.x < Shape::kNormThreads) norm_stream<Shape>(a, from, number, norm_weight, norm_bias, stream, x, room);
  __syncthreads();
}

// The biases of this block's rows of all products, layer after layer.
template <class Shape>
__device__ __forceinline__ void fetch_biases(const StepArguments& a, const StepLayer* layers, float* biases) {
  using T = typename Shape::Element;
  const int grid = int(gridDim.x);
#pragma unroll 1
  for (int at = threadIdx.x; at < a.num_layers * a.layout.biases; at += Shape::kThreads) {
    const StepLayer& w = layers[at / a.layout.biases];
    const int place = at % a.layout.biases;
    const int(&begin)[4] = a.layout.biases_at;
    const int index = (place >= begin[kOut]) + (place >= begin[kUp]) + (place >= begin[kDown]);
    const StepProduct of = a.products[index];
    const int each = (of.rows + grid - 1) / grid, i = place - begin[index];
    const int row = int(blockIdx.x) + grid * (i % each);
    const char* const from = index == kQkv ? w.qkv_bias : index == kOut ? w.out_bias : index == kUp ? w.up_bias : w.down_bias;
    const bool there = from && row < of.rows && i < each * of.parts;
    biases[at] = there ? to_float(reinterpret_cast<const T*>(from)[i / each * of.rows + row]) : 0.f;
  }
}

// The next norms' weights to the L2, a line by a block: where they are wanted nothing else is left to do.
template <class Shape>
__device__ __forceinline__ void prefetch_norms(const StepArguments& a, const StepLayer* next) {
  const int lines = (a.embed_dim * 2 + 127) / 128;
#pragma unroll 1
  for (int i = int(blockIdx.x) + int(gridDim.x) * int(threadIdx.x); i < 4 * lines; i += int(gridDim.x * blockDim.x)) {
    const char* const of[4] = {next ? next->norm_weight : a.norm_weight, next ? next->norm_bias : a.norm_bias,
                               next ? next->mlp_norm_weight : nullptr, next ? next->mlp_norm_bias : nullptr};
    const int part = i / lines;
    const char* const from = part == 0 ? of[0] : part == 1 ? of[1] : part == 2 ? of[2] : of[3];
    if (from) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + (i % lines) * 128));
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) decode_step(const __grid_constant__ StepArguments a) {
#if __CUDA_ARCH__ >= 900  // others have not the shared memory, or have not been measured
  using T = typename Shape::Element;
  constexpr int kThreads = Shape::kThreads, kWarps = Shape::kWarps;
  char* const shared = step_shared();
  __shared__ HeadRoom<Shape> head_room;
  __shared__ float room[2 * Shape::kNormWarps];
  __shared__ float2 partial[kWarps];
  __shared__ unsigned long long likeliest[kWarps], of_blocks[kWarps];
  const int thread = thread_anew();
  // What hangs on other reads is asked for first: each of them takes as long as a product does.
  const int position = int(*a.length);
  const int64_t token = *a.token;
  uint32_t number = *a.to.steps * uint32_t(a.num_layers);  // of the layer before
  // Addresses are worked out where they are wanted: registers are what this kernel has least of.
  StepLayer* const layers = step_layers<Shape>();
  const auto stream = [&] { return reinterpret_cast<float*>(shared + a.layout.at_stream); };
  const auto x = [&] { return reinterpret_cast<T*>(shared + a.layout.at_x); };
  const auto gathered = [&] { return reinterpret_cast<T*>(shared + a.layout.at_gathered); };
  const auto inner = [&] { return reinterpret_cast<T*>(shared + a.layout.at_inner); };
  // Out of the parameters, which come a line of 8 pointers at a time from HBM: a line to a warp.
  constexpr int kPointers = sizeof(StepLayer) / sizeof(char*), kLine = 8;
  for (int line = thread / kWarp * kLine; line < a.num_layers * kPointers; line += kWarps * kLine) {
    const int i = line + thread % kWarp;
    if (thread % kWarp >= kLine || i >= a.num_layers * kPointers) break;
    reinterpret_cast<const char**>(layers)[i] = reinterpret_cast<const char* const*>(a.layers)[i];
  }
  lay_out_units<Shape>(a);
  __syncthreads();
  Weights<Shape> weights(a);
  const T* const table = reinterpret_cast<const T*>(a.token_table) + token * a.embed_dim;
  const T* const places = reinterpret_cast<const T*>(a.position_table) + int64_t(position) * a.embed_dim;
  if (thread * 64 < a.embed_dim) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(table + thread * 64));
    if (a.position_table) asm volatile("prefetch.global.L2 [%0];" ::"l"(places + thread * 64));
  }
  prefetch_norms<Shape>(a, layers);
  fetch_biases<Shape>(a, layers, reinterpret_cast<float*>(shared + a.layout.at_biases));
  // What the end of a row does not fill of its last piece is multiplied by zeros.
  for (int i = a.embed_dim + thread; i < a.layout.embed_room; i += kThreads) x()[i] = from_float<T>(0.f);
  for (int i = a.heads * Shape::kHeadDim + thread; i < a.layout.heads_room; i += kThreads) gathered()[i] = from_float<T>(0.f);
  for (int i = a.ffn_dim + thread; i < a.layout.ffn_room; i += kThreads) inner()[i] = from_float<T>(0.f);
  for (int i = thread; i < a.embed_dim; i += kThreads) {
    const float place = a.position_table ? to_float(places[i]) : 0.f;
    stream()[i] = to_float(table[i]) + place;
  }
  __syncthreads();
  const HeadWork work(a, position);

  for (int layer = 0; layer < a.num_layers; ++layer) {
    const StepLayer& w = layers[layer];
    const auto bias = [&](int product, int i) {
      return reinterpret_cast<const float*>(shared + a.layout.at_biases)[layer * a.layout.biases + a.layout.biases_at[product] + i];
    };
    prefetch_heads<Shape>(a, w, work);
    prefetch_norms<Shape>(a, layer + 1 < a.num_layers ? layers + layer + 1 : nullptr);
    take_normed<Shape>(a, layer ? a.to.from_mlp : nullptr, number, w.norm_weight, w.norm_bias, stream(), x(), room);
    ++number;
    multiply<Shape>(kQkv, x(), weights, partial, [&](int row, int i, float sum, float) {
      send(a.to.qkv + row, from_float<T>(sum + bias(kQkv, i)), number);
    });
    attend<Shape>(a, w, work, number, head_room);
    gather_heads<Shape>(a, work, number, gathered());
    multiply<Shape>(kOut, gathered(), weights, partial, [&](int row, int i, float sum, float) {
      send(a.to.from_heads + row, stream()[row] + sum + bias(kOut, i), number);
    });
    take_normed<Shape>(a, a.to.from_heads, number, w.mlp_norm_weight, w.mlp_norm_bias, stream(), x(), room);
    multiply<Shape>(kUp, x(), weights, partial, [&](int row, int i, float sum, float other) {
      sum += bias(kUp, i);
      if (a.activation == FUSELINE_ACTIVATION_SWIGLU) {
        sum = Silu<T>::value(sum) * (other + bias(kUp, (a.layout.biases_at[kDown] - a.layout.biases_at[kUp]) / 2 + i));
      } else if (a.activation == FUSELINE_ACTIVATION_GELU) {
        sum = GeluErf<T>::value(sum);
      } else {
        sum = GeluTanh<T>::value(sum);
      }
      send(a.to.inner + row, from_float<T>(sum), number);
    });
    receive_rounded<T, kThreads>(a.to.inner, a.ffn_dim, number, inner());
    __syncthreads();
    multiply<Shape>(kDown, inner(), weights, partial, [&](int row, int i, float sum, float) {
      send(a.to.from_mlp + row, stream()[row] + sum + bias(kDown, i), number);
    });
  }

  take_normed<Shape>(a, a.to.from_mlp, number, a.norm_weight, a.norm_bias, stream(), x(), room);
  // Lane 0 of each warp sees some of the logits; of equals the first counts.
  unsigned long long* const best_here = likeliest + thread_anew() / kWarp;
  *best_here = 0;
  __syncwarp();
  multiply<Shape>(kHead, x(), weights, partial, [&](int row, int, float sum, float) {
    const T logit = from_float<T>(sum);
    reinterpret_cast<T*>(a.logits)[row] = logit;
    *best_here = max(*best_here, ranked(logit, row));
  });
  __syncthreads();
  const auto largest = [](unsigned long long best) {  // of a warp
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
    return best;
  };
  const int which = thread_anew(), warp = which / kWarp;
  if (warp == 0) {
    const unsigned long long best = largest(which < kWarps ? likeliest[which] : 0);
    if (which == 0) send_ranked(a.to.likeliest + blockIdx.x, best, number);
  }
  // The last block, which has the fewest rows, waits for the others: all of them have read what it now changes.
  if (blockIdx.x + 1 != gridDim.x) return;
  unsigned long long best = 0;
  for (int i = which; i < int(gridDim.x); i += kThreads) best = max(best, receive_ranked(a.to.likeliest + i, number));
  best = largest(best);
  if (which % kWarp == 0) of_blocks[warp] = best;
  __syncthreads();
  if (warp != 0) return;
  best = largest(which < kWarps ? of_blocks[which] : 0);
  if (which != 0) return;
  *a.token = row_of(best);
  *a.to.steps += 1, *a.length += 1;
#endif
}

// ---- launcher ----

inline int launch_step(const StepArguments& a, const StepPlan& plan, void* stream) {
  const bool narrow = a.head_dim == 64, three = plan.vectors == 3;
  const auto kernel = narrow ? (three ? decode_step<StepShape<64, 3>> : decode_step<StepShape<64, 4>>)
                             : (three ? decode_step<StepShape<128, 3>> : decode_step<StepShape<128, 4>>);
  const int shared = int(plan.shape.shared);
  const cudaError_t raised = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (raised != cudaSuccess) return int(raised);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks are resident, or the launch fails
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(plan.shape.grid));
  config.blockDim = dim3(unsigned(plan.shape.threads));
  config.dynamicSmemBytes = plan.shape.shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a);
  const cudaError_t last = cudaGetLastError();
  return int(launched != cudaSuccess ? launched : last);
}

}  // namespace fuseline
