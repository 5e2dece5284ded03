// Rotary positions: each pair of elements of a head turned by position * base^(-2i / rotary). Backward is the same by minus
// the angle.
//
// Moves: x read once, y written once; cosines and sines come from L2 or are computed. Does: 3 operations an element, and
// where angles are computed about 25 a pair and token. Limit: HBM bandwidth.
//
// Threads: a thread has one token and the pairs of two 16-byte vectors of a head, half of the rotary dimensions apart, and
// turns those of kHeads heads, all loaded before the first is used: the angles are the same in each. In both layouts
// the two vectors are those at the same place: half-split pairs lie across them, interleaved ones inside. Elements
// behind the rotary dimensions are copied. Neighbouring threads have the neighbouring vectors of a head, then
// whatever lies next in memory: heads of a token, or tokens of a head.
//
// An angle is position times the turns that one position makes, in 64-bit fixed point: whole turns overflow, and what is
// left is exact, for any position. fp32 has lost the angle's last digits at position 1,000 already.

#include "device/elementwise.cuh"

#include <cmath>

namespace fuseline {
namespace {

constexpr int kMostPairs = 256;

struct Rope {
  const void* x;
  void* y;
  int64_t x_strides[3], y_strides[3];  // of batch, head, token
  const float* cos;                    // [table_rows, pairs]; null to compute them
  const float* sin;
  int64_t table_rows;
  const int64_t* positions;            // null for 0, 1, ..
  int64_t positions_stride;            // from batch to batch; 0 if they share them
  uint32_t heads, head_step;           // of all, and between those of a thread
  uint32_t pairs, rotary_units;        // a unit is what a thread has of a head
  bool tokens_inside;                  // tokens of a head lie side by side, else heads of a token
  Divisor units, inner, middle;
  float sign;                          // -1 turns back
  uint64_t turns[kMostPairs];          // of a pair for one position, times 2^64
};

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

// Which angle slot `i` of a unit takes, and which two elements of its 2 * kWide it turns.
template <int kWide, bool kInterleaved>
struct Layout {
  static constexpr int kHalf = kWide / 2;
  static __device__ __forceinline__ uint32_t pair(uint32_t unit, int i, uint32_t pairs) {
    if (!kInterleaved || kWide == 1) return unit * kWide + i;
    return unit * kHalf + (i < kHalf ? i : pairs / 2 + i - kHalf);
  }
  static __device__ constexpr int one(int i) {
    return !kInterleaved || kWide == 1 ? i : i < kHalf ? 2 * i : kWide + 2 * (i - kHalf);
  }
  static __device__ constexpr int other(int i) { return !kInterleaved || kWide == 1 ? i + kWide : one(i) + 1; }
};

template <int kWide, bool kInterleaved>
__device__ __forceinline__ void angles(const Rope& a, int64_t position, uint32_t unit, float (&cosine)[kWide],
                                       float (&sine)[kWide]) {
  using Of = Layout<kWide, kInterleaved>;
  if (a.cos == nullptr) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float2 at = cos_sin(uint64_t(position) * a.turns[Of::pair(unit, i, a.pairs)]);
      cosine[i] = at.x, sine[i] = at.y;
    }
  } else if (position < 0 || position >= a.table_rows) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) cosine[i] = sine[i] = __int_as_float(0x7fffffff);
  } else {
    const float* cos = a.cos + position * a.pairs;
    const float* sin = a.sin + position * a.pairs;
    constexpr int kRun = kWide == 1 ? 1 : kInterleaved ? kWide / 2 : kWide;  // pairs side by side
#pragma unroll
    for (int i = 0; i < kWide; i += kRun) {
      const uint32_t pair = Of::pair(unit, i, a.pairs);
      if constexpr (kRun == 1) {
        cosine[i] = __ldg(cos + pair), sine[i] = __ldg(sin + pair);
      } else {
        float run[kRun];
        load_reused<float>(cos + pair, run);
#pragma unroll
        for (int k = 0; k < kRun; ++k) cosine[i + k] = run[k];
        load_reused<float>(sin + pair, run);
#pragma unroll
        for (int k = 0; k < kRun; ++k) sine[i + k] = run[k];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) sine[i] *= a.sign;
}

template <class T, int kWide, bool kInterleaved>
__global__ void __launch_bounds__(kElementwiseBlock, 3) rope(const __grid_constant__ Rope a, uint32_t groups) {
  using Of = Layout<kWide, kInterleaved>;
  const uint32_t thread = blockIdx.x * uint32_t(kElementwiseBlock) + threadIdx.x;
  const uint32_t group = a.units.divide(thread);
  if (group >= groups) return;
  const uint32_t unit = thread - group * a.units.value;
  const uint32_t outer = a.inner.divide(group), in = group - outer * a.inner.value;
  const uint32_t batch = a.middle.divide(outer), middle = outer - batch * a.middle.value;
  const uint32_t token = a.tokens_inside ? in : middle, head = a.tokens_inside ? middle : in;
  const T* x = static_cast<const T*>(a.x) + batch * a.x_strides[0] + head * a.x_strides[1] + token * a.x_strides[2];
  T* y = static_cast<T*>(a.y) + batch * a.y_strides[0] + head * a.y_strides[1] + token * a.y_strides[2];
  const int64_t x_step = a.head_step * a.x_strides[1], y_step = a.head_step * a.y_strides[1];

  if (unit >= a.rotary_units) {  // behind the rotary dimensions
    const uint32_t at = 2 * a.pairs + (unit - a.rotary_units) * kWide;
    Raw<T, kWide> raw[kHeads];
#pragma unroll
    for (int u = 0; u < kHeads; ++u) {
      if (head + u * a.head_step < a.heads) raw[u] = load_wide<T, kWide>(x + u * x_step + at);
    }
#pragma unroll
    for (int u = 0; u < kHeads; ++u) {
      if (head + u * a.head_step < a.heads) *reinterpret_cast<Raw<T, kWide>*>(y + u * y_step + at) = raw[u];
    }
    return;
  }

  const uint32_t one = kInterleaved && kWide == 1 ? 2 * unit : unit * kWide;
  const uint32_t other = kInterleaved && kWide == 1 ? one + 1 : one + a.pairs;
  Raw<T, kWide> raw[kHeads][2];
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (head + u * a.head_step >= a.heads) continue;
    raw[u][0] = load_wide<T, kWide>(x + u * x_step + one);
    raw[u][1] = load_wide<T, kWide>(x + u * x_step + other);
  }
  const int64_t position = a.positions ? __ldg(a.positions + batch * a.positions_stride + token) : int64_t(token);
  float cosine[kWide], sine[kWide];
  angles<kWide, kInterleaved>(a, position, unit, cosine, sine);
#pragma unroll
  for (int u = 0; u < kHeads; ++u) {
    if (head + u * a.head_step >= a.heads) continue;
    float half[2][kWide], turned[2][kWide];
    widen<T, kWide>(raw[u][0], half[0]);
    widen<T, kWide>(raw[u][1], half[1]);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float left = half[Of::one(i) / kWide][Of::one(i) % kWide];
      const float right = half[Of::other(i) / kWide][Of::other(i) % kWide];
      // Fused by hand, so that every layout of the tensors gets the same bits.
      turned[Of::one(i) / kWide][Of::one(i) % kWide] = fmaf(left, cosine[i], -__fmul_rn(right, sine[i]));
      turned[Of::other(i) / kWide][Of::other(i) % kWide] = fmaf(right, cosine[i], __fmul_rn(left, sine[i]));
    }
    store_wide<T, kWide>(y + u * y_step + one, turned[0]);
    store_wide<T, kWide>(y + u * y_step + other, turned[1]);
  }
}

// ---- launcher ----

// The turns of each pair for one position, times 2^64, of the last base and size asked for: a model has one of each, and
// they take longer than the launch.
const uint64_t* turns_of(double base, int64_t rotary) {
  static thread_local double kept_base = 0;
  static thread_local int64_t kept_rotary = 0;
  static thread_local uint64_t kept[kMostPairs];
  if (base == kept_base && rotary == kept_rotary) return kept;
  for (int64_t i = 0; i < rotary / 2; ++i) {
    constexpr long double kTurn = 6.283185307179586476925286766559L;
    const long double turns = std::pow(static_cast<long double>(base), -2.0L * i / rotary) / kTurn;
    kept[i] = uint64_t(std::ldexp(turns - std::floor(turns), 64));
  }
  kept_base = base, kept_rotary = rotary;
  return kept;
}

template <class T, int kWide>
int run_wide(Rope& a, int64_t B, int64_t T_, int64_t D, bool interleaved, void* stream) {
  a.rotary_units = a.pairs / kWide;
  a.units = Divisor(uint32_t(a.rotary_units + (D - 2 * int64_t(a.pairs)) / kWide));
  a.head_step = uint32_t(divide_up(a.heads, kHeads));
  // Tokens of a head lie side by side where their stride is the smaller one.
  a.tokens_inside = a.x_strides[2] <= a.x_strides[1];
  a.inner = Divisor(a.tokens_inside ? uint32_t(T_) : a.head_step);
  a.middle = Divisor(a.tokens_inside ? a.head_step : uint32_t(T_));
  const int64_t groups = B * T_ * a.head_step;
  const int64_t blocks = divide_up(groups * a.units.value, kElementwiseBlock);
  if (blocks > (int64_t(1) << 24)) return int(cudaErrorInvalidConfiguration);
  const auto kernel = interleaved ? rope<T, kWide, true> : rope<T, kWide, false>;
  kernel<<<unsigned(blocks), kElementwiseBlock, 0, static_cast<cudaStream_t>(stream)>>>(a, uint32_t(groups));
  return int(cudaGetLastError());
}

template <class T>
int run(Rope& a, int64_t B, int64_t T_, int64_t D, bool interleaved, void* stream) {
  constexpr int kSize = kVector<T>;
  bool vectors = a.pairs % kSize == 0 && D % kSize == 0 && offset_in_vector(a.x) == 0 && offset_in_vector(a.y) == 0 &&
                 offset_in_vector(a.cos) == 0 && offset_in_vector(a.sin) == 0;
  for (int i = 0; i < 3; ++i) vectors = vectors && a.x_strides[i] % kSize == 0 && a.y_strides[i] % kSize == 0;
  if (vectors) return run_wide<T, kSize>(a, B, T_, D, interleaved, stream);
  return run_wide<T, 1>(a, B, T_, D, interleaved, stream);
}

}  // namespace
}  // namespace fuseline

int fuseline_rope(const void* x, void* y, const int64_t x_strides[3], const int64_t y_strides[3], const float* cos,
                  const float* sin, int64_t table_rows, double base, const int64_t* positions, int64_t positions_stride,
                  int64_t B, int64_t H, int64_t T, int64_t D, int64_t rotary, int interleaved, int backward, int dtype,
                  void* stream) {
  using namespace fuseline;
  if (B < 0 || H < 0 || T < 0 || D < 0 || rotary < 0 || rotary > D) return FUSELINE_BAD_SIZE;
  if (rotary % 2 != 0 || (!cos && rotary / 2 > kMostPairs)) return FUSELINE_UNSUPPORTED;
  if (B == 0 || H == 0 || T == 0 || D == 0) return 0;
  Rope a{};
  a.x = x, a.y = y, a.cos = cos, a.sin = sin, a.table_rows = table_rows;
  std::copy_n(x_strides, 3, a.x_strides);
  std::copy_n(y_strides, 3, a.y_strides);
  a.positions = positions, a.positions_stride = positions_stride;
  a.heads = uint32_t(H), a.pairs = uint32_t(rotary / 2), a.sign = backward ? -1.f : 1.f;
  if (!cos) std::copy_n(turns_of(base, rotary), rotary / 2, a.turns);
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(a, B, T, D, interleaved != 0, stream); });
}
