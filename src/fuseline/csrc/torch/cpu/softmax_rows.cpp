// Softmax over rows on the CPU: y = softmax(scale * x + mask), with keys masked out and keys in the future left out.
//
// A row is read once from memory and lives in cache for its three passes: scores and maximum, exponentials and sum,
// product with 1/sum. What limits it is the exponential, about twelve vector operations an element.

#include "vector_math.h"

namespace fuseline::cpu {
namespace {

template <typename A>
inline constexpr A minus_infinity = -std::numeric_limits<A>::infinity();

// Row `row` of the mask, added to the scores or blotting them out. Its keys may stand apart (`stride`).
template <typename A>
void apply_mask(const SoftmaxForward& task, int64_t row, int64_t visible, A* scores, A* room) {
    const int64_t t = row % task.T, h = row / task.T % task.H, b = row / task.T / task.H;
    const int64_t start = b * task.mask_strides[0] + h * task.mask_strides[1] + t * task.mask_strides[2];
    const int64_t stride = task.mask_strides[3];
    if (task.mask_is_bool) {
        const uint8_t* keep = static_cast<const uint8_t*>(task.mask) + start;
#pragma omp simd
        for (int64_t s = 0; s < visible; ++s) scores[s] = keep[s * stride] ? scores[s] : minus_infinity<A>;
    } else if (stride == 1) {
        const A* bias = load_row(task.mask, task.mask_type, start, room, visible);
#pragma omp simd
        for (int64_t s = 0; s < visible; ++s) scores[s] += bias[s];
    } else {
        for (int64_t s = 0; s < visible; ++s) {
            scores[s] += *load_row(task.mask, task.mask_type, start + s * stride, room, 1);
        }
    }
}

template <typename A>
void forward_row(const SoftmaxForward& task, int64_t row, A* room) {
    const int64_t S = task.S, start = row * S;
    int64_t visible = S;
    if (task.causal) {
        visible = row % task.T + 1 + S - task.T;
        visible = visible < 0 ? 0 : visible;
    }
    const A scale = static_cast<A>(task.scale);
    A* y = open_row(task.y, task.type, start, room);
    const A* x = load_row(task.x, task.type, start, room, visible);
    if (task.mask != nullptr || scale != A(1)) {
#pragma omp simd
        for (int64_t s = 0; s < visible; ++s) y[s] = x[s] * scale;
        if (task.mask != nullptr) apply_mask(task, row, visible, y, room + S);
        x = y;
    }
    A maximum = minus_infinity<A>;
#pragma omp simd reduction(max : maximum)
    for (int64_t s = 0; s < visible; ++s) maximum = x[s] > maximum ? x[s] : maximum;
    // A row with nothing to see is all zeros. Its maximum is -inf; a NaN in it must still come out, hence the
    // subtraction of 0, which makes exp(-inf) = 0 and exp(NaN) = NaN.
    const bool blind = maximum == minus_infinity<A>;
    const A shift = blind ? A(0) : maximum;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t s = 0; s < visible; ++s) {
        const A e = exp_nonpositive(x[s] - shift);
        y[s] = e;
        sum += static_cast<double>(e);
    }
    // The sum in double and 1/sum in two pieces: their errors would stand in every element of the row.
    const double exact = sum == 0.0 ? 0.0 : 1.0 / sum;
    const A inverse = static_cast<A>(exact), rest = static_cast<A>(exact - static_cast<double>(inverse));
#pragma omp simd
    for (int64_t s = 0; s < visible; ++s) y[s] = multiply_add(y[s], inverse, y[s] * rest);
    for (int64_t s = visible; s < S; ++s) y[s] = 0;
    close_row(task.y, task.type, start, y, S);
}

template <typename A>
void backward_row(const SoftmaxBackward& task, int64_t row, A* room) {
    const int64_t n = task.n, start = row * n, tile = tile_of(task.type, n);
    const A *g = nullptr, *y = nullptr;
    // The y of 16-bit rows does not sum to one, by its rounding: where one key takes nearly all, that is as much as
    // its gradient.
    const bool rounded = task.type == Type::f16 || task.type == Type::bf16;
    double dot = 0, total = 0;
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        g = load_row(task.grad_out, task.type, start + done, room, m);
        y = load_row(task.y, task.type, start + done, room + tile, m);
#pragma omp simd reduction(+ : dot, total)
        for (int64_t i = 0; i < m; ++i) {
            dot += static_cast<double>(g[i]) * static_cast<double>(y[i]);
            total += static_cast<double>(y[i]);
        }
    }
    const A mean = static_cast<A>(!rounded ? dot : total == 0 ? 0 : dot / total);
    const A scale = static_cast<A>(task.scale);
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        if (tile < n) {  // otherwise the whole row is at hand still
            g = load_row(task.grad_out, task.type, start + done, room, m);
            y = load_row(task.y, task.type, start + done, room + tile, m);
        }
        A* grad_x = open_row(task.grad_x, task.type, start + done, room);
#pragma omp simd
        for (int64_t i = 0; i < m; ++i) {
            grad_x[i] = y[i] == A(0) ? A(0) : scale * (y[i] * (g[i] - mean));  // what is hidden has no NaN either
        }
        close_row(task.grad_x, task.type, start + done, grad_x, m);
    }
}

}  // namespace

void FUSELINE_NAME(softmax_forward)(const SoftmaxForward& task, int64_t begin, int64_t end, void* scratch) {
    for (int64_t row = begin; row < end; ++row) {
        if (task.type == Type::f64) {
            forward_row(task, row, static_cast<double*>(scratch));
        } else {
            forward_row(task, row, static_cast<float*>(scratch));
        }
    }
}

void FUSELINE_NAME(softmax_backward)(const SoftmaxBackward& task, int64_t begin, int64_t end, void* scratch) {
    for (int64_t row = begin; row < end; ++row) {
        if (task.type == Type::f64) {
            backward_row(task, row, static_cast<double*>(scratch));
        } else {
            backward_row(task, row, static_cast<float*>(scratch));
        }
    }
}

}  // namespace fuseline::cpu
