// A layer of multi-head self-attention: projections to q, k, v, attention, output projection, as one op.
//
// Two ways to the same result. In ATen's operators, on any device, with the backward derived by hand
// (docs/attention_backward.md): heads are gathered once, scores are scaled and masked inside the softmax, and the backward
// multiplies nothing that nobody wants. Or, `fused` and on a GPU where the layer fits (fuseline_small_layer.h), in one kernel
// forward and two backward.

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
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
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <string>
#include <tuple>

#include "cpu/philox.h"
#include "fuseline_small_layer.h"
#include "fuseline_torch.h"

namespace fuseline {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kName = "self_attention_layer";

// What the ops take after their tensors.
struct Options {
    int64_t num_heads, num_kv_heads;
    bool causal, mask_hides;  // mask_hides: True of the mask hides a key, else it keeps it
    double dropout_p, softmax_scale;
    bool fused;
};

#define FUSELINE_OPTION_TYPES int64_t, int64_t, bool, bool, double, double, bool
#define FUSELINE_OPTION_PARAMETERS \
    int64_t num_heads, int64_t num_kv_heads, bool causal, bool mask_hides, double dropout_p, double softmax_scale, bool fused
#define FUSELINE_OPTIONS \
    Options { num_heads, num_kv_heads, causal, mask_hides, dropout_p, softmax_scale, fused }
#define FUSELINE_OPTION_VALUES(o) \
    (o).num_heads, (o).num_kv_heads, (o).causal, (o).mask_hides, (o).dropout_p, (o).softmax_scale, (o).fused

// ---- the ops, as others of them call them ----

Tensor whole_op(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::self_attention_layer", "").typed<
        Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
               const OptionalTensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES)>();
    return op.call(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTION_VALUES(o));
}

Four forward_op(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::self_attention_layer_forward", "").typed<
            Four(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, FUSELINE_OPTION_TYPES)>();
    return op.call(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTION_VALUES(o));
}

Five backward_op(const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight,
                 const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv, const Tensor& attended,
                 const Tensor& weights, const Options& o, std::array<bool, 5> wanted) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::self_attention_layer_backward", "").typed<
            Five(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                 const Tensor&, const Tensor&, const Tensor&, FUSELINE_OPTION_TYPES, std::array<bool, 5>)>();
    return op.call(grad_out, x, qkv_weight, out_weight, mask, seed, qkv, attended, weights, FUSELINE_OPTION_VALUES(o),
                   wanted);
}

Tensor softmax_op(const Tensor& scores, double scale, bool causal, const OptionalTensor& mask) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::softmax", "").typed<
        Tensor(const Tensor&, int64_t, double, bool, const OptionalTensor&)>();
    return op.call(scores, -1, scale, causal, mask);
}

Tensor softmax_backward_op(const Tensor& grad_out, const Tensor& y, double scale) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fuseline::softmax_backward", "").typed<
        Tensor(const Tensor&, const Tensor&, int64_t, double)>();
    return op.call(grad_out, y, -1, scale);
}

// ---- what fits together ----

// One projection [3 D, D] for all heads, in the place of one with rows for each.
bool is_shared(const Tensor& x, const Tensor& qkv_weight) { return x.sym_size(2) != qkv_weight.sym_size(1); }

void check(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
           const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o) {
    cpu_type(x, kName);
    TORCH_CHECK_VALUE(o.num_heads > 0 && o.num_kv_heads > 0 && o.num_heads % o.num_kv_heads == 0, kName, ": ", o.num_heads,
                      " heads and ", o.num_kv_heads, " heads of keys; the first is a multiple of the second.");
    TORCH_CHECK_VALUE(x.dim() == 3, kName, ": x has shape ", x.sym_sizes(), "; it is [B, S, E].");
    TORCH_CHECK_VALUE(qkv_weight.dim() == 2 && out_weight.dim() == 2, kName, ": qkv_weight has shape ",
                      qkv_weight.sym_sizes(), " and out_weight ", out_weight.sym_sizes(),
                      "; they are [(H + 2 H_kv) D, E] and [out, H D].");
    if (is_shared(x, qkv_weight)) {
        TORCH_CHECK_VALUE(o.num_kv_heads == o.num_heads && qkv_weight.sym_size(0) == 3 * qkv_weight.sym_size(1) &&
                              x.sym_size(2) == o.num_heads * qkv_weight.sym_size(1),
                          kName, ": qkv_weight has shape ", qkv_weight.sym_sizes(), " for x of shape ", x.sym_sizes(), " and ",
                          o.num_heads, " heads; it is [(H + 2 H_kv) D, E], or [3 D, D] with H D = E to share one "
                          "projection among the heads.");
    } else {
        TORCH_CHECK_VALUE(qkv_weight.sym_size(0) % (o.num_heads + 2 * o.num_kv_heads) == 0, kName, ": qkv_weight has ",
                          qkv_weight.sym_size(0), " rows for ", o.num_heads, " heads of queries and ", o.num_kv_heads,
                          " of keys and values; they are (H + 2 H_kv) D.");
    }
    const auto groups = is_shared(x, qkv_weight) ? int64_t(3) : o.num_heads + 2 * o.num_kv_heads;
    const auto head_dim = qkv_weight.sym_size(0) / groups;
    TORCH_CHECK_VALUE(out_weight.sym_size(1) == o.num_heads * head_dim, kName, ": out_weight has shape ",
                      out_weight.sym_sizes(), " for ", o.num_heads, " heads of ", head_dim, "; it is [out, H D].");
    const auto matching = [&](const Tensor& given, const char* name) {
        TORCH_CHECK_VALUE(given.device() == x.device(), kName, ": ", name, " is on ", given.device(), " and x on ",
                          x.device(), ".");
        TORCH_CHECK_TYPE(given.scalar_type() == x.scalar_type(), kName, ": ", name, " is ", given.scalar_type(),
                         " and x ", x.scalar_type(), "; they have one dtype.");
    };
    matching(qkv_weight, "qkv_weight");
    matching(out_weight, "out_weight");
    const auto bias_fits = [&](const OptionalTensor& bias, const Tensor& weight, const char* name) {
        if (!bias.has_value()) return;
        matching(*bias, name);
        TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kName, ": ", name, " has shape ",
                          bias->sym_sizes(), "; it is [", weight.sym_size(0), "].");
    };
    bias_fits(qkv_bias, qkv_weight, "qkv_bias");
    bias_fits(out_bias, out_weight, "out_bias");
    if (mask.has_value()) {
        TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool, kName, ": mask is ", mask->scalar_type(), "; it is bool.");
        TORCH_CHECK_VALUE(mask->device() == x.device(), kName, ": mask is on ", mask->device(), " and x on ", x.device(),
                          ".");
        const std::array<c10::SymInt, 4> full = {x.sym_size(0), o.num_heads, x.sym_size(1), x.sym_size(1)};
        bool fits = mask->dim() == 4;
        for (int64_t i = 0; fits && i < 4; ++i) fits = mask->sym_size(i) == 1 || mask->sym_size(i) == full[i];
        TORCH_CHECK_VALUE(fits, kName, ": mask of shape ", mask->sym_sizes(), " does not broadcast to [B, H, S, S] = [",
                          full[0], ", ", full[1], ", ", full[2], ", ", full[3], "].");
    }
    TORCH_CHECK_VALUE(o.dropout_p >= 0 && o.dropout_p <= 1, kName, ": dropout_p=", o.dropout_p,
                      " is not between 0 and 1.");
    TORCH_CHECK_VALUE(o.dropout_p == 0 || (seed.has_value() && seed->scalar_type() == at::kLong && seed->sym_numel() == 1),
                      kName, ": dropout wants a seed, one int64 on x's device.");
}

struct Sizes {
    int64_t B, S, E, H, kv, D, out;
    bool shared;

    Sizes(const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight, const Options& o)
        : B(x.size(0)),
          S(x.size(1)),
          E(x.size(2)),
          H(o.num_heads),
          kv(o.num_kv_heads),
          D(qkv_weight.size(0) / (is_shared(x, qkv_weight) ? 3 : o.num_heads + 2 * o.num_kv_heads)),
          out(out_weight.size(0)),
          shared(is_shared(x, qkv_weight)) {}

    int64_t tokens() const { return B * S; }
    int64_t groups() const { return H + 2 * kv; }  // of D columns of q, k, v
    int64_t projected() const { return groups() * D; }
};

// Inside an op's kernel dtypes are what they are: nothing is cast because the caller is under autocast.
struct WithoutAutocast {
    c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

// ---- in ATen's operators ----

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
        return at::baddbmm_out(product, product, left, right, 0, o.softmax_scale);
    }

    Tensor probabilities(const Tensor& qkv) const {
        if (by_torch) {
            Tensor scores = scaled_product(queries(qkv), keys(qkv).transpose(1, 2)).view({s.H, s.B, s.S, s.S});
            if (bias.defined()) scores.add_(bias);
            return at::_softmax(scores, -1, false);
        }
        const Tensor scores = at::bmm(queries(qkv), keys(qkv).transpose(1, 2));
        return softmax_op(scores.view({s.H, s.B, s.S, s.S}), o.softmax_scale, o.causal, mask);
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
                      : softmax_backward_op(of_weights, weights, o.softmax_scale))
                .view({s.H * s.B, s.S, s.S});
        const double scale = by_torch ? o.softmax_scale : 1;  // what is missing in grad_scores
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
        const Tensor grad = grad_out.reshape({s.tokens(), s.out});
        Five result;
        if (wanted[3]) std::get<3>(result) = at::mm(grad.t(), attended);
        if (wanted[4]) std::get<4>(result) = grad.sum(0);
        if (!wanted[0] && !wanted[1] && !wanted[2]) return result;
        const Tensor seen = weights.numel() > 0 ? weights : probabilities(qkv);
        const Tensor grad_rows = attention_backward(at::mm(grad, out_weight), qkv, seen);
        if (wanted[0]) std::get<0>(result) = at::mm(grad_rows, qkv_weight).view(x.sizes());
        if (wanted[1]) std::get<1>(result) = at::mm(grad_rows.t(), rows(x));
        if (wanted[2]) std::get<2>(result) = grad_rows.sum(0);
        return result;
    }
};

// ---- in the kernels ----

fuseline_small_layer sized(const Sizes& s, const Tensor& x, const Options& o) {
    fuseline_small_layer layer{};
    layer.batch = s.B, layer.seqlen = s.S, layer.embed_dim = s.E, layer.num_heads = s.H, layer.num_kv_heads = s.kv;
    layer.head_dim = s.D, layer.out_dim = s.out;
    layer.causal = o.causal, layer.shared_projection = s.shared;
    layer.softmax_scale = o.softmax_scale, layer.dropout = o.dropout_p;
    layer.dtype = kernel_dtype(x, kName);
    layer.tf32 = x.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
    layer.mask_hides = o.mask_hides;
    return layer;
}

bool runs_fused(const Sizes& s, const Tensor& x, const Options& o, bool backward) {
    if (!o.fused || !x.is_cuda() || x.scalar_type() == at::kDouble) return false;
    static const auto fits = FUSELINE_KERNEL(fuseline_small_layer_fits);
    const auto layer = sized(s, x, o);
    return fits(&layer, backward) != 0;
}

// Contiguous, at a multiple of 16 bytes.
Tensor settled(const Tensor& t) {
    const Tensor one = t.contiguous();
    return reinterpret_cast<uintptr_t>(one.const_data_ptr()) % 16 == 0 ? one : one.clone();
}

// The mask with strides to [B, H, S, S].
void set_mask(fuseline_small_layer& layer, const Sizes& s, const OptionalTensor& mask) {
    if (!mask.has_value()) return;
    layer.mask = static_cast<const unsigned char*>(mask->const_data_ptr());
    for (int64_t i = 0; i < 4; ++i) layer.mask_strides[i] = mask->size(i) == 1 ? 0 : mask->stride(i);
}

Four forward_fused(const Sizes& s, const Tensor& given, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                   const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                   const OptionalTensor& seed, const Options& o, bool keep) {
    const c10::DeviceGuard guard(given.device());
    const Tensor x = settled(given), projection = settled(qkv_weight), last = settled(out_weight);
    const OptionalTensor in_bias = contiguous(qkv_bias), last_bias = contiguous(out_bias);
    const Tensor out = at::empty({s.B, s.S, s.out}, x.options());
    const Tensor attended = at::empty({s.tokens(), s.H * s.D}, x.options());
    const Tensor qkv = keep ? at::empty({s.tokens(), s.projected()}, x.options()) : Tensor();
    auto layer = sized(s, x, o);
    layer.x = x.const_data_ptr(), layer.qkv_weight = projection.const_data_ptr(), layer.out_weight = last.const_data_ptr();
    layer.qkv_bias = data_or_null(in_bias), layer.out_bias = data_or_null(last_bias);
    layer.seed = seed.has_value() ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr;
    set_mask(layer, s, mask);
    layer.qkv = keep ? qkv.data_ptr() : nullptr;
    layer.attended = attended.data_ptr(), layer.out = out.data_ptr();
    static const auto launch = FUSELINE_KERNEL(fuseline_small_layer_forward);
    check_launch(launch(&layer, current_stream(x)), kName);
    return {out, qkv, attended, keep ? at::empty({0}, x.options()) : Tensor()};
}

Five backward_fused(const Sizes& s, const Tensor& grad_out, const Tensor& given, const Tensor& qkv_weight,
                    const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv,
                    const Tensor& attended, const Options& o, std::array<bool, 5> wanted) {
    const c10::DeviceGuard guard(given.device());
    const Tensor x = settled(given), projection = settled(qkv_weight), last = settled(out_weight);
    const Tensor grad = settled(grad_out);
    const auto like = [&](bool want, at::IntArrayRef sizes) { return want ? at::empty(sizes, x.options()) : Tensor(); };
    Five result{like(wanted[0], x.sizes()), like(wanted[1], qkv_weight.sizes()), like(wanted[2], {qkv_weight.size(0)}),
                like(wanted[3], out_weight.sizes()), like(wanted[4], {s.out})};
    const Tensor grad_qkv = at::empty(qkv.sizes(), qkv.options());
    auto layer = sized(s, x, o);
    layer.x = x.const_data_ptr(), layer.qkv_weight = projection.const_data_ptr(), layer.out_weight = last.const_data_ptr();
    layer.seed = seed.has_value() ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr;
    set_mask(layer, s, mask);
    layer.qkv = const_cast<void*>(qkv.const_data_ptr()), layer.attended = const_cast<void*>(attended.const_data_ptr());
    const auto data = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
    const fuseline_small_layer_gradients gradients{grad.const_data_ptr(),      grad_qkv.data_ptr(),
                                                   data(std::get<0>(result)), data(std::get<1>(result)),
                                                   data(std::get<2>(result)), data(std::get<3>(result)),
                                                   data(std::get<4>(result))};
    static const auto launch = FUSELINE_KERNEL(fuseline_small_layer_backward);
    check_launch(launch(&layer, &gradients, current_stream(x)), kName);
    return result;
}

// ---- kernels, for CPU and CUDA ----

Four run_forward(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
                 const OptionalTensor& out_bias, const OptionalTensor& mask, const OptionalTensor& seed, const Options& o,
                 bool keep) {
    check(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o);
    const Sizes s(x, qkv_weight, out_weight, o);
    if (runs_fused(s, x, o, keep)) {
        return forward_fused(s, x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o, keep);
    }
    const WithoutAutocast off;
    auto result = Composed(s, x, mask, seed, o).forward(x, qkv_weight, qkv_bias, out_weight, out_bias);
    if (o.fused) std::get<3>(result) = at::empty({0}, x.options());
    return result;
}

Tensor self_attention_layer(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                            const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                            const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    return std::get<0>(run_forward(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS, false));
}

Four self_attention_layer_forward(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                  const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                  const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    return run_forward(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS, true);
}

Five self_attention_layer_backward(const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight,
                                   const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed,
                                   const Tensor& qkv, const Tensor& attended, const Tensor& weights,
                                   FUSELINE_OPTION_PARAMETERS, std::array<bool, 5> wanted) {
    const Options o = FUSELINE_OPTIONS;
    const Sizes s(x, qkv_weight, out_weight, o);
    if (runs_fused(s, x, o, true)) {
        return backward_fused(s, grad_out, x, qkv_weight, out_weight, mask, seed, qkv, attended, o, wanted);
    }
    const WithoutAutocast off;
    return Composed(s, x, mask, seed, o).backward(grad_out, x, qkv_weight, out_weight, qkv, attended, weights, wanted);
}

// ---- Meta ----

Tensor out_like(const Tensor& x, const Tensor& out_weight) {
    return at::empty_symint({x.sym_size(0), x.sym_size(1), out_weight.sym_size(0)}, x.options());
}

Tensor self_attention_layer_meta(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                 const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                 const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    check(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
    return out_like(x, out_weight);
}

Four self_attention_layer_forward_meta(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                       const Tensor& out_weight, const OptionalTensor& out_bias,
                                       const OptionalTensor& mask, const OptionalTensor& seed,
                                       FUSELINE_OPTION_PARAMETERS) {
    check(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
    const auto tokens = x.sym_size(0) * x.sym_size(1), S = x.sym_size(1);
    const auto projected = is_shared(x, qkv_weight) ? 3 * x.sym_size(2) : qkv_weight.sym_size(0);
    return {out_like(x, out_weight), at::empty_symint({tokens, projected}, x.options()),
            at::empty_symint({tokens, out_weight.sym_size(1)}, x.options()),
            fused ? at::empty({0}, x.options()) : at::empty_symint({num_heads, x.sym_size(0), S, S}, x.options())};
}

Five self_attention_layer_backward_meta(const Tensor&, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight,
                                        const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                        const Tensor&, FUSELINE_OPTION_PARAMETERS, std::array<bool, 5> wanted) {
    const auto like = [&](bool want, c10::SymIntArrayRef sizes) {
        return want ? at::empty_symint(sizes, x.options()) : Tensor();
    };
    return {like(wanted[0], x.sym_sizes()), like(wanted[1], qkv_weight.sym_sizes()),
            like(wanted[2], qkv_weight.sym_sizes().slice(0, 1)), like(wanted[3], out_weight.sym_sizes()),
            like(wanted[4], out_weight.sym_sizes().slice(0, 1))};
}

// ---- autograd and autocast ----

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

struct SelfAttentionLayer : torch::autograd::Function<SelfAttentionLayer> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                          const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                          const OptionalTensor& seed, const Options& o) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        ctx->saved_data["wanted"] = c10::List<bool>({x.requires_grad(), qkv_weight.requires_grad(), wants_grad(qkv_bias),
                                                     out_weight.requires_grad(), wants_grad(out_bias)});
        ctx->saved_data["biases"] = c10::List<bool>({qkv_bias.has_value(), out_bias.has_value()});
        ctx->saved_data["heads"] = c10::List<int64_t>({o.num_heads, o.num_kv_heads});
        ctx->saved_data["flags"] = c10::List<bool>({o.causal, o.mask_hides, o.fused});
        ctx->saved_data["numbers"] = c10::List<double>({o.dropout_p, o.softmax_scale});
        auto [out, qkv, attended, weights] = forward_op(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, o);
        ctx->save_for_backward({x, qkv_weight, out_weight, mask.value_or(Tensor()), seed.value_or(Tensor()), qkv, attended,
                                weights});
        return out;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto required = ctx->saved_data["wanted"].toBoolList(), biases = ctx->saved_data["biases"].toBoolList();
        const auto heads = ctx->saved_data["heads"].toIntList();
        const auto flags = ctx->saved_data["flags"].toBoolList();
        const auto numbers = ctx->saved_data["numbers"].toDoubleList();
        // The edges of this node are the tensors that are there.
        const std::array<bool, 5> there = {true, true, biases.get(0), true, biases.get(1)};
        std::array<bool, 5> wanted;
        size_t edge = 0;
        for (size_t i = 0; i < 5; ++i) {
            wanted[i] = there[i] && required.get(i) && ctx->needs_input_grad(edge);
            edge += there[i];
        }
        const Options o{heads.get(0), heads.get(1), flags.get(0), flags.get(1), numbers.get(0), numbers.get(1), flags.get(2)};
        auto [grad_x, grad_qkv_weight, grad_qkv_bias, grad_out_weight, grad_out_bias] =
            backward_op(grads[0], saved[0], saved[1], saved[2], optional(saved[3]), optional(saved[4]), saved[5], saved[6],
                        saved[7], o, wanted);
        return {grad_x, grad_qkv_weight, grad_qkv_bias, grad_out_weight, grad_out_bias, Tensor(), Tensor(), Tensor()};
    }
};

Tensor self_attention_layer_autograd(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                     const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                     const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    const bool tracked = wants_grad(x) || wants_grad(qkv_weight) || wants_grad(qkv_bias) || wants_grad(out_weight) ||
                         wants_grad(out_bias);
    if (at::GradMode::is_enabled() && tracked) {
        return SelfAttentionLayer::apply(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return whole_op(x, qkv_weight, qkv_bias, out_weight, out_bias, mask, seed, FUSELINE_OPTIONS);
}

Five self_attention_layer_backward_autograd(const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight,
                                            const Tensor& out_weight, const OptionalTensor& mask,
                                            const OptionalTensor& seed, const Tensor& qkv, const Tensor& attended,
                                            const Tensor& weights, FUSELINE_OPTION_PARAMETERS, std::array<bool, 5> wanted) {
    Five results = [&] {
        const at::AutoDispatchBelowADInplaceOrView guard;
        return backward_op(grad_out, x, qkv_weight, out_weight, mask, seed, qkv, attended, weights, FUSELINE_OPTIONS, wanted);
    }();
    if (!at::GradMode::is_enabled() || !(wants_grad(grad_out) || wants_grad(x) || wants_grad(qkv_weight))) return results;
    const auto refuse = [&](const Tensor& result) {
        return result.defined() ? NoSecondDerivative::apply(result, grad_out, x, std::string(kName)) : result;
    };
    return std::apply([&](const auto&... each) { return Five{refuse(each)...}; }, results);
}

// Casts as torch's linear does, the weights once for all calls of a region.
template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor self_attention_layer_autocast(const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                                     const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                                     const OptionalTensor& seed, FUSELINE_OPTION_PARAMETERS) {
    const c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(kKey)};
    const auto type = at::autocast::get_autocast_dtype(kDevice);
    const auto cast = [&](const auto& t) { return at::autocast::cached_cast(type, t, kDevice); };
    return whole_op(cast(x), cast(qkv_weight), cast(qkv_bias), cast(out_weight), cast(out_bias), mask, seed, FUSELINE_OPTIONS);
}

}  // namespace

#define FUSELINE_OPTION_SCHEMA \
    "int num_heads, int num_kv_heads, bool causal, bool mask_hides, float dropout_p, float softmax_scale, bool fused"

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("self_attention_layer(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, "
          "Tensor? mask, Tensor? seed, " FUSELINE_OPTION_SCHEMA ") -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("self_attention_layer_forward(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, "
          "Tensor? mask, Tensor? seed, " FUSELINE_OPTION_SCHEMA ") -> (Tensor out, Tensor qkv, Tensor attended, "
          "Tensor weights)",
          {at::Tag::pt2_compliant_tag});
    m.def("self_attention_layer_backward(Tensor grad_out, Tensor x, Tensor qkv_weight, Tensor out_weight, Tensor? mask, "
          "Tensor? seed, Tensor qkv, Tensor attended, Tensor weights, " FUSELINE_OPTION_SCHEMA ", bool[5] wanted) -> "
          "(Tensor grad_x, Tensor grad_qkv_weight, Tensor grad_qkv_bias, Tensor grad_out_weight, Tensor grad_out_bias)",
          {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(fuseline, CPU, m) {
    m.impl("self_attention_layer", self_attention_layer);
    m.impl("self_attention_layer_forward", self_attention_layer_forward);
    m.impl("self_attention_layer_backward", self_attention_layer_backward);
}

TORCH_LIBRARY_IMPL(fuseline, CUDA, m) {
    m.impl("self_attention_layer", self_attention_layer);
    m.impl("self_attention_layer_forward", self_attention_layer_forward);
    m.impl("self_attention_layer_backward", self_attention_layer_backward);
}

TORCH_LIBRARY_IMPL(fuseline, Meta, m) {
    m.impl("self_attention_layer", self_attention_layer_meta);
    m.impl("self_attention_layer_forward", self_attention_layer_forward_meta);
    m.impl("self_attention_layer_backward", self_attention_layer_backward_meta);
}

TORCH_LIBRARY_IMPL(fuseline, Autograd, m) {
    m.impl("self_attention_layer", self_attention_layer_autograd);
    m.impl("self_attention_layer_backward", self_attention_layer_backward_autograd);
}

TORCH_LIBRARY_IMPL(fuseline, AutocastCUDA, m) {
    m.impl("self_attention_layer", self_attention_layer_autocast<c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA>);
}

TORCH_LIBRARY_IMPL(fuseline, AutocastCPU, m) {
    m.impl("self_attention_layer", self_attention_layer_autocast<c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU>);
}

}  // namespace fuseline
