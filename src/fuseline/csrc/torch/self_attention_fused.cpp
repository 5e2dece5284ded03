// The self-attention layer in the kernels of fuseline_small_layer.h: a launch or two forward and two or three backward.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include "fuseline_small_layer.h"
#include "self_attention.h"

namespace fuseline::self_attention {
namespace {

fuseline_small_layer sized(const Sizes& s, const Tensor& x, const Options& o) {
    fuseline_small_layer layer{};
    layer.batch = s.B, layer.seqlen = s.S, layer.embed_dim = s.E, layer.num_heads = s.H, layer.num_kv_heads = s.kv;
    layer.head_dim = s.D, layer.out_dim = s.out;
    layer.causal = o.causal, layer.shared_projection = s.shared;
    layer.softmax_scale = s.scale, layer.dropout = o.dropout_p;
    layer.dtype = kernel_dtype(x, kName);
    layer.tf32 = x.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
    layer.mask_hides = o.mask_hides;
    return layer;
}

// As at::empty for a tensor on x's GPU, which is the current one, without the dispatcher: a small layer's call waits for
// several of these.
Tensor fresh(at::IntArrayRef sizes, const Tensor& x) {
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
    return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kCUDA), keys, x.scalar_type(), std::nullopt);
}

// The mask with strides to [B, H, S, S].
void set_mask(fuseline_small_layer& layer, const Sizes& s, const OptionalTensor& mask) {
    if (!mask.has_value()) return;
    layer.mask = static_cast<const unsigned char*>(mask->const_data_ptr());
    for (int64_t i = 0; i < 4; ++i) layer.mask_strides[i] = mask->size(i) == 1 ? 0 : mask->stride(i);
}

}  // namespace

bool runs_fused(const Sizes& s, const Tensor& x, const Options& o, bool backward) {
    if (!o.fused || !x.is_cuda() || x.scalar_type() == at::kDouble) return false;
    static const auto fits = FUSELINE_KERNEL(fuseline_small_layer_fits);
    const auto layer = sized(s, x, o);
    return fits(&layer, backward) != 0;
}

Four fused_forward(const Sizes& s, const Tensor& given, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                   const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                   const OptionalTensor& seed, const Options& o, bool keep) {
    const c10::DeviceGuard guard(given.device());
    const Tensor x = aligned(given), projection = aligned(qkv_weight), last = aligned(out_weight);
    const OptionalTensor in_bias = contiguous(qkv_bias), last_bias = contiguous(out_bias);
    const Tensor out = fresh({s.B, s.S, s.out}, x);
    const Tensor attended = fresh({s.tokens(), s.H * s.D}, x);
    const Tensor qkv = keep ? fresh({s.tokens(), s.projected()}, x) : Tensor();
    auto layer = sized(s, x, o);
    layer.x = x.const_data_ptr(), layer.qkv_weight = projection.const_data_ptr(), layer.out_weight = last.const_data_ptr();
    layer.qkv_bias = data_or_null(in_bias), layer.out_bias = data_or_null(last_bias);
    layer.seed = seed.has_value() ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr;
    set_mask(layer, s, mask);
    layer.qkv = keep ? qkv.data_ptr() : nullptr;
    layer.attended = attended.data_ptr(), layer.out = out.data_ptr();
    static const auto launch = FUSELINE_KERNEL(fuseline_small_layer_forward);
    check_launch(launch(&layer, current_stream(x)), kName);
    return {out, qkv, attended, keep ? fresh({0}, x) : Tensor()};
}

Five fused_backward(const Sizes& s, const Tensor& grad_out, const Tensor& given, const Tensor& qkv_weight,
                    const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv,
                    const Tensor& attended, const Options& o, std::array<bool, 5> wanted) {
    const c10::DeviceGuard guard(given.device());
    const Tensor x = aligned(given), projection = aligned(qkv_weight), last = aligned(out_weight);
    const Tensor grad = aligned(grad_out);
    const auto like = [&](bool want, at::IntArrayRef sizes) { return want ? fresh(sizes, x) : Tensor(); };
    Five result{like(wanted[0], x.sizes()), like(wanted[1], qkv_weight.sizes()), like(wanted[2], {qkv_weight.size(0)}),
                like(wanted[3], out_weight.sizes()), like(wanted[4], {s.out})};
    const Tensor grad_qkv = fresh(qkv.sizes(), x), grad_kv = like(s.kv != s.H, {s.tokens(), 2, s.H, s.D});
    auto layer = sized(s, x, o);
    layer.x = x.const_data_ptr(), layer.qkv_weight = projection.const_data_ptr(), layer.out_weight = last.const_data_ptr();
    layer.seed = seed.has_value() ? static_cast<const int64_t*>(seed->const_data_ptr()) : nullptr;
    set_mask(layer, s, mask);
    layer.qkv = const_cast<void*>(qkv.const_data_ptr()), layer.attended = const_cast<void*>(attended.const_data_ptr());
    const auto data = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
    const fuseline_small_layer_gradients gradients{grad.const_data_ptr(),      grad_qkv.data_ptr(),
                                                   data(grad_kv),             data(std::get<0>(result)),
                                                   data(std::get<1>(result)), data(std::get<2>(result)),
                                                   data(std::get<3>(result)), data(std::get<4>(result))};
    static const auto launch = FUSELINE_KERNEL(fuseline_small_layer_backward);
    check_launch(launch(&layer, &gradients, current_stream(x)), kName);
    return result;
}

}  // namespace fuseline::self_attention
