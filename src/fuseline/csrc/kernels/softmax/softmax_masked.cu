// y = softmax(scale * x + mask) over rows that keep to 16-byte steps, under a mask that can be read a vector of x at a
// time, or causal alone; softmax_forward.cu has the rest.
//
// Moves and does what that file says, and the mask: from the L1 or L2 where it is broadcast. A warp's loads of x and of
// the mask are on their way together, so a row waits once.
//
// Threads: those of a row are a part of a warp, a warp or a block, and each holds kHeld vectors in registers as fp32. A
// thread holds few where rows are few, so that all of the chip has some.

#include "device/overlap.cuh"
#include "softmax.cuh"

namespace fuseline {
namespace {

// The elements of a mask that go with a vector of x.
template <class T, int kKind>
struct MaskVector {
  static constexpr int kElement = kKind == FUSELINE_MASK_BOOL ? 1 : kKind == FUSELINE_MASK_ADD ? int(sizeof(T)) : 4;
  static constexpr int kWords = kVector<T> * kElement / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const void* mask, int64_t at) {
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(static_cast<const char*>(mask) + at * kElement);
    if constexpr (kWords == 1) {
      words[0] = __ldg(from);
    } else if constexpr (kWords == 2) {
      const uint2 raw = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = raw.x, words[1] = raw.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
        words[i] = raw.x, words[i + 1] = raw.y, words[i + 2] = raw.z, words[i + 3] = raw.w;
      }
    }
  }

  __device__ __forceinline__ void apply(float (&score)[kVector<T>]) const {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if constexpr (kKind == FUSELINE_MASK_BOOL) {
        if ((words[i / 4] & (0xffu << (8 * (i % 4)))) == 0) score[i] = -kInfinity;
      } else if constexpr (kElement == 4) {
        score[i] += __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack_pair<T>(words[i / 2]);
        score[i] += i % 2 ? pair.y : pair.x;
      }
    }
  }
};

// The scores of kHeld vectors, `step` elements apart, of which the first begins with element `start`; -inf where no key
// is to be seen. `mask_at`: of the row's first element; element 0 is read for what lies behind the row.
template <class T, int kKind, int kHeld>
__device__ __forceinline__ void masked_scores(const SoftmaxForward& a, int64_t mask_at, const uint4 (&raw)[kHeld],
                                              int start, int step, int n, int visible,
                                              float (&score)[kHeld][kVector<T>]) {
  MaskVector<T, kKind == FUSELINE_MASK_NONE ? FUSELINE_MASK_BOOL : kKind> mask[kHeld];
  if constexpr (kKind != FUSELINE_MASK_NONE) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int first = start + k * step;
      mask[k].load(a.mask, mask_at + (first < n ? first : 0));
    }
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int first = start + k * step;
    unpack<T>(raw[k], score[k]);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) score[k][i] = __fmul_rn(score[k][i], a.scale);  // equals stay equal
    if constexpr (kKind != FUSELINE_MASK_NONE) mask[k].apply(score[k]);
    if (first + kVector<T> > visible) {
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        if (first + i >= visible) score[k][i] = -kInfinity;
      }
    }
  }
}

// ---- kernels ----

template <class T, int kHeld, bool kOneWarp>
__global__ void __launch_bounds__(most_threads(kOneWarp), kOneWarp ? 4 : 2) softmax_masked_rows(const SoftmaxForward a) {
  __shared__ MaxSum<T> shared[2 * kMaxStates];
  Group<MaxSum<T>, kOneWarp> group(shared, 1);
  let_next_start();
  wait_for_earlier();
  constexpr int kSize = kVector<T>;
  const int n = int(a.n);
  const int step = group.threads * kSize;
  const int start = group.lane * kSize;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const Row at = locate_row(a, row);
  const int visible = int(at.visible);
  const T* const x = static_cast<const T*>(a.x) + row * a.n;
  uint4 raw[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) raw[k] = load_vector<T, true>(x, start + k * step, visible, true);
  float score[kHeld][kSize];
  const auto take = [&](auto kind) {
    masked_scores<T, decltype(kind)::value, kHeld>(a, at.mask_at, raw, start, step, n, visible, score);
  };
  if (a.mask_kind == FUSELINE_MASK_BOOL) {
    take(std::integral_constant<int, FUSELINE_MASK_BOOL>{});
  } else if (sizeof(T) == 2 && a.mask_kind == FUSELINE_MASK_ADD) {
    take(std::integral_constant<int, FUSELINE_MASK_ADD>{});
  } else if (a.mask_kind != FUSELINE_MASK_NONE) {
    take(std::integral_constant<int, FUSELINE_MASK_ADD_FP32>{});
  } else {
    take(std::integral_constant<int, FUSELINE_MASK_NONE>{});
  }
  share_out<T>(group, score);
  if (row >= a.rows) return;
  T* const y = static_cast<T*>(a.y) + row * a.n;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) store_vector<T, true>(y, start + k * step, n, true, score[k]);
}

// ---- launcher ----

template <class T>
auto kernel_for(const SoftmaxPlan& plan) -> void (*)(SoftmaxForward) {
  constexpr int kMost = softmax_plans::kMostHeldMasked;
  if (plan.one_warp) {
    return plan.held == 1   ? softmax_masked_rows<T, 1, true>
           : plan.held == 2 ? softmax_masked_rows<T, 2, true>
                            : softmax_masked_rows<T, kMost, true>;
  }
  return plan.held == 1   ? softmax_masked_rows<T, 1, false>
         : plan.held == 2 ? softmax_masked_rows<T, 2, false>
                          : softmax_masked_rows<T, kMost, false>;
}

}  // namespace

int run_softmax_masked(const SoftmaxForward& a, const SoftmaxPlan& plan, int dtype, const Device& device, void* stream) {
  const auto kernel = dtype == FUSELINE_FLOAT32 ? kernel_for<float>(plan) : kernel_for<__nv_bfloat16>(plan);
  return launch(kernel, a, plan.shape, device, stream);
}

}  // namespace fuseline
