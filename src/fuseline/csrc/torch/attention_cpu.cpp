// Attention on the CPU: ATen's kernels over tiles of query rows, so that memory is linear in the sequence. What is computed
// stands in fuseline_attention.h. Sums are float32, float64 for float64; results are rounded once.

#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "attention.h"
#include "cpu/philox.h"
#include "fuseline_attention.h"

namespace fuseline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Query rows that are computed at a time, all batches and heads of them.
int64_t rows_a_tile(const AttentionCall& call) {
    constexpr int64_t kScores = 1 << 22;
    const int64_t a_row = call.q.size(0) * call.q.size(1) * std::max<int64_t>(1, call.k.size(2));
    return std::max<int64_t>(1, kScores / std::max<int64_t>(1, a_row));
}

// Keys or values with a head for each query head, as sums are kept.
Tensor per_query_head(const Tensor& x, const AttentionCall& call, at::ScalarType type) {
    const int64_t group = call.q.size(1) / std::max<int64_t>(1, x.size(1));
    const Tensor wide = x.to(type);
    if (group == 1) return wide;
    return wide.unsqueeze(2).expand({x.size(0), x.size(1), group, x.size(2), x.size(3)}).flatten(1, 2);
}

// The gradient of key heads from that of each query head.
Tensor per_key_head(const Tensor& grad, const Tensor& like) {
    Tensor sum = grad;
    if (grad.size(1) != like.size(1)) {
        sum = grad.unflatten(1, {like.size(1), grad.size(1) / std::max<int64_t>(1, like.size(1))}).sum(2);
    }
    Tensor result = empty_as_heads_lie(like);
    return result.copy_(sum);
}

// Of each of these rows, the number of its packed sequence (behind the last: how many there are).
Tensor sequence_of(const Tensor& cu_seqlens, const Tensor& rows) {
    return at::searchsorted(cu_seqlens.slice(0, 1).to(at::kLong).contiguous(), rows, false, /*right=*/true);
}

// Which keys rows first .. first + count see by causality, windows and packing: [count, S], or nothing if all.
OptionalTensor limits(const AttentionCall& call, int64_t first, int64_t count) {
    const int64_t right = call.causal != FUSELINE_CAUSAL_NONE ? 0 : call.window_right;
    if (!call.packed() && right < 0 && call.window_left < 0) return std::nullopt;
    const auto options = call.q.options().dtype(at::kLong);
    Tensor rows = at::arange(first, first + count, options), keys = at::arange(call.k.size(2), options);
    OptionalTensor seen;
    const bool at_bottom = call.causal == FUSELINE_CAUSAL_BOTTOM_RIGHT;
    if (call.packed()) {
        const Tensor starts_q = call.cu_seqlens_q->to(at::kLong), starts_k = call.cu_seqlens_k->to(at::kLong);
        const Tensor sequence_q = sequence_of(starts_q, rows), sequence_k = sequence_of(starts_k, keys);
        const int64_t sequences = starts_q.size(0) - 1;
        seen = sequence_q.unsqueeze(1).eq(sequence_k).logical_and(sequence_q.lt(sequences).unsqueeze(1));
        const Tensor next = sequence_q.clamp_max(sequences - 1);
        rows = rows.sub(starts_q.index_select(0, sequence_q));
        keys = keys.sub(starts_k.index_select(0, sequence_k));
        if (at_bottom) {
            const Tensor shift = starts_k.diff().sub(starts_q.diff());
            rows = rows.add(shift.index_select(0, next));
        }
    } else if (at_bottom) {
        rows = rows.add(call.k.size(2) - call.q.size(2));
    }
    const auto add = [&](const Tensor& more) { seen = seen.has_value() ? seen->logical_and(more) : more; };
    if (right >= 0) add(keys.le(rows.add(right).unsqueeze(1)));
    if (call.window_left >= 0) add(keys.ge(rows.sub(call.window_left).unsqueeze(1)));
    return seen;
}

// What dropout multiplies the probabilities of these rows with.
Tensor multipliers(const AttentionCall& call, int64_t first, int64_t count, at::ScalarType type) {
    const int64_t heads = call.q.size(0) * call.q.size(1), T = call.q.size(2), S = call.k.size(2);
    Tensor result = at::empty({call.q.size(0), call.q.size(1), count, S}, call.q.options().dtype(type));
    const auto seed = static_cast<uint64_t>(*call.seed->const_data_ptr<int64_t>());
    const uint32_t threshold = cpu::dropout_threshold(call.dropout_p);
    const auto fill = [&](auto* to) {
        using A = std::remove_pointer_t<decltype(to)>;
        const A scale = static_cast<A>(cpu::dropout_scale(call.dropout_p));
        at::parallel_for(0, heads, row_grain(count * S), [&](int64_t begin, int64_t end) {
            for (int64_t head = begin; head < end; ++head) {
                cpu::dropout_multipliers(seed, threshold, scale, (head * T + first) * S, to + head * count * S,
                                         count * S);
            }
        });
    };
    if (type == at::kDouble) {
        fill(result.mutable_data_ptr<double>());
    } else {
        fill(result.mutable_data_ptr<float>());
    }
    return result;
}

// The rows of a mask's gradient, or of a mask, that belong to these query rows.
Tensor rows_of_mask(const Tensor& mask, int64_t first, int64_t count) {
    return mask.size(2) == 1 ? mask : mask.narrow(2, first, count);
}

struct Scores {
    Tensor y;        // -inf where a key is hidden
    Tensor tangent;  // tanh of the capped scores; undefined without a soft cap
};

Scores scores_of(const AttentionCall& call, const Tensor& q, const Tensor& k, int64_t first, int64_t count) {
    Scores scores;
    scores.y = at::matmul(q, k.transpose(-1, -2)).mul_(call.softmax_scale);
    if (call.soft_cap > 0) {
        scores.tangent = at::tanh(scores.y.div_(call.soft_cap));
        scores.y = scores.tangent.mul(call.soft_cap);
    }
    if (call.mask.has_value()) {
        const Tensor mask = rows_of_mask(*call.mask, first, count);
        if (mask.scalar_type() == at::kBool) {
            scores.y.masked_fill_(mask.logical_not(), -kInfinity);
        } else {
            scores.y.add_(mask.to(scores.y.scalar_type()));
        }
    }
    const OptionalTensor seen = limits(call, first, count);
    if (seen.has_value()) scores.y.masked_fill_(seen->logical_not(), -kInfinity);
    return scores;
}

Tensor sinks_as_columns(const AttentionCall& call, at::ScalarType type) { return call.sinks->to(type).view({-1, 1, 1}); }

}  // namespace

AttentionOut attention_on_cpu(const AttentionCall& call) {
    const int64_t B = call.q.size(0), H = call.q.size(1), T = call.q.size(2), S = call.k.size(2);
    const auto type = accumulator_type(call.q.scalar_type());
    Tensor out = empty_as_heads_lie(call.q);
    Tensor lse = at::empty({B, H, T}, call.q.options().dtype(type));
    if (S == 0 || out.numel() == 0) {
        lse.fill_(-kInfinity);
        if (call.sinks.has_value()) lse.copy_(call.sinks->to(type).view({-1, 1}).expand({B, H, T}));
        return {out.zero_(), lse};
    }
    const Tensor k = per_query_head(call.k, call, type), v = per_query_head(call.v, call, type);
    const int64_t step = rows_a_tile(call);
    for (int64_t first = 0; first < T; first += step) {
        const int64_t count = std::min(step, T - first);
        Tensor p = scores_of(call, call.q.narrow(2, first, count).to(type), k, first, count).y;
        Tensor most = at::amax(p, -1, /*keepdim=*/true);
        if (call.sinks.has_value()) most = at::maximum(most, sinks_as_columns(call, type));
        most.masked_fill_(most.eq(-kInfinity), 0.0);
        p.sub_(most).exp_();
        Tensor sum = p.sum(-1, /*keepdim=*/true);
        if (call.sinks.has_value()) sum.add_(sinks_as_columns(call, type).sub(most).exp_());
        lse.narrow(2, first, count).copy_(most.add(at::log(sum)).squeeze(-1));
        p.div_(sum.masked_fill_(sum.eq(0.0), 1.0));
        if (call.drops()) p.mul_(multipliers(call, first, count, type));
        out.narrow(2, first, count).copy_(at::matmul(p, v));
    }
    return {out, lse};
}

AttentionGradients attention_backward_on_cpu(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                             const AttentionCall& call, const Tensor& out, const Tensor& lse,
                                             const Wanted& wanted) {
    const int64_t T = call.q.size(2), S = call.k.size(2);
    const auto type = accumulator_type(call.q.scalar_type());
    const auto wide = call.q.options().dtype(type);
    const auto nothing = [&] { return at::empty({0}, call.q.options()); };
    const Tensor k = per_query_head(call.k, call, type), v = per_query_head(call.v, call, type);
    Tensor grad_q = wanted[0] ? empty_as_heads_lie(call.q) : nothing();
    Tensor grad_k = wanted[1] ? at::zeros(k.sizes(), wide) : nothing();
    Tensor grad_v = wanted[2] ? at::zeros(k.sizes(), wide) : nothing();
    Tensor grad_mask = wanted[3] ? at::zeros(call.mask->sizes(), wide) : nothing();
    Tensor grad_sinks = wanted[4] ? at::zeros(call.sinks->sizes(), wide) : nothing();
    const int64_t step = rows_a_tile(call);
    for (int64_t first = 0; first < T; first += step) {
        const int64_t count = std::min(step, T - first);
        const auto rows = [&](const Tensor& x) { return x.narrow(2, first, count).to(type); };
        const Tensor q = rows(call.q), g = rows(grad_out), total = rows(lse).unsqueeze(-1);
        Tensor delta = g.mul(rows(out)).sum(-1, /*keepdim=*/true);
        if (grad_lse.has_value()) delta.sub_(rows(*grad_lse).unsqueeze(-1));
        if (wanted[4]) {
            const Tensor sinks = sinks_as_columns(call, type);
            const Tensor share = at::exp(sinks.sub(total)).masked_fill_(sinks.eq(-kInfinity), 0.0);
            grad_sinks.sub_(share.mul(delta).sum({0, 2, 3}));
        }
        if (S == 0) continue;
        const Scores scores = scores_of(call, q, k, first, count);
        const Tensor p = scores.y.sub(total.masked_fill(total.eq(-kInfinity), 0.0)).exp_();
        Tensor dy = at::matmul(g, v.transpose(-1, -2)), dropped = p;
        if (call.drops()) {
            const Tensor kept = multipliers(call, first, count, type);
            dy.mul_(kept);
            dropped = p.mul(kept);
        }
        dy.sub_(delta).mul_(p);
        if (wanted[2]) grad_v.add_(at::matmul(dropped.transpose(-1, -2), g));
        if (wanted[3]) {
            Tensor to = rows_of_mask(grad_mask, first, count);
            to.add_(dy.sum_to_size(to.sizes()));
        }
        if (!wanted[0] && !wanted[1]) continue;
        if (scores.tangent.defined()) dy.mul_(scores.tangent.square().neg_().add_(1.0));
        if (wanted[0]) grad_q.narrow(2, first, count).copy_(at::matmul(dy, k).mul_(call.softmax_scale));
        if (wanted[1]) grad_k.add_(at::matmul(dy.transpose(-1, -2), q), call.softmax_scale);
    }
    if (wanted[0] && S == 0) grad_q.zero_();
    return {grad_q, wanted[1] ? per_key_head(grad_k, call.k) : grad_k, wanted[2] ? per_key_head(grad_v, call.v) : grad_v,
            wanted[3] ? grad_mask.to(call.mask->scalar_type()) : grad_mask,
            wanted[4] ? grad_sinks.to(call.sinks->scalar_type()) : grad_sinks};
}

}  // namespace fuseline
