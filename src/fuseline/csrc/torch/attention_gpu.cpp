// Attention on the GPU: a call as torch gives it becomes a call record of fuseline_attention.h.

#include "attention.h"

#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/empty.h>

#include "fuseline_attention.h"

namespace fuseline {
namespace {

constexpr const char* kAttention = "attention";

// x as the kernels read it: 16-byte vectors of a row side by side, rows at multiples of 16 bytes.
Tensor readable(const Tensor& x) {
    const int64_t vector = 16 / x.element_size();
    bool fits = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    for (int64_t i = 0; i < 3; ++i) fits = fits && (x.size(i) == 1 || x.stride(i) % vector == 0);
    return fits ? x : x.clone(at::MemoryFormat::Contiguous);
}

template <size_t N>
void set_strides(int64_t (&to)[N], const Tensor& x) {
    for (size_t i = 0; i < N; ++i) to[i] = x.size(i) == 1 ? 0 : x.stride(i);
}

// The record of a call, and the tensors that it points into.
struct Record {
    AttentionCall call;
    fuseline_attention record{};

    explicit Record(const AttentionCall& given) : call(given) {
        call.q = readable(call.q), call.k = readable(call.k), call.v = readable(call.v);
        const int64_t D = call.q.size(3);
        TORCH_CHECK_VALUE(D % 8 == 0 && D >= 8 && D <= 256, kAttention, " on CUDA: q has ", D,
                          " elements a head; the kernels take multiples of 8 up to 256. The reference takes any.");
        record.dtype = kernel_dtype(call.q, kAttention);
        record.causal = static_cast<int>(call.causal);
        record.batch = call.q.size(0), record.heads = call.q.size(1), record.kv_heads = call.k.size(1);
        record.seqlen_q = call.q.size(2), record.seqlen_k = call.k.size(2), record.head_dim = D;
        record.q = call.q.const_data_ptr(), record.k = call.k.const_data_ptr(), record.v = call.v.const_data_ptr();
        set_strides(record.q_strides, call.q);
        set_strides(record.k_strides, call.k);
        set_strides(record.v_strides, call.v);
        record.window_left = call.window_left, record.window_right = call.window_right;
        record.softmax_scale = call.softmax_scale, record.soft_cap = call.soft_cap;
        record.dropout = call.dropout_p;
        if (call.drops()) record.seed = call.seed->const_data_ptr<int64_t>();
        if (call.mask.has_value()) set_mask();
        if (call.sinks.has_value()) {
            call.sinks = call.sinks->to(at::kFloat).contiguous();
            record.sinks = call.sinks->const_data_ptr<float>();
        }
        if (call.packed()) {
            call.cu_seqlens_q = call.cu_seqlens_q->contiguous(), call.cu_seqlens_k = call.cu_seqlens_k->contiguous();
            record.cu_seqlens_q = call.cu_seqlens_q->const_data_ptr<int32_t>();
            record.cu_seqlens_k = call.cu_seqlens_k->const_data_ptr<int32_t>();
            record.sequences = call.cu_seqlens_q->size(0) - 1;
        }
        record.max_seqlen_q = std::min(call.max_seqlen_q, record.seqlen_q);
        record.max_seqlen_k = std::min(call.max_seqlen_k, record.seqlen_k);
    }

    // Out and lse, to be written or read.
    void set_results(const Tensor& out, const Tensor& lse) {
        record.out = const_cast<void*>(out.const_data_ptr());
        set_strides(record.out_strides, out);
        record.lse = const_cast<float*>(lse.const_data_ptr<float>());
    }

    bool empty() const { return record.batch == 0 || record.heads == 0; }

   private:
    void set_mask() {
        const auto type = call.mask->scalar_type();
        const bool taken = type == at::kBool || type == at::kFloat || type == call.q.scalar_type();
        if (!taken) call.mask = call.mask->to(at::kFloat);
        record.mask_kind = type == at::kBool                      ? FUSELINE_MASK_BOOL
                           : taken && type == call.q.scalar_type() ? FUSELINE_MASK_ADD
                                                                   : FUSELINE_MASK_ADD_FP32;
        record.mask = call.mask->const_data_ptr();
        set_strides(record.mask_strides, *call.mask);
    }
};

Tensor workspace(size_t bytes, const Tensor& like) {
    return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
}

// The forward pass of another kernel, its results in the form of ours: lse is the natural logarithm there, too.
AttentionOut forward_by_another(const AttentionCall& call, ForwardBy forward_by) {
    const Tensor q = readable(call.q), k = readable(call.k), v = readable(call.v);
    const bool causal = call.causal != FUSELINE_CAUSAL_NONE;
    const auto results = [&]() -> AttentionOut {
        if (forward_by == ForwardBy::kFlash) {
            const auto made =
                at::_scaled_dot_product_flash_attention(q, k, v, 0.0, causal, false, call.softmax_scale);
            return {std::get<0>(made), std::get<1>(made)};
        }
        const auto made = at::_scaled_dot_product_cudnn_attention(q, k, v, std::nullopt, true, 0.0, causal, false,
                                                                  call.softmax_scale);
        return {std::get<0>(made), std::get<1>(made)};
    }();
    const auto& [out, lse] = results;
    const bool lies_as_ours = (call.q.stride(1) < call.q.stride(2) ? out.transpose(1, 2) : out).is_contiguous();
    return {lies_as_ours ? out : empty_as_heads_lie(call.q).copy_(out),
            lse.reshape({q.size(0), q.size(1), q.size(2)}).contiguous()};
}

}  // namespace

AttentionOut attention_on_gpu(const AttentionCall& call, ForwardBy forward_by) {
    const Tensor& q = call.q;
    const c10::DeviceGuard guard(q.device());
    if (forward_by != ForwardBy::kFuseline && q.numel() > 0 && call.k.numel() > 0) return forward_by_another(call, forward_by);
    Record of(call);
    Tensor out = empty_as_heads_lie(q);
    Tensor lse = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
    if (out.numel() == 0) return {out, lse};
    of.set_results(out, lse);
    Tensor scratch;
    static const auto wanted = FUSELINE_KERNEL(fuseline_attention_forward_workspace);
    if (const size_t bytes = wanted(&of.record)) {
        scratch = workspace(bytes, q);
        of.record.workspace = scratch.mutable_data_ptr();
    }
    static const auto launch = FUSELINE_KERNEL(fuseline_attention_forward);
    check_launch(launch(&of.record, current_stream(q)), kAttention);
    return {out, lse};
}

AttentionGradients attention_backward_on_gpu(const Tensor& grad_out, const OptionalTensor& grad_lse,
                                             const AttentionCall& call, const Tensor& out, const Tensor& lse,
                                             const Wanted& wanted, const HeadGradients* into) {
    const Tensor &q = call.q, &k = call.k, &v = call.v;
    const OptionalTensor &mask = call.mask, &sinks = call.sinks;
    const c10::DeviceGuard guard(q.device());
    Record of(call);
    const auto floats = q.options().dtype(at::kFloat);
    const auto nothing = [&] { return at::empty({0}, q.options()); };
    const auto room = [&](size_t i, const Tensor& x) {
        return !wanted[i] ? nothing() : into != nullptr ? (*into)[i] : empty_as_heads_lie(x);
    };
    Tensor grad_q = room(0, q), grad_k = room(1, k), grad_v = room(2, v);
    const bool known = wanted[3] && (mask->scalar_type() == at::kHalf || mask->scalar_type() == at::kBFloat16);
    Tensor grad_mask = wanted[3] ? at::empty(mask->sizes(), known ? mask->options() : floats) : nothing();
    Tensor grad_sinks = wanted[4] ? at::empty(sinks->sizes(), floats) : nothing();
    if (of.empty()) {
        for (Tensor* grad : {&grad_q, &grad_k, &grad_v, &grad_mask, &grad_sinks}) grad->zero_();
    } else {
        const Tensor g = readable(grad_out), result = readable(out);
        const OptionalTensor g_lse =
            grad_lse.has_value() ? OptionalTensor(grad_lse->to(at::kFloat).contiguous()) : std::nullopt;
        of.set_results(result, lse);
        fuseline_attention_gradients record{};
        record.call = of.record;
        record.grad_out = g.const_data_ptr();
        record.grad_lse = static_cast<const float*>(data_or_null(g_lse));
        set_strides(record.grad_out_strides, g);
        const auto set = [](bool is_wanted, const Tensor& grad, void*& pointer, int64_t(&strides)[3]) {
            if (!is_wanted) return;
            pointer = grad.mutable_data_ptr();
            set_strides(strides, grad);
        };
        set(wanted[0], grad_q, record.grad_q, record.grad_q_strides);
        set(wanted[1], grad_k, record.grad_k, record.grad_k_strides);
        set(wanted[2], grad_v, record.grad_v, record.grad_v_strides);
        if (wanted[3]) {
            record.grad_mask = grad_mask.mutable_data_ptr();
            record.grad_mask_dtype = kernel_dtype(grad_mask, kAttention);
            set_strides(record.grad_mask_strides, grad_mask);
        }
        if (wanted[4]) record.grad_sinks = grad_sinks.mutable_data_ptr<float>();
        static const auto bytes = FUSELINE_KERNEL(fuseline_attention_backward_workspace);
        const Tensor scratch = workspace(bytes(&record), q);
        record.workspace = scratch.mutable_data_ptr();
        static const auto launch = FUSELINE_KERNEL(fuseline_attention_backward);
        check_launch(launch(&record, current_stream(q)), kAttention);
    }
    return {grad_q, grad_k, grad_v, wanted[3] ? grad_mask.to(mask->scalar_type()) : grad_mask,
            wanted[4] ? grad_sinks.to(sinks->scalar_type()) : grad_sinks};
}

}  // namespace fuseline
