// Rotary positions: each pair of elements of a head turned by position * base^(-2i / rotary). Backward is the same by minus
// the angle.
//
// Moves: x read once, y written once; cosines and sines come from L2 or are computed. Does: 3 operations an element, and
// where angles are computed about 25 a pair and token. Limit: HBM bandwidth.
//
// Threads: a thread has one token and the same 16 bytes of kHeads heads, all loaded before the first is used: the angles
// are the same in each. Neighbouring threads have neighbouring vectors of a head, then whatever lies next in memory:
// heads of a token, or tokens of a head; so a warp reads and writes whole runs, whatever the head's size. Interleaved
// pairs lie inside a vector. Half-split pairs lie across two: a thread reads its partner's vector too, which its
// neighbours bring into the L1 for themselves, and writes its own alone. Elements behind the rotary dimensions are
// copied. A second tensor over the same tokens (keys beside queries) has the blocks behind those of the first.
//
// An angle is position times the turns that one position makes, in 64-bit fixed point: whole turns overflow, and what is
// left is exact, for any position. fp32 has lost the angle's last digits at position 1,000 already. The turns of a
// vector's pairs are products of two short lists' numbers: a list of all of them lies in so many places of the constant
// cache that a warp waits for each.

#include "device/elementwise.cuh"

#include <cmath>

namespace fuseline {
namespace {

constexpr int kMostPairs = 256;
constexpr int kSplit = 8;  // pairs; no vector has more

// One of the tensors of a launch.
struct RopeTensor {
  const void* x;
  void* y;
  int64_t x_strides[3], y_strides[3];  // of batch, head, token
  uint32_t heads, head_step;           // of all, and between those of a thread
  uint32_t groups;                     // of heads that a thread has, over all tokens
  bool tokens_inside;                  // tokens of a head lie side by side, else heads of a token
  Divisor inner, middle;
};
constexpr int kMostTensors = 2;

struct Rope {
  RopeTensor of[kMostTensors];
  uint32_t blocks_of_first;
  const float* cos;                    // [table_rows, pairs]; null to compute them
  const float* sin;
  int64_t table_rows;
  const int64_t* positions;            // null for 0, 1, ..
  int64_t positions_stride;            // from batch to batch; 0 if they share them
  uint32_t pairs;
  Divisor units;                       // accesses in a head
  float sign;                          // -1 turns back
  bool angles_first;                   // they hang on nothing that an earlier kernel writes
  bool interleaved;                    // a pair's elements are neighbours
};
struct RopeElements : Rope {
  uint64_t turns[kMostPairs];  // of a pair for one position, times 2^64
};
struct Split {
  uint64_t coarse[kMostPairs / kSplit];  // of pair kSplit k for one position, times 2^65
  uint64_t fine[kSplit];                 // the factor from there to pair kSplit k + i, times 2^63
};
struct RopeVectors : Rope {
  Split split;
};
template <int kWide>
using Arguments = std::conditional_t<(kWide > 1), RopeVectors, RopeElements>;

__device__ __forceinline__ void turns_of_pairs(const RopeElements& a, uint32_t pair, uint64_t (&turns)[1]) {
  turns[0] = a.turns[pair];
}
template <int kCount>
__device__ __forceinline__ void turns_of_pairs(const RopeVectors& a, uint32_t pair, uint64_t (&turns)[kCount]) {
  const uint64_t coarse = a.split.coarse[pair / kSplit];
  const uint32_t from = kCount == kSplit ? 0 : pair % kSplit;
#pragma unroll
  for (int i = 0; i < kCount; ++i) turns[i] = __umul64hi(coarse, a.split.fine[from + i]);
}

constexpr int kHeads = 4;

// cos and sin of a fraction of a turn, times 2^64: to about one unit in the last place.
__device__ __forceinline__ float2 cos_sin(uint64_t phase) {
  const uint32_t top = uint32_t(phase >> 32);
  const uint32_t quadrant = (top + 0x20000000u) >> 30;
  const float angle = float(int32_t(top - (quadrant << 30))) * 1.4629180792671596e-9f;  // 2 pi / 2^32
  const float square = angle * angle;
  float s = fmaf(square, -1.9515295891e-4f, 8.3321608736e-3f);
  s = fmaf(square, s, -1.6666654611e-1f);
  s = fmaf(square * angle, s, angle);
  float c = fmaf(square, 2.443315711809948e-5f, -1.388731625493765e-3f);
  c = fmaf(square, c, 4.166664568298827e-2f);
  c = fmaf(square * square, c, fmaf(square, -0.5f, 1.f));
  const float cosine = quadrant & 1 ? s : c, sine = quadrant & 1 ? c : s;
  return make_float2((quadrant + 1) & 2 ? -cosine : cosine, quadrant & 2 ? -sine : sine);
}

// Angles of a unit: a pair's elements are in one vector if interleaved, each in a vector of its own otherwise.
template <int kWide, bool kInterleaved>
constexpr int kAngles = kInterleaved ? kWide / 2 : kWide;

// The angles of pairs `pair`, + 1, ..
template <int kCount, class Given>
__device__ __forceinline__ void computed_angles(const Given& a, int64_t position, uint32_t pair,
                                                float (&cosine)[kCount], float (&sine)[kCount]) {
  uint64_t turns[kCount];
  turns_of_pairs(a, pair, turns);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float2 at = cos_sin(uint64_t(position) * turns[i]);
    cosine[i] = at.x, sine[i] = a.sign * at.y;
  }
}

template <int kCount>
__device__ __forceinline__ void angles_of_table(const Rope& a, int64_t position, uint32_t pair, float (&cosine)[kCount],
                                                float (&sine)[kCount]) {
  if (position < 0 || position >= a.table_rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cosine[i] = sine[i] = __int_as_float(0x7fffffff);
    return;
  }
  const float* cos = a.cos + position * a.pairs + pair;
  const float* sin = a.sin + position * a.pairs + pair;
  if constexpr (kCount == 1) {
    cosine[0] = __ldg(cos), sine[0] = __ldg(sin);
  } else {
    load_reused<float>(cos, cosine);
    load_reused<float>(sin, sine);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sine[i] *= a.sign;
}

// Loads that a neighbour repeats go through the L1.
template <class T, int kWide, bool kInterleaved>
__device__ __forceinline__ Raw<T, kWide> load_shared(const T* at) {
  if constexpr (kWide > 1 && !kInterleaved) {
    return __ldg(reinterpret_cast<const uint4*>(at));
  } else {
    return load_wide<T, kWide>(at);
  }
}

// kInterleaved: of vectors, a pair's elements are neighbours.
template <class T, int kWide, bool kInterleaved>
__global__ void __launch_bounds__(kElementwiseBlock, 3) rope(const __grid_constant__ Arguments<kWide> a) {
  constexpr bool kInside = kInterleaved;  // partners are in the same vector
  const bool interleaved = kWide > 1 ? kInterleaved : a.interleaved;
  let_next_start();
  const bool is_first = blockIdx.x < a.blocks_of_first;
  const RopeTensor& t = a.of[is_first ? 0 : 1];
  const uint32_t thread = (blockIdx.x - (is_first ? 0 : a.blocks_of_first)) * blockDim.x + threadIdx.x;
  const uint32_t group = a.units.divide(thread);
  if (group >= t.groups) return;
  const uint32_t at = (thread - group * a.units.value) * kWide;
  const uint32_t outer = t.inner.divide(group), in = group - outer * t.inner.value;
  const uint32_t batch = t.middle.divide(outer), middle = outer - batch * t.middle.value;
  const uint32_t token = t.tokens_inside ? in : middle, head = t.tokens_inside ? middle : in;
  const uint32_t heads = t.heads, head_step = t.head_step;
  int64_t from = batch * t.x_strides[0] + head * t.x_strides[1] + token * t.x_strides[2] + at;
  int64_t to = batch * t.y_strides[0] + head * t.y_strides[1] + token * t.y_strides[2] + at;
  const int64_t x_step = head_step * t.x_strides[1], y_step = head_step * t.y_strides[1];
  // The second element of a pair turns by the same angle, and takes the other's part with the other sign.
  const bool second = interleaved ? at % 2 == 1 : at >= a.pairs;
  const uint32_t pair = interleaved ? at / 2 : second ? at - a.pairs : at;
  float cosine[kAngles<kWide, kInterleaved>], sine[kAngles<kWide, kInterleaved>];
  make_ready(from), make_ready(to);
  if (a.angles_first && at < 2 * a.pairs) {
    computed_angles(a, int64_t(token), pair, cosine, sine);
#pragma unroll
    for (int i = 0; i < kAngles<kWide, kInterleaved>; ++i) make_ready(cosine[i]), make_ready(sine[i]);
  }
  wait_for_earlier();

  const T* const x = static_cast<const T*>(t.x) + from;
  T* const y = static_cast<T*>(t.y) + to;
  Raw<T, kWide> raw[kHeads];
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (head + u * head_step < heads) raw[u] = load_shared<T, kWide, kInterleaved>(x + u * x_step);
  }
  if (at >= 2 * a.pairs) {  // behind the rotary dimensions
#pragma unroll
    for (int u = 0; u < kHeads; ++u) {
      if (head + u * head_step < heads) *reinterpret_cast<Raw<T, kWide>*>(y + u * y_step) = raw[u];
    }
    return;
  }

  Raw<T, kWide> partner[kHeads];
  if constexpr (!kInside) {
    const int64_t apart = interleaved ? 1 : int64_t(a.pairs);
#pragma unroll
    for (int u = 0; u < kHeads; ++u) {
      if (head + u * head_step >= heads) continue;
      partner[u] = load_shared<T, kWide, kInterleaved>(x + u * x_step + (second ? -apart : apart));
    }
  }
  if (!a.angles_first) {
    const int64_t position = a.positions ? __ldg(a.positions + batch * a.positions_stride + token) : int64_t(token);
    if (a.cos) {
      angles_of_table(a, position, pair, cosine, sine);
    } else {
      computed_angles(a, position, pair, cosine, sine);
    }
  }
  if constexpr (!kInside) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) sine[i] = second ? sine[i] : -sine[i];
  }
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (head + u * head_step >= heads) continue;
    float own[kWide], other[kWide], turned[kWide];
    widen<T, kWide>(raw[u], own);
    if constexpr (!kInside) widen<T, kWide>(partner[u], other);
    // Fused by hand, so that every layout of the tensors gets the same bits.
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      if constexpr (kInside) {
        const float part = __fmul_rn(own[i ^ 1], sine[i / 2]);
        turned[i] = fmaf(own[i], cosine[i / 2], i % 2 ? part : -part);
      } else {
        turned[i] = fmaf(own[i], cosine[i], __fmul_rn(other[i], sine[i]));
      }
    }
    store_wide<T, kWide>(y + u * y_step, turned);
  }
}

// ---- launcher ----

// The turns of the last base and size asked for: a model has one of each, and they take longer than the launch.
struct Turns {
  double base = 0;
  int64_t rotary = 0;
  Split split{};
  uint64_t turns[kMostPairs];
};

// A base under 1 has pairs of more than a turn, which are not products of what is left of two.
bool as_products(double base) { return base >= 1; }

uint64_t upper_half(uint64_t a, uint64_t b) {
  const uint64_t a_high = a >> 32, a_low = uint32_t(a), b_high = b >> 32, b_low = uint32_t(b);
  const uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
  return a_high * b_high + (middle >> 32) + ((a_low * b_high + uint32_t(middle)) >> 32);
}

const Turns& turns_of(double base, int64_t rotary) {
  static thread_local Turns kept;
  if (base == kept.base && rotary == kept.rotary) return kept;
  constexpr long double kTurn = 6.283185307179586476925286766559L;
  const auto power = [&](int64_t pair) { return std::pow(static_cast<long double>(base), -2.0L * pair / rotary); };
  const int64_t pairs = rotary / 2;
  if (as_products(base)) {
    for (int64_t i = 0; i < pairs; i += kSplit) {
      kept.split.coarse[i / kSplit] = uint64_t(std::ldexp(power(i) / kTurn, 65));
    }
    for (int64_t i = 0; i < std::min<int64_t>(kSplit, pairs); ++i) {
      kept.split.fine[i] = uint64_t(std::ldexp(power(i), 63));
    }
    for (int64_t i = 0; i < pairs; ++i) {
      kept.turns[i] = upper_half(kept.split.coarse[i / kSplit], kept.split.fine[i % kSplit]);
    }
  } else {
    for (int64_t i = 0; i < pairs; ++i) {
      const long double turns = power(i) / kTurn;
      kept.turns[i] = uint64_t(std::ldexp(turns - std::floor(turns), 64));
    }
  }
  kept.base = base, kept.rotary = rotary;
  return kept;
}

void take(RopeElements& a, const Turns& turns) { std::copy(turns.turns, turns.turns + a.pairs, a.turns); }
void take(RopeVectors& a, const Turns& turns) { a.split = turns.split; }

// Threads of a multiprocessor that run at once. Where that is all of them, angles that hang on no earlier kernel are ready
// before it has ended.
constexpr int64_t kAtOnce = 3 * kElementwiseBlock;

// `count` of the tensors of `given`, over B sequences of T_ tokens.
template <class T, int kWide>
int run_wide(const Rope& given, int count, double base, int64_t B, int64_t T_, int64_t D, bool interleaved, void* stream) {
  Arguments<kWide> a{};
  static_cast<Rope&>(a) = given;
  if (!a.cos) take(a, turns_of(base, 2 * int64_t(a.pairs)));
  a.units = Divisor(uint32_t(D / kWide));
  int64_t threads[kMostTensors] = {};
  for (int i = 0; i < count; ++i) {
    RopeTensor& t = a.of[i];
    t.head_step = uint32_t(divide_up(t.heads, kHeads));
    // Tokens of a head lie side by side where their stride is the smaller one.
    t.tokens_inside = t.x_strides[2] <= t.x_strides[1];
    t.inner = Divisor(t.tokens_inside ? uint32_t(T_) : t.head_step);
    t.middle = Divisor(t.tokens_inside ? t.head_step : uint32_t(T_));
    const int64_t groups = B * T_ * t.head_step;
    threads[i] = groups * a.units.value;
    if (divide_up(threads[i], kElementwiseBlock) > (int64_t(1) << 24)) return int(cudaErrorInvalidConfiguration);
    t.groups = uint32_t(groups);
  }
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  a.angles_first = !a.cos && !a.positions && threads[0] + threads[1] <= device.processors * kAtOnce;
  const int block = block_for(threads[0] + threads[1], device);
  a.blocks_of_first = uint32_t(divide_up(threads[0], block));
  a.interleaved = interleaved;
  auto kernel = rope<T, kWide, false>;
  if constexpr (kWide > 1) kernel = interleaved ? rope<T, kWide, true> : kernel;
  const int64_t blocks = a.blocks_of_first + divide_up(threads[1], block);
  return launch(kernel, a, blocks, dim3(unsigned(block)), 0, 1, stream, device.clusters);
}

template <class T>
int run(const Rope& a, int count, double base, int64_t B, int64_t T_, int64_t D, bool interleaved, void* stream) {
  constexpr int kSize = kVector<T>;
  bool vectors = (a.cos || as_products(base)) && a.pairs % kSize == 0 && D % kSize == 0 &&
                 offset_in_vector(a.cos) == 0 && offset_in_vector(a.sin) == 0;
  for (int i = 0; i < count; ++i) {
    const RopeTensor& t = a.of[i];
    vectors = vectors && offset_in_vector(t.x) == 0 && offset_in_vector(t.y) == 0;
    for (int k = 0; k < 3; ++k) vectors = vectors && t.x_strides[k] % kSize == 0 && t.y_strides[k] % kSize == 0;
  }
  if (vectors) return run_wide<T, kSize>(a, count, base, B, T_, D, interleaved, stream);
  return run_wide<T, 1>(a, count, base, B, T_, D, interleaved, stream);
}

}  // namespace
}  // namespace fuseline

int fuseline_rope(const fuseline_rope_tensor* tensors, int count, const float* cos, const float* sin, int64_t table_rows,
                  double base, const int64_t* positions, int64_t positions_stride, int64_t B, int64_t T, int64_t D,
                  int64_t rotary, int interleaved, int backward, int dtype, void* stream) {
  using namespace fuseline;
  if (count < 1 || count > kMostTensors || B < 0 || T < 0 || D < 0 || rotary < 0 || rotary > D) return FUSELINE_BAD_SIZE;
  if (rotary % 2 != 0 || (!cos && rotary / 2 > kMostPairs)) return FUSELINE_UNSUPPORTED;
  Rope a{};
  int some = 0;  // tensors with heads
  for (int i = 0; i < count; ++i) {
    const fuseline_rope_tensor& given = tensors[i];
    if (given.heads < 0) return FUSELINE_BAD_SIZE;
    if (given.heads == 0) continue;
    RopeTensor& t = a.of[some++];
    t.x = given.x, t.y = given.y, t.heads = uint32_t(given.heads);
    std::copy_n(given.x_strides, 3, t.x_strides);
    std::copy_n(given.y_strides, 3, t.y_strides);
  }
  if (B == 0 || some == 0 || T == 0 || D == 0) return 0;
  a.cos = cos, a.sin = sin, a.table_rows = table_rows;
  a.positions = positions, a.positions_stride = positions_stride;
  a.pairs = uint32_t(rotary / 2), a.sign = backward ? -1.f : 1.f;
  return with_dtype(dtype, [&](auto type) {
    return run<decltype(type)>(a, some, base, B, T, D, interleaved != 0, stream);
  });
}
