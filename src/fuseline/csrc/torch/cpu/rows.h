// The CPU kernels' interface: plain pointers in, rows [begin, end) out, no torch headers.
//
// Each *_rows.cpp is compiled once for every instruction set in FUSELINE_ISA_LIST below (on x86-64: baseline,
// AVX2, AVX-512) into functions of different names, and `pick` chooses at run time. So one library is fast here
// and still starts everywhere. Those files use no standard containers and keep everything else in an unnamed
// namespace: a template compiled for AVX-512 and merged by the linker into the baseline would crash old machines.

#pragma once

#include <cstdint>

namespace fuseline::cpu {

enum class Type : int { f32, f16, bf16, f64 };

// Accumulators and scratch are float, but double for Type::f64. Half-precision rows are converted tile by tile, so
// that what is converted stays near; rows that are accumulators already are one tile.
constexpr int64_t tile_elements = 4096;

struct SoftmaxForward {
    const void* x;
    const void* mask;         // element (b, h, t, s) stands at the sum of index * stride; may be null
    bool mask_is_bool;        // true keeps a key; otherwise the mask is added, and has type `mask_type`
    Type mask_type;
    int64_t mask_strides[4];  // in elements, zero where broadcast
    int64_t B, H, T, S;       // a row is (b, h, t), of S keys
    double scale;
    bool causal;              // query t sees keys 0 .. t + S - T
    void* y;
    Type type;
    int64_t scratch() const { return 2 * S; }  // accumulators that each call needs
};

struct SoftmaxBackward {
    const void* grad_out;
    const void* y;
    void* grad_x;
    int64_t n;
    double scale;
    Type type;
    int64_t scratch() const { return 2 * tile_elements; }
};

struct LayerNormForward {
    const void* x;
    const void* weight;  // may be null
    const void* bias;    // may be null
    void* y;
    void* mean;          // accumulators; null where no backward will come
    void* rstd;
    int64_t n;
    double eps;
    Type type;
    Type weight_type;
    bool centred = true;  // false for an RMS norm, whose mean is taken for 0
    int64_t scratch() const { return 3 * tile_elements; }
};

struct LayerNormBackward {
    const void* grad_out;
    const void* x;
    const void* weight;  // may be null
    const void* mean;    // null for an RMS norm
    const void* rstd;
    void* grad_x;        // may be null
    int64_t n;
    Type type;
    Type weight_type;
    int64_t scratch() const { return 3 * tile_elements; }
};

// z = soft_cap * tanh(logits / soft_cap) (soft_cap 0: logits) over the first n columns of [rows, width], and
// loss = (1 - s) w_t (lse - z_t) + s / n * sum(w (lse - z)) + z_loss * lse^2. Accumulators, but for logits and grad.
struct CrossEntropy {
    const void* logits;
    const int64_t* target;   // inside 0 .. n, or ignore_index
    const void* weight;      // of each column; may be null
    double weight_sum;       // of the columns, n without weight
    const void* grad_out;    // of each row's loss, or one for all; null for 1
    bool one_grad_out;
    double total;            // every gradient is divided by it
    void* loss;              // of each row
    void* statistics;        // of each row: the largest score, and the sum of the exponentials against it
    void* grad;              // of the logits, where it may stand; null if not wanted
    int64_t n;
    int64_t width;
    int64_t ignore_index;
    double label_smoothing;
    double soft_cap;
    double z_loss;
    Type type;
    int64_t scratch() const { return 2 * width; }
};

// The weight and bias gradients of rows [begin, end), in accumulators that start at zero; either may be null.
struct LayerNormPartial {
    void* grad_weight;
    void* grad_bias;
};

// Columns [begin, end) of `parts` rows of n accumulators, added up in order and rounded into `to`.
struct ColumnSums {
    const void* from;
    int64_t parts;
    int64_t n;
    void* to;
    Type type;      // of `to`
    bool is_double;  // what the accumulators are
};

#if defined(__x86_64__)
#define FUSELINE_DECLARE(name, ...) \
    void name##_baseline(__VA_ARGS__); \
    void name##_avx2(__VA_ARGS__); \
    void name##_avx512(__VA_ARGS__);
#define FUSELINE_PICK(name) ::fuseline::cpu::pick(&name##_baseline, &name##_avx2, &name##_avx512)

template <typename F>
F pick(F baseline, F avx2, F avx512) {
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has_avx2 ? (has_avx512 ? avx512 : avx2) : baseline;
}
#else
#define FUSELINE_DECLARE(name, ...) void name##_baseline(__VA_ARGS__);
#define FUSELINE_PICK(name) (&name##_baseline)
#endif

// `scratch` has room for task.scratch() accumulators and belongs to this call alone.
FUSELINE_DECLARE(softmax_forward, const SoftmaxForward&, int64_t begin, int64_t end, void* scratch)
FUSELINE_DECLARE(softmax_backward, const SoftmaxBackward&, int64_t begin, int64_t end, void* scratch)
FUSELINE_DECLARE(layer_norm_forward, const LayerNormForward&, int64_t begin, int64_t end, void* scratch)
FUSELINE_DECLARE(layer_norm_backward, const LayerNormBackward&, const LayerNormPartial&, int64_t begin, int64_t end,
                 void* scratch)
FUSELINE_DECLARE(cross_entropy_forward, const CrossEntropy&, int64_t begin, int64_t end, void* scratch)
FUSELINE_DECLARE(cross_entropy_backward, const CrossEntropy&, int64_t begin, int64_t end, void* scratch)
FUSELINE_DECLARE(column_sums, const ColumnSums&, int64_t begin, int64_t end)

}  // namespace fuseline::cpu
