// LayerNorm and RMSNorm over rows on the CPU, forward and backward; the latter's mean is 0.
//
// The variance is the mean of squared distances from the mean, in a second pass over a row that is in cache by then,
// so nothing cancels; what the distances sum up to mends the mean, whose own sum of large numbers lost its last bits.
// Backward reads x and grad_out from memory once, and adds up the weight's and the bias's
// gradients of its rows in accumulators; the caller cuts the rows the same way whatever the number of threads, so
// that the sums are the same bit for bit. A row of one tile is converted once and kept for the later passes.

#include "vector_math.h"

namespace fuseline::cpu {
namespace {

// A tile of the weight or the bias as accumulators; null if there is none.
template <typename A>
const A* given(const void* base, Type type, int64_t index, A* room, int64_t n) {
    return base == nullptr ? nullptr : load_row(base, type, index, room, n);
}

// Sums of accumulators over a stretch, added up in double, so that long rows lose nothing.
constexpr int64_t stretch = 1024;

template <typename A>
double sum_of(const A* x, int64_t n) {
    double sum = 0;
    for (int64_t begin = 0; begin < n; begin += stretch) {
        const int64_t end = n - begin < stretch ? n : begin + stretch;
        A part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = begin; i < end; ++i) part += x[i];
        sum += static_cast<double>(part);
    }
    return sum;
}

// The distances from the mean and their squares, added to sum and squares.
template <typename A>
void add_distances(const A* x, A mean, int64_t n, double& sum, double& squares) {
    for (int64_t begin = 0; begin < n; begin += stretch) {
        const int64_t end = n - begin < stretch ? n : begin + stretch;
        A part = 0, part_squares = 0;
#pragma omp simd reduction(+ : part, part_squares)
        for (int64_t i = begin; i < end; ++i) {
            part += x[i] - mean;
            part_squares += (x[i] - mean) * (x[i] - mean);
        }
        sum += static_cast<double>(part);
        squares += static_cast<double>(part_squares);
    }
}

// The sums of g and of g * xhat over a tile, added to sum_g and sum_g_xhat; weight may be null.
template <typename A>
void add_gradient_sums(const A* grad_out, const A* weight, const A* x, A mean, A rstd, int64_t n, double& sum_g,
                       double& sum_g_xhat) {
    for (int64_t begin = 0; begin < n; begin += stretch) {
        const int64_t end = n - begin < stretch ? n : begin + stretch;
        A part_g = 0, part_g_xhat = 0;
        if (weight != nullptr) {
#pragma omp simd reduction(+ : part_g, part_g_xhat)
            for (int64_t i = begin; i < end; ++i) {
                part_g += grad_out[i] * weight[i];
                part_g_xhat += grad_out[i] * weight[i] * ((x[i] - mean) * rstd);
            }
        } else {
#pragma omp simd reduction(+ : part_g, part_g_xhat)
            for (int64_t i = begin; i < end; ++i) {
                part_g += grad_out[i];
                part_g_xhat += grad_out[i] * ((x[i] - mean) * rstd);
            }
        }
        sum_g += static_cast<double>(part_g);
        sum_g_xhat += static_cast<double>(part_g_xhat);
    }
}

template <typename A>
void forward_row(const LayerNormForward& task, int64_t row, A* room) {
    const int64_t n = task.n, start = row * n;
    const bool narrow = task.type != task.weight_type && (task.weight != nullptr || task.bias != nullptr);
    const int64_t tile = narrow ? (n < tile_elements ? n : tile_elements) : tile_of(task.type, n);
    const A* x = nullptr;
    double sum = 0;
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        x = load_row(task.x, task.type, start + done, room, m);
        if (task.centred) sum += sum_of(x, m);
    }
    A mean = static_cast<A>(sum / static_cast<double>(n));
    double distances = 0, squares = 0;
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        if (tile < n) x = load_row(task.x, task.type, start + done, room, m);
        add_distances(x, mean, m, distances, squares);
    }
    if (task.centred) {
        const double shift = distances / static_cast<double>(n);
        mean = static_cast<A>(mean + shift);
        squares -= distances * shift;
        if (squares < 0) squares = 0;  // by rounding, where all are equal
    }
    const A rstd = static_cast<A>(1 / std::sqrt(squares / static_cast<double>(n) + task.eps));
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        if (tile < n) x = load_row(task.x, task.type, start + done, room, m);
        A* y = open_row(task.y, task.type, start + done, room);
        const A* weight = given(task.weight, task.weight_type, done, room + tile, m);
        const A* bias = given(task.bias, task.weight_type, done, room + 2 * tile, m);
        if (weight != nullptr && bias != nullptr) {
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
        } else if (weight != nullptr) {
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) y[i] = (x[i] - mean) * rstd * weight[i];
        } else if (bias != nullptr) {
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) y[i] = (x[i] - mean) * rstd + bias[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) y[i] = (x[i] - mean) * rstd;
        }
        close_row(task.y, task.type, start + done, y, m);
    }
    if (task.mean != nullptr) static_cast<A*>(task.mean)[row] = mean;
    if (task.rstd != nullptr) static_cast<A*>(task.rstd)[row] = rstd;
}

// With xhat = (x - mean) rstd and g = grad_out weight:
// grad_x = rstd (g - mean(g) - xhat mean(g xhat)), grad_weight = sum(grad_out xhat), grad_bias = sum(grad_out).
template <typename A>
void backward_row(const LayerNormBackward& task, const LayerNormPartial& partial, int64_t row, A* room) {
    const int64_t n = task.n, start = row * n;
    const bool narrow = task.weight != nullptr && task.type != task.weight_type;
    const int64_t tile = narrow ? (n < tile_elements ? n : tile_elements) : tile_of(task.type, n);
    const bool centred = task.mean != nullptr;
    const A mean = centred ? static_cast<const A*>(task.mean)[row] : A(0);
    const A rstd = static_cast<const A*>(task.rstd)[row];
    const A *grad_out = nullptr, *x = nullptr;
    double sum_g = 0, sum_g_xhat = 0;
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        grad_out = load_row(task.grad_out, task.type, start + done, room, m);
        x = load_row(task.x, task.type, start + done, room + tile, m);
        if (partial.grad_weight != nullptr) {
            A* grad_weight = static_cast<A*>(partial.grad_weight) + done;
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) grad_weight[i] += grad_out[i] * ((x[i] - mean) * rstd);
        }
        if (partial.grad_bias != nullptr) {
            A* grad_bias = static_cast<A*>(partial.grad_bias) + done;
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) grad_bias[i] += grad_out[i];
        }
        if (task.grad_x == nullptr) continue;
        const A* weight = given(task.weight, task.weight_type, done, room + 2 * tile, m);
        add_gradient_sums(grad_out, weight, x, mean, rstd, m, sum_g, sum_g_xhat);
    }
    if (task.grad_x == nullptr) return;
    const A mean_g = centred ? static_cast<A>(sum_g / static_cast<double>(n)) : A(0);
    const A mean_g_xhat = static_cast<A>(sum_g_xhat / static_cast<double>(n));
    for (int64_t done = 0; done < n; done += tile) {
        const int64_t m = n - done < tile ? n - done : tile;
        if (tile < n) {
            grad_out = load_row(task.grad_out, task.type, start + done, room, m);
            x = load_row(task.x, task.type, start + done, room + tile, m);
        }
        A* grad_x = open_row(task.grad_x, task.type, start + done, room);
        if (task.weight != nullptr) {
            const A* weight = load_row(task.weight, task.weight_type, done, room + 2 * tile, m);
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) {
                grad_x[i] = rstd * (grad_out[i] * weight[i] - mean_g - (x[i] - mean) * rstd * mean_g_xhat);
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) {
                grad_x[i] = rstd * (grad_out[i] - mean_g - (x[i] - mean) * rstd * mean_g_xhat);
            }
        }
        close_row(task.grad_x, task.type, start + done, grad_x, m);
    }
}

template <typename A>
void sum_columns(const ColumnSums& task, int64_t begin, int64_t end) {
    constexpr int64_t strip = 256;
    A sums[strip];
    const A* from = static_cast<const A*>(task.from);
    for (int64_t first = begin; first < end; first += strip) {
        const int64_t m = end - first < strip ? end - first : strip;
        for (int64_t i = 0; i < m; ++i) sums[i] = 0;
        for (int64_t part = 0; part < task.parts; ++part) {
            const A* row = from + part * task.n + first;
#pragma omp simd
            for (int64_t i = 0; i < m; ++i) sums[i] += row[i];
        }
        A* to = open_row(task.to, task.type, first, sums);
        for (int64_t i = 0; i < m; ++i) to[i] = sums[i];
        close_row(task.to, task.type, first, sums, m);
    }
}

}  // namespace

void FUSELINE_NAME(layer_norm_forward)(const LayerNormForward& task, int64_t begin, int64_t end, void* scratch) {
    for (int64_t row = begin; row < end; ++row) {
        if (task.type == Type::f64) {
            forward_row(task, row, static_cast<double*>(scratch));
        } else {
            forward_row(task, row, static_cast<float*>(scratch));
        }
    }
}

void FUSELINE_NAME(layer_norm_backward)(const LayerNormBackward& task, const LayerNormPartial& partial, int64_t begin,
                                        int64_t end, void* scratch) {
    for (int64_t row = begin; row < end; ++row) {
        if (task.type == Type::f64) {
            backward_row(task, partial, row, static_cast<double*>(scratch));
        } else {
            backward_row(task, partial, row, static_cast<float*>(scratch));
        }
    }
}

void FUSELINE_NAME(column_sums)(const ColumnSums& task, int64_t begin, int64_t end) {
    if (task.is_double) {
        sum_columns<double>(task, begin, end);
    } else {
        sum_columns<float>(task, begin, end);
    }
}

}  // namespace fuseline::cpu
