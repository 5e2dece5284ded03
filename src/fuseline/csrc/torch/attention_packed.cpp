// Attention over one packed tensor of queries, keys and values, as the product of a layer leaves them, and its gradient in
// the same form: the kernels write it in place, so that nothing is put together afterwards. The forward is that of
// attention.cpp over views.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "attention.h"

namespace fuseline::attention_packed_op {
namespace {

constexpr const char* kName = "attention_packed";

#define FUSELINE_PACKED_TYPES                                                                                       \
    const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, int64_t, int64_t, int64_t, int64_t, double, \
        double, double
#define FUSELINE_PACKED_PARAMETERS                                                                                  \
    const Tensor &qkv, const OptionalTensor &mask, const OptionalTensor &seed, int64_t num_heads, int64_t num_kv_heads, \
        int64_t causal, int64_t window_left, int64_t window_right, double softmax_scale, double soft_cap, double dropout_p
#define FUSELINE_PACKED_ARGUMENTS                                                                                   \
    qkv, mask, seed, num_heads, num_kv_heads, causal, window_left, window_right, softmax_scale, soft_cap, dropout_p

constexpr Op<"attention_packed", AttentionOut(FUSELINE_PACKED_TYPES, int64_t)> forward_op;

constexpr Op<"attention_packed_backward", Tensor(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                 FUSELINE_PACKED_TYPES)> backward_op;

// q [B, H, T, D], k and v [B, Hkv, T, D] of a packed tensor [B, T, (H + 2 Hkv) D].
HeadGradients heads_of(const Tensor& packed, int64_t num_heads, int64_t num_kv_heads) {
    const int64_t all = num_heads + 2 * num_kv_heads;
    const Tensor heads =
        packed.view_symint({packed.sym_size(0), packed.sym_size(1), all, packed.sym_size(2) / all}).transpose(1, 2);
    return {heads.narrow(1, 0, num_heads), heads.narrow(1, num_heads, num_kv_heads),
            heads.narrow(1, num_heads + num_kv_heads, num_kv_heads)};
}

void check(const Tensor& qkv, const OptionalTensor& mask, int64_t num_heads, int64_t num_kv_heads) {
    const int64_t all = num_heads + 2 * num_kv_heads;
    TORCH_CHECK_VALUE(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, kName, ": ", num_heads,
                      " query heads do not divide among ", num_kv_heads, " key heads.");
    TORCH_CHECK_VALUE(qkv.dim() == 3 && qkv.sym_size(2) % all == 0, kName, ": qkv has shape ", qkv.sym_sizes(),
                      "; it is [B, T, (", num_heads, " + 2 * ", num_kv_heads, ") * D].");
    TORCH_CHECK_VALUE(qkv.is_contiguous(), kName, ": qkv is not contiguous.");
    TORCH_CHECK_VALUE(!wants_grad(mask), kName, ": the mask wants a gradient, which `attention` gives.");
}

AttentionCall call_of(FUSELINE_PACKED_PARAMETERS) {
    const HeadGradients heads = heads_of(qkv, num_heads, num_kv_heads);
    const int64_t T = qkv.size(1);
    return {heads[0], heads[1], heads[2],    mask,         std::nullopt,  std::nullopt, std::nullopt, seed, T, T,
            causal,   window_left, window_right, softmax_scale, soft_cap,     dropout_p};
}

// ---- kernels, for any device ----

// The checks of `attention`, and its kernels.
AttentionOut packed(FUSELINE_PACKED_PARAMETERS, int64_t forward_by) {
    check(qkv, mask, num_heads, num_kv_heads);
    const HeadGradients heads = heads_of(qkv, num_heads, num_kv_heads);
    constexpr Op<"attention", AttentionOut(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                           const OptionalTensor&, c10::SymInt, c10::SymInt, int64_t, int64_t, int64_t, double,
                                           double, double, int64_t)> op;
    const c10::SymInt T = qkv.sym_size(1);
    return op(heads[0], heads[1], heads[2], mask, std::nullopt, std::nullopt, std::nullopt, seed, T, T, causal,
                   window_left, window_right, softmax_scale, soft_cap, dropout_p, forward_by);
}

constexpr Wanted kHeadsAlone = {true, true, true, false, false};

Tensor packed_backward_cuda(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
                            FUSELINE_PACKED_PARAMETERS) {
    Tensor grad = at::empty(qkv.sizes(), qkv.options());
    const HeadGradients into = heads_of(grad, num_heads, num_kv_heads);
    attention_backward_on_gpu(grad_out, grad_lse, call_of(FUSELINE_PACKED_ARGUMENTS), out, lse, kHeadsAlone, &into);
    return grad;
}

Tensor packed_backward_cpu(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
                           FUSELINE_PACKED_PARAMETERS) {
    Tensor grad = at::empty(qkv.sizes(), qkv.options());
    HeadGradients into = heads_of(grad, num_heads, num_kv_heads);
    const AttentionGradients made =
        attention_backward_on_cpu(grad_out, grad_lse, call_of(FUSELINE_PACKED_ARGUMENTS), out, lse, kHeadsAlone);
    into[0].copy_(std::get<0>(made));
    into[1].copy_(std::get<1>(made));
    into[2].copy_(std::get<2>(made));
    return grad;
}

Tensor packed_backward_meta(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, FUSELINE_PACKED_PARAMETERS) {
    return at::empty_symint(qkv.sym_sizes(), qkv.options());
}

// ---- autograd ----

struct AttendPacked : torch::autograd::Function<AttendPacked> {
    static constexpr bool is_traceable = true;

    static variable_list forward(AutogradContext* ctx, FUSELINE_PACKED_PARAMETERS, int64_t forward_by) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const auto [out, lse] = forward_op(FUSELINE_PACKED_ARGUMENTS, forward_by);
        ctx->set_materialize_grads(false);
        ctx->saved_data["numbers"] = c10::List<int64_t>({num_heads, num_kv_heads, causal, window_left, window_right});
        ctx->saved_data["options"] = c10::List<double>({softmax_scale, soft_cap, dropout_p});
        ctx->save_for_backward({qkv, mask.value_or(Tensor()), seed.value_or(Tensor()), out, lse});
        return {out, lse};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        variable_list result(12);
        if (!grads[0].defined() && !grads[1].defined()) return result;
        const auto saved = ctx->get_saved_variables();
        const auto n = ctx->saved_data["numbers"].toIntList();
        const auto o = ctx->saved_data["options"].toDoubleList();
        const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_symint(saved[3].sym_sizes(), saved[3].options());
        result[0] = backward_op(grad_out, optional(grads[1]), saved[3], saved[4], saved[0], optional(saved[1]),
                                optional(saved[2]), n.get(0), n.get(1), n.get(2), n.get(3), n.get(4), o.get(0), o.get(1),
                                o.get(2));
        return result;
    }
};

AttentionOut packed_autograd(FUSELINE_PACKED_PARAMETERS, int64_t forward_by) {
    if (tracked(qkv)) {
        check(qkv, mask, num_heads, num_kv_heads);
        const auto made = AttendPacked::apply(FUSELINE_PACKED_ARGUMENTS, forward_by);
        return {made[0], made[1]};
    }
    return forward_op.below_autograd(FUSELINE_PACKED_ARGUMENTS, forward_by);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    const std::string tensors =
        "Tensor qkv, Tensor? mask, Tensor? seed, int num_heads, int num_kv_heads, int causal, int window_left, "
        "int window_right, float softmax_scale, float soft_cap, float dropout_p";
    const std::string forward = "attention_packed(" + tensors + ", int forward_by=0) -> (Tensor out, Tensor lse)";
    const std::string backward =
        "attention_packed_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, " + tensors +
        ") -> Tensor grad_qkv";
    define(m, forward.c_str(), packed, packed, packed);
    define(m, backward.c_str(), packed_backward_cpu, packed_backward_cuda, packed_backward_meta);
    differentiate<packed_autograd>(m, "attention_packed");
    refuse_second_derivative<"attention_packed_backward", "attention", packed_backward_meta>(m);
}

}  // namespace fuseline::attention_packed_op
