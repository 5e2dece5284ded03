// AdamW for all parameters in one launch, with the bits of torch's fused kernel.
//
// Moves: weights and both moments in and out, gradients in: 14 bytes an element of 16 bits, 28 of fp32. Computes about 45
// instructions an element: two divisions and a square root are among them, rounded correctly. Limit: memory; in 16 bits half
// of the issue slots are taken.
//
// Threads: a block has a piece of one parameter and takes it in two turns, of which each thread has two vectors of the
// weights (16 bytes) on their way, and as many elements of the others: 128 bytes a thread. It looks for its parameter in the
// launch's arguments while the kernel before it ends. Parameters that do not begin on whole vectors, and the last
// elements of others, go one by one.
//
// Step counts stand on the device. Each block counts itself in when it has read that of its parameter; the last to do so
// counts all of them up.
//
// Behind a norm the pieces are taken from the last to the first: what the norm has read last is still in the L2.

#include "optimizer/tensors.cuh"

namespace fuseline {
namespace {

constexpr int kHeld = 2, kTurns = 2;
constexpr int kAtOnce = 4;  // blocks of a multiprocessor
static_assert(kTensorBlock * kHeld * kTurns * 16 == kPieceBytes);

struct AdamW {
  fuseline_adamw_parameter parameters[kMostParameters];
  uint32_t first[kMostParameters];
  bool vectors[kMostParameters];  // whether all tensors of a parameter begin on whole vectors
  const float *norm, *found_inf;
  uint32_t* arrived;
  float max_norm;
  uint32_t pieces;
  int count;
};
static_assert(sizeof(AdamW) <= kMostArgumentBytes);

// ---- one element ----

// What a parameter's elements share in a step.
struct Rates {
  float clip, decay, step_size, root;
  float wide_root, reciprocal;  // root * kRootOfScale, and 1 over it
  uint32_t limit;               // second moments below it, as bits, take the quick way
};

constexpr float kScale = 0x1p96f, kRootOfScale = 0x1p48f;  // no second moment so scaled is subnormal

__device__ __forceinline__ float clipping(const AdamW& a) {
  if (!a.norm) return 1.f;
  const float factor = a.max_norm / (*a.norm + 1e-6f);
  return factor > 1.f ? 1.f : factor;  // NaN stays NaN
}

__device__ __forceinline__ Rates rates_of(const fuseline_adamw_parameter& p, float step, float lr, float clip) {
  Rates r{clip, __fmul_rn(lr, p.weight_decay), __fdiv_rn(lr, 1.f - powf(p.beta1, step)),
          __fsqrt_rn(1.f - powf(p.beta2, step))};
  r.wide_root = r.root * kRootOfScale;
  r.reciprocal = __fdiv_rn(1.f, r.wide_root);
  const bool quick = r.root >= 0x1p-20f && r.root <= 1.f && p.eps >= 0x1p-40f && p.eps <= 1.f;
  r.limit = quick ? __float_as_uint(0x1p30f) : 0u;
  return r;
}

// `by` may be approximate in its last bits: a / b, correctly rounded, where nothing on the way overflows or is subnormal.
__device__ __forceinline__ float divided(float a, float b, float by) {
  float quotient = __fmul_rn(a, by);
  quotient = __fmaf_rn(__fmaf_rn(-b, quotient, a), by, quotient);
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), by, quotient);
}

// The weight after its step: by the steps of the compilers' own square root and division where their checks pass, without the
// checks. `rare`: whether they may not pass. A change below 2^-50 is none to a weight of 2^-20, whatever its last bits are.
__device__ __forceinline__ float stepped(const Rates& r, float eps, float weight, float m, float v, bool& rare) {
  const float change = __fmul_rn(r.step_size, m), size = fabsf(change);
  rare |= (__float_as_uint(v) >= r.limit) | !(size < 0x1p60f) |
          ((size < 0x1p-90f) & (fabsf(weight) < 0x1p-20f) & (__float_as_uint(change) != 0u));
  const float scaled = __fmul_rn(v, kScale);
  float by;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(by) : "f"(fmaxf(scaled, 0x1p-60f)));
  const float near = __fmul_rn(scaled, by);
  const float root = __fmaf_rn(__fmaf_rn(-near, near, scaled), 0.5f * by, near);
  const float denominator = __fadd_rn(divided(root, r.wide_root, r.reciprocal), eps);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(by) : "f"(denominator));
  by = __fmaf_rn(by, __fmaf_rn(-denominator, by, 1.f), by);
  return __fsub_rn(weight, divided(change, denominator, by));
}

__device__ __forceinline__ float stepped_rarely(const Rates& r, float eps, float weight, float m, float v) {
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), r.root), eps);
  return __fsub_rn(weight, __fdiv_rn(__fmul_rn(r.step_size, m), denominator));
}

// Some elements of one parameter, one after the other in registers.
template <int kCount>
__device__ __forceinline__ void update(const fuseline_adamw_parameter& p, const Rates& r, float (&weights)[kCount],
                                       const float (&grads)[kCount], float (&ms)[kCount], float (&vs)[kCount]) {
  float changed[kCount];
  bool rare = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float g = __fmul_rn(grads[i], r.clip), square = __fmul_rn(g, g);
    if (p.weight_decay != 0.f) weights[i] = __fmaf_rn(-r.decay, weights[i], weights[i]);
    ms[i] = __fmaf_rn(p.beta1, ms[i], __fmaf_rn(-p.beta1, g, g));
    vs[i] = __fmaf_rn(p.beta2, vs[i], __fmaf_rn(-p.beta2, square, square));
    changed[i] = stepped(r, p.eps, weights[i], ms[i], vs[i], rare);
  }
  if (__builtin_expect(rare, false)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) changed[i] = stepped_rarely(r, p.eps, weights[i], ms[i], vs[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) weights[i] = changed[i];
}

// ---- vectors ----

// A vector of each of a parameter's tensors.
struct Held {
  uint4 weight, grad, m, v;
};

// The elements of one of a vector's four words: one of fp32, or two.
template <class T>
constexpr int kEach = 4 / int(sizeof(T));

template <class T>
__device__ __forceinline__ void unpack_word(uint32_t word, float (&values)[kEach<T>]) {
  if constexpr (sizeof(T) == 4) {
    values[0] = __uint_as_float(word);
  } else {
    const float2 pair = unpack_pair<T>(word);
    values[0] = pair.x, values[1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack_word(const float (&values)[kEach<T>]) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(values[0]);
  } else {
    return pack_pair<T>(values[0], values[1]);
  }
}

template <class T>
__device__ __forceinline__ void update_word(const fuseline_adamw_parameter& p, const Rates& r, uint32_t& weight,
                                            uint32_t grad, uint32_t& m, uint32_t& v) {
  float weights[kEach<T>], grads[kEach<T>], ms[kEach<T>], vs[kEach<T>];
  unpack_word<T>(weight, weights), unpack_word<T>(grad, grads), unpack_word<T>(m, ms), unpack_word<T>(v, vs);
  update(p, r, weights, grads, ms, vs);
  weight = pack_word<T>(weights), m = pack_word<T>(ms), v = pack_word<T>(vs);
}

// ---- the kernel ----

template <class T>
__global__ void __launch_bounds__(kTensorBlock, kAtOnce) adamw(const __grid_constant__ AdamW a) {
  constexpr int kWide = kVector<T>;
  const uint32_t piece = a.norm ? a.pieces - 1 - blockIdx.x : blockIdx.x;
  const int index = tensor_of(a.first, 0, a.count, piece);
  const fuseline_adamw_parameter& p = a.parameters[index];
  const int64_t start = int64_t(piece - a.first[index]) * kPiece<T>;
  const int left = int(max(int64_t(0), min(int64_t(kPiece<T>), p.count - start)));
  const int whole = a.vectors[index] ? left / kWide : 0;
  T* const weight = static_cast<T*>(p.weight) + start;
  T* const m = static_cast<T*>(p.exp_avg) + start;
  T* const v = static_cast<T*>(p.exp_avg_sq) + start;
  const T* const grad = static_cast<const T*>(p.grad) + start;
  const int thread = threadIdx.x;
  __shared__ Rates rates;
  __shared__ bool is_last;

  wait_for_earlier();
  if (a.found_inf && *a.found_inf == 1.f) return;
  Held held[kHeld];
  const auto vector = [&](int turn, int k) { return (turn * kHeld + k) * kTensorBlock + int(threadIdx.x); };
  const auto load = [&](int turn) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (vector(turn, k) >= whole) break;
      const int at = vector(turn, k) * kWide;
      held[k] = {load_once(weight + at), load_once(grad + at), load_once(m + at), load_once(v + at)};
    }
  };
  load(0);
  if (thread == 0) rates = rates_of(p, *p.step + 1.f, p.lr_at ? *p.lr_at : p.lr, clipping(a));
  __syncthreads();
  if (thread == 0) is_last = arrive(a.arrived) == gridDim.x - 1;

#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    if (turn > 0) load(turn);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (vector(turn, k) >= whole) break;
      const int at = vector(turn, k) * kWide;
      Held& h = held[k];
      update_word<T>(p, rates, h.weight.x, h.grad.x, h.m.x, h.v.x);
      update_word<T>(p, rates, h.weight.y, h.grad.y, h.m.y, h.v.y);
      update_word<T>(p, rates, h.weight.z, h.grad.z, h.m.z, h.v.z);
      update_word<T>(p, rates, h.weight.w, h.grad.w, h.m.w, h.v.w);
      __stcs(reinterpret_cast<uint4*>(weight + at), h.weight);
      __stcs(reinterpret_cast<uint4*>(m + at), h.m);
      __stcs(reinterpret_cast<uint4*>(v + at), h.v);
    }
  }
#pragma unroll 1
  for (int i = whole * kWide + thread; i < left; i += kTensorBlock) {
    float w[1] = {to_float(weight[i])}, ms[1] = {to_float(m[i])}, vs[1] = {to_float(v[i])};
    const float g[1] = {to_float(grad[i])};
    update(p, rates, w, g, ms, vs);
    weight[i] = from_float<T>(w[0]), m[i] = from_float<T>(ms[0]), v[i] = from_float<T>(vs[0]);
  }

  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = thread; i < a.count; i += kTensorBlock) *a.parameters[i].step += 1.f;
  if (thread == 0) *a.arrived = 0;
}

// ---- launcher ----

bool on_vectors(const fuseline_adamw_parameter& p) {
  return (offset_in_vector(p.weight) | offset_in_vector(p.exp_avg) | offset_in_vector(p.exp_avg_sq) |
          offset_in_vector(p.grad)) == 0;
}

template <class T>
int run(const fuseline_adamw_parameter* parameters, const TensorsPlan& plan, AdamW& a, const Device& device, void* stream) {
  for (const TensorsLaunch& by : plan) {
    uint32_t first = 0;
    for (int64_t i = 0; i < by.tensors; ++i) {
      const fuseline_adamw_parameter& p = parameters[by.first + i];
      a.parameters[i] = p, a.vectors[i] = on_vectors(p), a.first[i] = first;
      first += uint32_t(divide_up(p.count, kPiece<T>));
    }
    a.count = int(by.tensors);
    a.pieces = uint32_t(by.shape.grid);  // one at least: steps are counted where there is nothing else to do, too
    if (const int code = launch(adamw<T>, a, by.shape, device, stream)) return code;
  }
  return 0;
}

TensorsPlan plan_of(const fuseline_adamw_parameter* parameters, int64_t count, int dtype) {
  return plan_adamw(count, [&](int64_t i) { return parameters[i].count; }, dtype);
}

}  // namespace
}  // namespace fuseline

using namespace fuseline;

int fuseline_adamw(const fuseline_adamw_parameter* parameters, int64_t count, int dtype, const float* norm,
                   double max_norm, const float* found_inf, uint32_t* arrived, void* stream) {
  const TensorsPlan plan = plan_of(parameters, count, dtype);
  if (plan.code != 0) return plan.code;
  Device device;
  if (const cudaError_t error = current_device(device); error != cudaSuccess) return int(error);
  AdamW a{};
  a.norm = norm, a.found_inf = found_inf, a.arrived = arrived, a.max_norm = float(max_norm);
  return with_dtype(dtype, [&](auto type) { return run<decltype(type)>(parameters, plan, a, device, stream); });
}

int64_t fuseline_adamw_explain(const fuseline_adamw_parameter* parameters, int64_t count, int dtype,
                               fuseline_tensors_launch* launches, int64_t most) {
  return write_launches(plan_of(parameters, count, dtype), launches, most);
}

int fuseline_launches_large_arguments(void) {
  constexpr int kFirst = 12010;  // the first CUDA version whose drivers do
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version >= kFirst;
}
