// Cross-entropy of rows of logits on the CPU, and its gradient. A row lives in cache for its passes; the exponential is
// what takes the time.

#include "vector_math.h"

namespace fuseline::cpu {
namespace {

// The scores of a row, in `room` or where they stand already.
template <typename A>
const A* scores_of(const CrossEntropy& task, int64_t row, A* room) {
    const A* z = load_row(task.logits, task.type, row * task.width, room, task.n);
    if (task.soft_cap == 0) return z;
    const A cap = static_cast<A>(task.soft_cap);
    for (int64_t c = 0; c < task.n; ++c) room[c] = cap * std::tanh(z[c] / cap);
    return room;
}

// The gradient of row `row` from its scores, with p = e^(z - max) / sum.
template <typename A>
void write_gradient(const CrossEntropy& task, int64_t row, const A* z, A max, A sum, A* room) {
    const int64_t n = task.n, target = task.target[row], start = row * task.width;
    A* grad = open_row(task.grad, task.type, start, room);
    const A* weight = static_cast<const A*>(task.weight);
    const A* grad_out = static_cast<const A*>(task.grad_out);
    const A given = grad_out == nullptr ? A(1) : grad_out[task.one_grad_out ? 0 : row];
    const A scale = given / static_cast<A>(task.total);
    const A smoothing = static_cast<A>(task.label_smoothing);
    const A main = (A(1) - smoothing) * (weight == nullptr ? A(1) : weight[target]);
    const A spread = smoothing * static_cast<A>(task.weight_sum) / static_cast<A>(n);
    const A factor = scale * (main + spread + A(2) * static_cast<A>(task.z_loss) * (max + std::log(sum))) / sum;
    const A smooth = scale * smoothing / static_cast<A>(n);
    const A cap = static_cast<A>(task.soft_cap);
    const A score_of_target = z[target];  // grad may stand where z does
    if (cap == A(0)) {
#pragma omp simd
        for (int64_t c = 0; c < n; ++c) grad[c] = factor * exp_nonpositive(z[c] - max) - smooth;
    } else {
        for (int64_t c = 0; c < n; ++c) {
            const A slope = (A(1) - z[c] / cap) * (A(1) + z[c] / cap);
            grad[c] = (factor * exp_nonpositive(z[c] - max) - smooth * (weight == nullptr ? A(1) : weight[c])) * slope;
        }
    }
    if (weight != nullptr && cap == A(0)) {
#pragma omp simd
        for (int64_t c = 0; c < n; ++c) grad[c] += smooth - smooth * weight[c];
    }
    const A slope = cap == A(0) ? A(1) : (A(1) - score_of_target / cap) * (A(1) + score_of_target / cap);
    grad[target] -= scale * main * slope;
    for (int64_t c = n; c < task.width; ++c) grad[c] = 0;
    close_row(task.grad, task.type, start, grad, task.width);
}

template <typename A>
void write_zeros(const CrossEntropy& task, int64_t row, A* room) {
    A* grad = open_row(task.grad, task.type, row * task.width, room);
    for (int64_t c = 0; c < task.width; ++c) grad[c] = 0;
    close_row(task.grad, task.type, row * task.width, grad, task.width);
}

template <typename A>
void forward_row(const CrossEntropy& task, int64_t row, A* room) {
    const int64_t n = task.n, target = task.target[row];
    const bool ignored = target == task.ignore_index;
    const A* z = scores_of(task, row, room);
    const A* weight = static_cast<const A*>(task.weight);
    A maximum = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : maximum)
    for (int64_t c = 0; c < n; ++c) maximum = z[c] > maximum ? z[c] : maximum;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; ++c) sum += static_cast<double>(exp_nonpositive(z[c] - maximum));
    const A log_sum = static_cast<A>(std::log(sum));
    const A lse = maximum + log_sum;
    if (task.statistics != nullptr) {
        static_cast<A*>(task.statistics)[2 * row] = maximum;
        static_cast<A*>(task.statistics)[2 * row + 1] = static_cast<A>(sum);
    }
    if (ignored) {
        static_cast<A*>(task.loss)[row] = 0;
        if (task.grad != nullptr) write_zeros(task, row, room + task.width);
        return;
    }
    const A smoothing = static_cast<A>(task.label_smoothing);
    A loss = (A(1) - smoothing) * (weight == nullptr ? A(1) : weight[target]) * ((maximum - z[target]) + log_sum);
    if (smoothing != A(0)) {
        double linear = 0;  // against the maximum: the size of the scores would cancel
        if (weight == nullptr) {
            for (int64_t c = 0; c < n; ++c) linear += static_cast<double>(z[c] - maximum);
        } else {
            for (int64_t c = 0; c < n; ++c) linear += static_cast<double>(weight[c]) * static_cast<double>(z[c] - maximum);
        }
        const double about = task.weight_sum * static_cast<double>(log_sum) - linear;
        loss += smoothing * static_cast<A>(about / static_cast<double>(n));
    }
    static_cast<A*>(task.loss)[row] = loss + static_cast<A>(task.z_loss) * lse * lse;
    if (task.grad != nullptr) {
        write_gradient(task, row, z, maximum, static_cast<A>(sum), room + task.width);
    }
}

template <typename A>
void backward_row(const CrossEntropy& task, int64_t row, A* room) {
    if (task.target[row] == task.ignore_index) return write_zeros(task, row, room);
    const A* known = static_cast<const A*>(task.statistics) + 2 * row;
    write_gradient(task, row, scores_of(task, row, room), known[0], known[1], room + task.width);
}

}  // namespace

void FUSELINE_NAME(cross_entropy_forward)(const CrossEntropy& task, int64_t begin, int64_t end, void* scratch) {
    for (int64_t row = begin; row < end; ++row) {
        if (task.type == Type::f64) {
            forward_row(task, row, static_cast<double*>(scratch));
        } else {
            forward_row(task, row, static_cast<float*>(scratch));
        }
    }
}

void FUSELINE_NAME(cross_entropy_backward)(const CrossEntropy& task, int64_t begin, int64_t end, void* scratch) {
    for (int64_t row = begin; row < end; ++row) {
        if (task.type == Type::f64) {
            backward_row(task, row, static_cast<double*>(scratch));
        } else {
            backward_row(task, row, static_cast<float*>(scratch));
        }
    }
}

}  // namespace fuseline::cpu
