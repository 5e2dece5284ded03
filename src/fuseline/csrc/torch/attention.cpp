// Attention and its gradients: schema, checks, Meta and autograd. What is computed stands in fuseline_attention.h;
// attention_cpu.cpp and attention_gpu.cpp compute it.
//
// q, k and v are read through their strides, so that [B, T, H, D] layouts and slices of a packed QKV come as transposed
// views; what the kernels do not read as it lies (a last dimension with strides, rows at odd addresses) is written out
// first. out lies in memory in the order q does, gradients in that of their inputs.

#include "attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "fuseline_attention.h"

namespace fuseline {

Tensor empty_as_heads_lie(const Tensor& x) {
    if (!(x.sym_stride(1) < x.sym_stride(2))) return at::empty_symint(x.sym_sizes(), x.options());
    const auto& sizes = x.sym_sizes();
    const std::array<c10::SymInt, 4> strides = {sizes[1] * sizes[2] * sizes[3], sizes[3], sizes[1] * sizes[3], 1};
    return at::empty_strided_symint(sizes, strides, x.options());
}

}  // namespace fuseline

namespace fuseline::attention_op {
namespace {

constexpr const char* kName = "attention";

#define FUSELINE_ATTENTION_TYPES                                                                                   \
    const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, \
        const OptionalTensor&, const OptionalTensor&, c10::SymInt, c10::SymInt, int64_t, int64_t, int64_t, double,    \
        double, double
#define FUSELINE_ATTENTION_PARAMETERS(Size)                                                                        \
    const Tensor &q, const Tensor &k, const Tensor &v, const OptionalTensor &mask, const OptionalTensor &sinks,    \
        const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k, const OptionalTensor &seed,        \
        Size max_seqlen_q, Size max_seqlen_k, int64_t causal, int64_t window_left, int64_t window_right,           \
        double softmax_scale, double soft_cap, double dropout_p
#define FUSELINE_ATTENTION_ARGUMENTS                                                                               \
    q, k, v, mask, sinks, cu_seqlens_q, cu_seqlens_k, seed, max_seqlen_q, max_seqlen_k, causal, window_left,       \
        window_right, softmax_scale, soft_cap, dropout_p

constexpr Op<"attention", AttentionOut(FUSELINE_ATTENTION_TYPES, int64_t)> forward_op;

constexpr Op<"attention_backward", AttentionGradients(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, Wanted,
                                                      FUSELINE_ATTENTION_TYPES)> backward_op;

void check_packing(const Tensor& q, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k) {
    TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(), kName,
                      ": cu_seqlens_q and cu_seqlens_k are given both or not at all.");
    if (!cu_seqlens_q.has_value()) return;
    TORCH_CHECK_VALUE(q.sym_size(0) == 1, kName, ": q has a batch of ", q.sym_size(0),
                      "; packed sequences come as [1, H, rows, D].");
    for (const Tensor& starts : {*cu_seqlens_q, *cu_seqlens_k}) {
        TORCH_CHECK_VALUE(starts.dim() == 1 && starts.sym_size(0) >= 2, kName, ": cu_seqlens have shape ",
                          starts.sym_sizes(), "; they are [sequences + 1].");
        TORCH_CHECK_TYPE(starts.scalar_type() == at::kInt, kName, ": cu_seqlens are ", starts.scalar_type(),
                         "; they are int32.");
        TORCH_CHECK_VALUE(starts.device() == q.device(), kName, ": cu_seqlens are on ", starts.device(), " and q on ",
                          q.device(), ".");
    }
    TORCH_CHECK_VALUE(cu_seqlens_q->sym_size(0) == cu_seqlens_k->sym_size(0), kName, ": cu_seqlens_q count ",
                      cu_seqlens_q->sym_size(0) - 1, " sequences and cu_seqlens_k ", cu_seqlens_k->sym_size(0) - 1,
                      ".");
}

// What the CPU reads rows by. On a GPU ops/attention/packing.py has the device assert it.
void check_starts(const OptionalTensor& cu_seqlens, int64_t rows, int64_t longest) {
    if (!cu_seqlens.has_value()) return;
    const Tensor starts = cu_seqlens->contiguous();
    const int32_t* const at = starts.const_data_ptr<int32_t>();
    const int64_t count = starts.numel();
    TORCH_CHECK_VALUE(at[0] == 0 && at[count - 1] <= rows, kName, ": cu_seqlens go from ", at[0], " to ", at[count - 1],
                      "; they begin with 0 and end within the rows, of which there are ", rows, ".");
    for (int64_t i = 1; i < count; ++i) {
        TORCH_CHECK_VALUE(at[i] >= at[i - 1] && at[i] - at[i - 1] <= longest, kName, ": cu_seqlens hold ", at[i - 1],
                          " and then ", at[i], "; they never fall, and no sequence is longer than its max_seqlen, ",
                          longest, ".");
    }
}

void check_mask(const Tensor& q, const Tensor& k, const Tensor& mask) {
    TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || mask.is_floating_point(), kName, ": mask is ",
                     mask.scalar_type(), "; it is boolean (True is seen) or floating (added to the scores).");
    TORCH_CHECK_VALUE(mask.device() == q.device(), kName, ": mask is on ", mask.device(), " and q on ", q.device(),
                      ".");
    TORCH_CHECK_VALUE(mask.dim() == 4, kName, ": mask has shape ", mask.sym_sizes(), "; it has 4 dimensions.");
    const std::array<c10::SymInt, 4> full = {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)};
    for (int64_t i = 0; i < 4; ++i) {
        TORCH_CHECK_VALUE(mask.sym_size(i) == 1 || mask.sym_size(i) == full[i], kName, ": mask has shape ",
                          mask.sym_sizes(), ", which does not broadcast to [B, H, T, S] = [", full[0], ", ", full[1],
                          ", ", full[2], ", ", full[3], "].");
    }
}

template <typename Size>
void check(FUSELINE_ATTENTION_PARAMETERS(const Size&)) {
    cpu_type(q, kName);
    TORCH_CHECK_TYPE(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), kName, ": q is ",
                     q.scalar_type(), ", k ", k.scalar_type(), " and v ", v.scalar_type(), "; they share one dtype.");
    TORCH_CHECK_VALUE(q.device() == k.device() && q.device() == v.device(), kName, ": q is on ", q.device(), ", k on ",
                      k.device(), " and v on ", v.device(), ".");
    const bool fit = q.dim() == 4 && k.dim() == 4 && k.sym_sizes() == v.sym_sizes() &&
                     q.sym_size(0) == k.sym_size(0) && q.sym_size(3) == k.sym_size(3);
    TORCH_CHECK_VALUE(fit, kName, ": q has shape ", q.sym_sizes(), ", k ", k.sym_sizes(), " and v ", v.sym_sizes(),
                      "; they are [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, D].");
    const bool shared = q.sym_size(1) == k.sym_size(1) || (k.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0);
    TORCH_CHECK_VALUE(shared, kName, ": ", q.sym_size(1), " query heads do not divide among ", k.sym_size(1),
                      " key heads.");
    TORCH_CHECK_VALUE(causal >= FUSELINE_CAUSAL_NONE && causal <= FUSELINE_CAUSAL_BOTTOM_RIGHT, kName, ": causal is ",
                      causal, "; it is 0 (none), 1 (top left) or 2 (bottom right).");
    TORCH_CHECK_VALUE(window_left >= -1 && window_right >= -1, kName, ": the window is (", window_left, ", ",
                      window_right, "); -1 means no end.");
    TORCH_CHECK_VALUE(soft_cap >= 0 && std::isfinite(soft_cap), kName, ": soft_cap is ", soft_cap,
                      "; it is 0 (none) or a finite bound on scores.");
    TORCH_CHECK_VALUE(std::isfinite(softmax_scale), kName, ": softmax_scale is ", softmax_scale, "; it is finite.");
    TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, kName, ": dropout probability p=", dropout_p,
                      " is not between 0 and 1.");
    if (dropout_p > 0) {
        TORCH_CHECK_VALUE(seed.has_value() && seed->scalar_type() == at::kLong && seed->sym_numel() == 1 &&
                              seed->device() == q.device(),
                          kName, ": dropout with p=", dropout_p, " wants a seed: one int64 on q's device.");
    }
    if (sinks.has_value()) {
        TORCH_CHECK_VALUE(sinks->dim() == 1 && sinks->sym_size(0) == q.sym_size(1), kName, ": sinks have shape ",
                          sinks->sym_sizes(), "; they are one a head, [", q.sym_size(1), "].");
        TORCH_CHECK_TYPE(sinks->is_floating_point(), kName, ": sinks are ", sinks->scalar_type(), "; give float32.");
        TORCH_CHECK_VALUE(sinks->device() == q.device(), kName, ": sinks are on ", sinks->device(), " and q on ",
                          q.device(), ".");
    }
    check_packing(q, cu_seqlens_q, cu_seqlens_k);
    if (mask.has_value()) check_mask(q, k, *mask);
}

// torch's kernels take part where every row sees a key, and where they and ours compute the same.
template <typename Size>
void check_forward_by(FUSELINE_ATTENTION_PARAMETERS(const Size&), int64_t forward_by) {
    TORCH_CHECK_VALUE(forward_by >= int64_t(ForwardBy::kFuseline) && forward_by <= int64_t(ForwardBy::kFlash), kName,
                      ": forward_by is ", forward_by, "; it is 0 (our kernel), 1 (cuDNN's) or 2 (torch's FlashAttention).");
    if (forward_by == int64_t(ForwardBy::kFuseline)) return;
    const bool plain = !mask.has_value() && !sinks.has_value() && !cu_seqlens_q.has_value() && soft_cap == 0 &&
                       dropout_p == 0 && window_left < 0 && (window_right < 0 || causal != FUSELINE_CAUSAL_NONE);
    const bool square = causal == FUSELINE_CAUSAL_NONE || q.sym_size(2) == k.sym_size(2);
    TORCH_CHECK_VALUE(plain && square, kName, ": the forward pass of another kernel (forward_by=", forward_by,
                      ") takes no mask, sinks, packing, soft cap, dropout or window, and causality only with as many keys as "
                      "queries.");
    TORCH_CHECK_TYPE(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, kName,
                     ": the forward pass of another kernel takes float16 and bfloat16, and q is ", q.scalar_type(), ".");
}

void check_gradient(const Tensor& grad_out, const Tensor& out) {
    TORCH_CHECK_VALUE(grad_out.sym_sizes() == out.sym_sizes(), kName, ": the gradient of out has shape ",
                      grad_out.sym_sizes(), " and out ", out.sym_sizes(), "; they are the same.");
}

// ---- devices, and shapes alone ----

AttentionOut attention_cuda(FUSELINE_ATTENTION_PARAMETERS(int64_t), int64_t forward_by) {
    check<int64_t>(FUSELINE_ATTENTION_ARGUMENTS);
    check_forward_by<int64_t>(FUSELINE_ATTENTION_ARGUMENTS, forward_by);
    return attention_on_gpu({FUSELINE_ATTENTION_ARGUMENTS}, ForwardBy(forward_by));
}

AttentionGradients attention_backward_cuda(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                                           const Tensor& lse, Wanted wanted, FUSELINE_ATTENTION_PARAMETERS(int64_t)) {
    check<int64_t>(FUSELINE_ATTENTION_ARGUMENTS);
    check_gradient(grad_out, out);
    return attention_backward_on_gpu(grad_out, grad_lse, {FUSELINE_ATTENTION_ARGUMENTS}, out, lse, wanted);
}

AttentionOut attention_cpu(FUSELINE_ATTENTION_PARAMETERS(int64_t), int64_t forward_by) {
    check<int64_t>(FUSELINE_ATTENTION_ARGUMENTS);
    TORCH_CHECK_VALUE(forward_by == int64_t(ForwardBy::kFuseline), kName, ": forward_by is ", forward_by,
                      "; on a CPU it is 0, for the kernels of others run on a GPU.");
    check_starts(cu_seqlens_q, q.size(2), max_seqlen_q);
    check_starts(cu_seqlens_k, k.size(2), max_seqlen_k);
    return attention_on_cpu({FUSELINE_ATTENTION_ARGUMENTS});
}

AttentionGradients attention_backward_cpu(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                                          const Tensor& lse, Wanted wanted, FUSELINE_ATTENTION_PARAMETERS(int64_t)) {
    check<int64_t>(FUSELINE_ATTENTION_ARGUMENTS);
    check_gradient(grad_out, out);
    return attention_backward_on_cpu(grad_out, grad_lse, {FUSELINE_ATTENTION_ARGUMENTS}, out, lse, wanted);
}

AttentionOut attention_meta(FUSELINE_ATTENTION_PARAMETERS(c10::SymInt), int64_t forward_by) {
    check<c10::SymInt>(FUSELINE_ATTENTION_ARGUMENTS);
    check_forward_by<c10::SymInt>(FUSELINE_ATTENTION_ARGUMENTS, forward_by);
    return {empty_as_heads_lie(q), at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2)},
                                                    q.options().dtype(accumulator_type(q.scalar_type())))};
}

AttentionGradients attention_backward_meta(const Tensor& grad_out, const OptionalTensor&, const Tensor& out,
                                           const Tensor&, Wanted wanted, FUSELINE_ATTENTION_PARAMETERS(c10::SymInt)) {
    check<c10::SymInt>(FUSELINE_ATTENTION_ARGUMENTS);
    check_gradient(grad_out, out);
    const auto nothing = [&] { return at::empty({0}, q.options()); };
    const auto like = [&](bool is_wanted, const OptionalTensor& x) {
        return is_wanted ? at::empty_symint(x->sym_sizes(), x->options()) : nothing();
    };
    return {wanted[0] ? empty_as_heads_lie(q) : nothing(), wanted[1] ? empty_as_heads_lie(k) : nothing(),
            wanted[2] ? empty_as_heads_lie(v) : nothing(), like(wanted[3], mask), like(wanted[4], sinks)};
}

// ---- autograd ----

struct Attend : torch::autograd::Function<Attend> {
    static constexpr bool is_traceable = true;

    static variable_list forward(AutogradContext* ctx, FUSELINE_ATTENTION_PARAMETERS(c10::SymInt), int64_t forward_by) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const auto [out, lse] = forward_op(FUSELINE_ATTENTION_ARGUMENTS, forward_by);
        ctx->set_materialize_grads(false);
        ctx->saved_data["wanted"] =
            c10::List<bool>({wants_grad(q), wants_grad(k), wants_grad(v), wants_grad(mask), wants_grad(sinks)});
        ctx->saved_data["max_seqlen_q"] = max_seqlen_q;
        ctx->saved_data["max_seqlen_k"] = max_seqlen_k;
        ctx->saved_data["causal"] = causal;
        ctx->saved_data["window_left"] = window_left;
        ctx->saved_data["window_right"] = window_right;
        ctx->saved_data["softmax_scale"] = softmax_scale;
        ctx->saved_data["soft_cap"] = soft_cap;
        ctx->saved_data["dropout_p"] = dropout_p;
        const auto kept = [](const OptionalTensor& x) { return x.value_or(Tensor()); };
        ctx->save_for_backward(
            {q, k, v, kept(mask), kept(sinks), kept(cu_seqlens_q), kept(cu_seqlens_k), kept(seed), out, lse});
        return {out, lse};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        variable_list result(17);
        if (!grads[0].defined() && !grads[1].defined()) return result;
        const auto saved = ctx->get_saved_variables();
        const Tensor &out = saved[8], &lse = saved[9];
        const c10::List<bool> flags = ctx->saved_data["wanted"].toBoolList();
        Wanted wanted;
        size_t edge = 0;  // absent tensors have none
        for (size_t i = 0; i < wanted.size(); ++i) {
            wanted[i] = flags[i] && ctx->needs_input_grad(edge);
            edge += saved[i].defined();
        }
        const Tensor grad_out =
            grads[0].defined() ? grads[0] : at::zeros_symint(out.sym_sizes(), out.options());
        const auto made = backward_op(
            grad_out, optional(grads[1]), out, lse, wanted, saved[0], saved[1], saved[2], optional(saved[3]),
            optional(saved[4]), optional(saved[5]), optional(saved[6]), optional(saved[7]),
            ctx->saved_data["max_seqlen_q"].toSymInt(), ctx->saved_data["max_seqlen_k"].toSymInt(),
            ctx->saved_data["causal"].toInt(), ctx->saved_data["window_left"].toInt(),
            ctx->saved_data["window_right"].toInt(), ctx->saved_data["softmax_scale"].toDouble(),
            ctx->saved_data["soft_cap"].toDouble(), ctx->saved_data["dropout_p"].toDouble());
        if (wanted[0]) result[0] = std::get<0>(made);
        if (wanted[1]) result[1] = std::get<1>(made);
        if (wanted[2]) result[2] = std::get<2>(made);
        if (wanted[3]) result[3] = std::get<3>(made);
        if (wanted[4]) result[4] = std::get<4>(made);
        return result;
    }
};

AttentionOut attention_autograd(FUSELINE_ATTENTION_PARAMETERS(c10::SymInt), int64_t forward_by) {
    if (tracked(q, k, v, mask, sinks)) {
        check<c10::SymInt>(FUSELINE_ATTENTION_ARGUMENTS);
        const auto made = Attend::apply(FUSELINE_ATTENTION_ARGUMENTS, forward_by);
        return {made[0], made[1]};
    }
    return forward_op.below_autograd(FUSELINE_ATTENTION_ARGUMENTS, forward_by);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    const std::string tensors =
        "Tensor q, Tensor k, Tensor v, *, Tensor? mask=None, Tensor? sinks=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, Tensor? seed=None, SymInt max_seqlen_q, SymInt max_seqlen_k, int causal=0, "
        "int window_left=-1, int window_right=-1, float softmax_scale, float soft_cap=0.0, float dropout_p=0.0";
    const std::string forward = "attention(" + tensors + ", int forward_by=0) -> (Tensor out, Tensor lse)";
    const std::string backward =
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[5] wanted, " + tensors +
        ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_mask, Tensor grad_sinks)";
    define(m, forward.c_str(), attention_cpu, attention_cuda, attention_meta);
    define(m, backward.c_str(), attention_backward_cpu, attention_backward_cuda, attention_backward_meta);
    differentiate<attention_autograd>(m, "attention");
    refuse_second_derivative<"attention_backward", "attention", attention_backward_meta>(m);
}

}  // namespace fuseline::attention_op
