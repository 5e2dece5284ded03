// The self-attention layer in ATen's operators, on any device, with the backward derived by hand
// (docs/attention_backward.md): heads are gathered once, scores are scaled and masked inside the softmax, and the backward
// multiplies nothing that nobody wants, its weights' gradients beside the rest where that pays.

#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "beside.h"
#include "cpu/philox.h"
#include "self_attention.h"

namespace fuseline::self_attention {
namespace {

Tensor softmax_op(const Tensor& scores, double scale, bool causal, const OptionalTensor& mask) {
    constexpr Op<"softmax", Tensor(const Tensor&, int64_t, double, bool, const OptionalTensor&)> op;
    return op(scores, -1, scale, causal, mask);
}

Tensor softmax_backward_op(const Tensor& grad_out, const Tensor& y, double scale) {
    constexpr Op<"softmax_backward", Tensor(const Tensor&, const Tensor&, int64_t, double)> op;
    return op(grad_out, y, -1, scale);
}

struct Composed {
    const Sizes s;
    const Options& o;
    OptionalTensor mask;  // True keeps, [H, B, S, S]
    Tensor bias;          // the same added to the scores, with the causal limit, or undefined
    Tensor multipliers;   // of dropout, [H, B, S, S], or undefined
    // On a CPU many short rows are torch's own softmax's, which knows no mask: hidden keys get a bias of -inf. It makes
    // NaN of a row whose keys are all hidden; where there is one, and elsewhere, the softmax is ours.
    bool by_torch = false;

    Composed(const Sizes& sizes, const Tensor& x, const OptionalTensor& given, const OptionalTensor& seed, const Options& options)
        : s(sizes), o(options) {
        if (given.has_value()) mask = (o.mask_hides ? given->logical_not() : *given).expand({s.B, s.H, s.S, s.S}).transpose(0, 1);
        constexpr int64_t few = 32768;  // scores: under it the bias takes longer than what it saves
        by_torch = x.is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble) &&
                   s.H * s.B * s.S * s.S >= few;
        if (by_torch && (given.has_value() || o.causal)) set_bias(x, given);
        if (o.dropout_p == 0) return;
        TORCH_CHECK_NOT_IMPLEMENTED(x.is_cpu(), kName, ": this layer does not fit the kernel, and dropout on ", x.device(),
                                    " is only in the kernel.");
        multipliers = at::empty({s.B, s.H, s.S, s.S}, x.options().dtype(accumulator_type(x.scalar_type())));
        const auto value = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
        const auto threshold = cpu::dropout_threshold(o.dropout_p);
        const auto fill = [&](auto* to) {
            using A = std::remove_pointer_t<decltype(to)>;
            cpu::dropout_multipliers(value, threshold, static_cast<A>(cpu::dropout_scale(o.dropout_p)), 0, to,
                                     multipliers.numel());
        };
        x.scalar_type() == at::kDouble ? fill(multipliers.mutable_data_ptr<double>())
                                       : fill(multipliers.mutable_data_ptr<float>());
        multipliers = multipliers.to(x.scalar_type()).transpose(0, 1);
    }

    void set_bias(const Tensor& x, const OptionalTensor& given) {
        constexpr double hidden = -std::numeric_limits<double>::infinity();
        if (o.causal) bias = at::triu(at::full({s.S, s.S}, hidden, x.options()), 1);
        if (!given.has_value()) return;
        const Tensor hides = (o.mask_hides ? *given : given->logical_not()).transpose(0, 1);
        const Tensor added = at::zeros(hides.sizes(), x.options()).masked_fill_(hides, hidden);
        bias = bias.defined() ? added.add(bias) : added;
        by_torch = bias.numel() == 0 || !bias.amax(-1).eq(hidden).any().item<bool>();
    }

    // x as the projection sees it: a row for each token, or with a shared one for each head of a token.
    Tensor rows(const Tensor& x) const { return x.reshape({s.shared ? s.tokens() * s.H : s.tokens(), s.shared ? s.D : s.E}); }

    // [groups, B, S, D]: heads of q, then of k, then of v.
    Tensor project(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) const {
        const Tensor y = bias.has_value() ? at::addmm(*bias, rows(x), weight.t()) : at::mm(rows(x), weight.t());
        if (s.shared) return y.view({s.B, s.S, s.H, 3, s.D}).permute({3, 2, 0, 1, 4}).contiguous();
        return y.view({s.B, s.S, s.groups(), s.D}).permute({2, 0, 1, 3}).contiguous();
    }

    // The gradient of what `project` gave, as rows again.
    Tensor unproject(const Tensor& grads) const {
        if (s.shared) {
            return grads.view({3, s.H, s.B, s.S, s.D}).permute({2, 3, 1, 0, 4}).reshape({s.tokens() * s.H, 3 * s.D});
        }
        return grads.view({s.groups(), s.B, s.S, s.D}).permute({1, 2, 0, 3}).reshape({s.tokens(), s.projected()});
    }

    // Heads from `first` on as [H * B, S, D]; heads of keys and values stand once for each query head that sees them.
    Tensor heads(const Tensor& qkv, int64_t first, int64_t count) const {
        const Tensor part = qkv.view({s.groups(), s.B, s.S, s.D}).narrow(0, first, count);
        if (count == s.H) return part.reshape({s.H * s.B, s.S, s.D});
        return part.unsqueeze(1).expand({count, s.H / count, s.B, s.S, s.D}).reshape({s.H * s.B, s.S, s.D});
    }
    Tensor queries(const Tensor& qkv) const { return heads(qkv, 0, s.H); }
    Tensor keys(const Tensor& qkv) const { return heads(qkv, s.H, s.kv); }
    Tensor values(const Tensor& qkv) const { return heads(qkv, s.H + s.kv, s.kv); }

    // softmax_scale * left * right.
    Tensor scaled_product(const Tensor& left, const Tensor& right) const {
        Tensor product = at::empty({left.size(0), left.size(1), right.size(2)}, left.options());
        return at::baddbmm_out(product, product, left, right, 0, s.scale);
    }

    Tensor probabilities(const Tensor& qkv) const {
        if (by_torch) {
            Tensor scores = scaled_product(queries(qkv), keys(qkv).transpose(1, 2)).view({s.H, s.B, s.S, s.S});
            if (bias.defined()) scores.add_(bias);
            return at::_softmax(scores, -1, false);
        }
        const Tensor scores = at::bmm(queries(qkv), keys(qkv).transpose(1, 2));
        return softmax_op(scores.view({s.H, s.B, s.S, s.S}), s.scale, o.causal, mask);
    }
    Tensor dropped(const Tensor& weights) const {
        return (multipliers.defined() ? weights.mul(multipliers) : weights).reshape({s.H * s.B, s.S, s.S});
    }

    Four forward(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                 const OptionalTensor& out_bias) const {
        const Tensor qkv = project(x, qkv_weight, qkv_bias);
        const Tensor weights = probabilities(qkv);
        const Tensor each = at::bmm(dropped(weights), values(qkv)).view({s.H, s.B, s.S, s.D});
        const Tensor attended = each.permute({1, 2, 0, 3}).reshape({s.tokens(), s.H * s.D});
        const Tensor out = out_bias.has_value() ? at::addmm(*out_bias, attended, out_weight.t())
                                                : at::mm(attended, out_weight.t());
        return {out.view({s.B, s.S, s.out}), qkv.view({s.tokens(), s.projected()}), attended, weights};
    }

    // Gradients of q, k and v, as rows; `weights` are the probabilities.
    Tensor attention_backward(const Tensor& grad_attended, const Tensor& qkv, const Tensor& weights) const {
        const Tensor grad = grad_attended.view({s.B, s.S, s.H, s.D}).permute({2, 0, 1, 3}).reshape({s.H * s.B, s.S, s.D});
        Tensor grad_weights = at::bmm(grad, values(qkv).transpose(1, 2));
        if (multipliers.defined()) grad_weights.view({s.H, s.B, s.S, s.S}).mul_(multipliers);
        const Tensor of_weights = grad_weights.view({s.H, s.B, s.S, s.S});
        const Tensor grad_scores =
            (by_torch ? at::_softmax_backward_data(of_weights, weights, -1, weights.scalar_type())
                      : softmax_backward_op(of_weights, weights, s.scale))
                .view({s.H * s.B, s.S, s.S});
        const double scale = by_torch ? s.scale : 1;  // what is missing in grad_scores
        Tensor grads = at::empty({s.groups(), s.B * s.S, s.D}, qkv.options());
        const auto part = [&](int64_t first, int64_t count) { return grads.narrow(0, first, count); };
        const auto put = [&](int64_t first, int64_t count, const Tensor& left, const Tensor& right, double by) {
            if (count == s.H) {
                Tensor to = part(first, s.H).view({s.H * s.B, s.S, s.D});
                at::baddbmm_out(to, to, left, right, 0, by);
                return;
            }
            Tensor to = part(first, count).view({count, s.B, s.S, s.D});
            Tensor each = at::empty({s.H * s.B, s.S, s.D}, qkv.options());
            at::baddbmm_out(each, each, left, right, 0, by);
            at::sum_out(to, each.view({count, s.H / count, s.B, s.S, s.D}), at::IntArrayRef{1});
        };
        put(0, s.H, grad_scores, keys(qkv), scale);
        put(s.H, s.kv, grad_scores.transpose(1, 2), queries(qkv), scale);
        put(s.H + s.kv, s.kv, dropped(weights).transpose(1, 2), grad, 1);
        return unproject(grads);
    }

    Five backward(const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight,
                  const Tensor& qkv, const Tensor& attended, const Tensor& weights, std::array<bool, 5> wanted) const {
        const Tensor grad = grad_out.reshape({s.tokens(), s.out}), tokens = rows(x);
        Five result;
        Beside beside(x);
        const auto product = [&](Tensor& to, const Tensor& left, const Tensor& right) {
            to = at::empty({left.size(0), right.size(1)}, left.options());
            beside.run([&] { at::mm_out(to, left, right); });
        };
        const auto sum = [&](Tensor& to, const Tensor& of) {
            to = at::empty({of.size(1)}, of.options());
            beside.run([&] { at::sum_out(to, of, at::IntArrayRef{0}); });
        };
        if (wanted[3]) product(std::get<3>(result), grad.t(), attended);
        if (wanted[4]) sum(std::get<4>(result), grad);
        Tensor grad_rows;
        if (wanted[0] || wanted[1] || wanted[2]) {
            const Tensor seen = weights.numel() > 0 ? weights : probabilities(qkv);
            grad_rows = attention_backward(at::mm(grad, out_weight), qkv, seen);
        }
        if (wanted[1]) product(std::get<1>(result), grad_rows.t(), tokens);
        if (wanted[2]) sum(std::get<2>(result), grad_rows);
        if (wanted[0]) std::get<0>(result) = at::mm(grad_rows, qkv_weight).view(x.sizes());
        beside.join();
        return result;
    }
};

}  // namespace

Four composed_forward(const Sizes& s, const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                      const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                      const OptionalTensor& seed, const Options& o) {
    return Composed(s, x, mask, seed, o).forward(x, qkv_weight, qkv_bias, out_weight, out_bias);
}

Five composed_backward(const Sizes& s, const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight,
                       const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv,
                       const Tensor& attended, const Tensor& weights, const Options& o, std::array<bool, 5> wanted) {
    return Composed(s, x, mask, seed, o).backward(grad_out, x, qkv_weight, out_weight, qkv, attended, weights, wanted);
}

}  // namespace fuseline::self_attention
