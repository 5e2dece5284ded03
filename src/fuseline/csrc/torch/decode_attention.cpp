// Attention of one new token a row over a cache, on CUDA; other devices run the reference in Python.
//
// Key and value are written into the cache, so that the op has no gradient and is for inference alone.

#include <ATen/ops/empty.h>

#include "fuseline_decode.h"
#include "op.h"

namespace fuseline::decode_attention_op {
namespace {


constexpr const char* kName = "decode_attention";

struct Sizes {
    int64_t batch, heads, kv_heads, head_dim;
};

void check_vector(const OptionalTensor& x, int64_t length, at::ScalarType type, const char* name) {
    if (!x.has_value()) return;
    TORCH_CHECK_VALUE(x->dim() == 1 && x->size(0) == length && x->is_contiguous() && x->scalar_type() == type, kName, ": ",
                      name, " is ", x->scalar_type(), " of shape ", x->sizes(), "; it is [", length, "], dense, of qkv's dtype.");
}

Sizes check(const Tensor& qkv, const Tensor& k, const Tensor& v, const Tensor& lengths, const OptionalTensor& k_scales,
            const OptionalTensor& v_scales, const OptionalTensor& cos, const OptionalTensor& sin,
            const OptionalTensor& q_norm, const OptionalTensor& k_norm, const Tensor& arrivals, int64_t heads,
            int64_t count) {
    for (const OptionalTensor& given : {OptionalTensor(k), OptionalTensor(v), OptionalTensor(lengths), k_scales, v_scales,
                                        cos, sin, q_norm, k_norm, OptionalTensor(arrivals)}) {
        TORCH_CHECK_VALUE(!given.has_value() || given->device() == qkv.device(), kName, ": qkv is on ", qkv.device(),
                          " and another tensor on ", given->device(), ". Use one.");
    }
    TORCH_CHECK_VALUE(qkv.dim() == 2 && k.dim() == 4 && k.sizes() == v.sizes() && k.size(0) == qkv.size(0), kName, ": qkv ",
                      qkv.sizes(), ", k ", k.sizes(), " and v ", v.sizes(), " do not fit. They are [B, (H + 2 K) D] and "
                      "[B, K, S, D].");
    const Sizes sizes{k.size(0), heads, k.size(1), k.size(3)};
    TORCH_CHECK_VALUE(heads >= 1 && heads % std::max<int64_t>(1, sizes.kv_heads) == 0 &&
                          qkv.size(1) == (heads + 2 * sizes.kv_heads) * sizes.head_dim,
                      kName, ": qkv ", qkv.sizes(), " does not hold ", heads, " query heads and twice the ", sizes.kv_heads,
                      " heads of keys, ", sizes.head_dim, " elements each.");
    TORCH_CHECK_VALUE(k.strides() == v.strides() && k.stride(3) == 1 && k.stride(2) == sizes.head_dim &&
                          k.scalar_type() == v.scalar_type(),
                      kName, ": k and v have the same strides and dtype, positions one after the other.");
    TORCH_CHECK_VALUE(qkv.stride(1) == 1, kName, ": rows of qkv have unit stride.");
    TORCH_CHECK_VALUE(lengths.dim() == 1 && lengths.size(0) == sizes.batch && lengths.scalar_type() == at::kLong &&
                          lengths.is_contiguous(),
                      kName, ": lengths are ", lengths.scalar_type(), " of shape ", lengths.sizes(), "; they are int64, one a row.");
    TORCH_CHECK_VALUE(arrivals.scalar_type() == at::kInt && arrivals.is_contiguous() &&
                          arrivals.numel() >= sizes.batch * heads,
                      kName, ": arrivals are ", arrivals.scalar_type(), " of shape ", arrivals.sizes(),
                      "; they are int32 zeros, one a row and head.");
    TORCH_CHECK_VALUE(count >= 1 && count <= k.size(2), kName, ": count is ", count, " and the cache has ", k.size(2), " positions.");
    const bool bytes = k.scalar_type() == at::kChar || k.scalar_type() == at::kFloat8_e4m3fn;
    TORCH_CHECK_TYPE(bytes || k.scalar_type() == qkv.scalar_type(), kName, ": k is ", k.scalar_type(), " and qkv ",
                     qkv.scalar_type(), "; k is the same, int8 or float8_e4m3fn.");
    TORCH_CHECK_VALUE(k_scales.has_value() == bytes && v_scales.has_value() == bytes, kName,
                      ": scales go with keys and values of 8 bits.");
    for (const OptionalTensor& scales : {k_scales, v_scales}) {
        if (!scales.has_value()) continue;
        TORCH_CHECK_VALUE(scales->sizes() == k.sizes().slice(0, 3) && scales->scalar_type() == at::kFloat &&
                              scales->stride(2) == 1 && scales->strides() == k_scales->strides(),
                          kName, ": scales are ", scales->scalar_type(), " of shape ", scales->sizes(), "; they are float32 ",
                          k.sizes().slice(0, 3), ".");
    }
    TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), kName, ": cos and sin come together.");
    for (const OptionalTensor& table : {cos, sin}) {
        if (!table.has_value()) continue;
        TORCH_CHECK_VALUE(table->dim() == 2 && table->size(1) * 2 == sizes.head_dim && table->size(0) >= count &&
                              table->is_contiguous() && table->scalar_type() == at::kFloat,
                          kName, ": tables are ", table->scalar_type(), " of shape ", table->sizes(), "; they are float32 [",
                          count, " or more, ", sizes.head_dim / 2, "].");
    }
    check_vector(q_norm, sizes.head_dim, qkv.scalar_type(), "q_norm");
    check_vector(k_norm, sizes.head_dim, qkv.scalar_type(), "k_norm");
    return sizes;
}

const float* floats(const OptionalTensor& x) { return static_cast<const float*>(data_or_null(x)); }

float* mutable_floats(const OptionalTensor& x) { return x.has_value() ? x->mutable_data_ptr<float>() : nullptr; }

Tensor decode_attention_cuda(const Tensor& qkv, const Tensor& k, const Tensor& v, const Tensor& lengths,
                             const OptionalTensor& k_scales, const OptionalTensor& v_scales, const OptionalTensor& cos,
                             const OptionalTensor& sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                             const Tensor& arrivals, int64_t heads, int64_t count, int64_t window, double eps,
                             double scale, bool overlap) {
    const Sizes sizes =
        check(qkv, k, v, lengths, k_scales, v_scales, cos, sin, q_norm, k_norm, arrivals, heads, count);
    const c10::DeviceGuard guard(qkv.device());
    Tensor y = at::empty({sizes.batch, heads * sizes.head_dim}, qkv.options());
    fuseline_decode call{};
    call.qkv = qkv.const_data_ptr(), call.y = y.mutable_data_ptr();
    call.k = k.mutable_data_ptr(), call.v = v.mutable_data_ptr();
    call.k_scales = mutable_floats(k_scales), call.v_scales = mutable_floats(v_scales);
    call.lengths = lengths.const_data_ptr<int64_t>(), call.cos = floats(cos), call.sin = floats(sin);
    call.q_norm = data_or_null(q_norm), call.k_norm = data_or_null(k_norm);
    call.arrivals = arrivals.mutable_data_ptr<int>();
    call.batch = sizes.batch, call.heads = heads, call.kv_heads = sizes.kv_heads, call.head_dim = sizes.head_dim;
    call.count = count, call.qkv_stride = qkv.stride(0), call.batch_stride = k.stride(0), call.head_stride = k.stride(1);
    if (k_scales.has_value()) call.scale_batch_stride = k_scales->stride(0), call.scale_head_stride = k_scales->stride(1);
    call.window = std::max<int64_t>(window, 0), call.eps = eps, call.scale = scale;
    call.dtype = kernel_dtype(qkv, kName), call.overlap = overlap;
    call.cache = k.scalar_type() == at::kChar            ? FUSELINE_CACHE_INT8
                 : k.scalar_type() == at::kFloat8_e4m3fn ? FUSELINE_CACHE_FP8
                                                         : FUSELINE_CACHE_SAME;
    static const auto scratch = FUSELINE_KERNEL(fuseline_decode_attention_partials);
    const int64_t wanted = scratch(&call);
    if (wanted < 0) check_launch(static_cast<int>(wanted), kName);
    const Tensor partials = at::empty({wanted}, qkv.options().dtype(at::kFloat));
    call.partials = partials.mutable_data_ptr<float>();
    static const auto launch = FUSELINE_KERNEL(fuseline_decode_attention);
    check_launch(launch(&call, current_stream(qkv)), kName);
    return y;
}

Tensor decode_attention_meta(const Tensor& qkv, const Tensor& k, const Tensor&, const Tensor&, const OptionalTensor&,
                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, const Tensor&, int64_t heads, int64_t, int64_t, double, double, bool) {
    return at::empty_symint({qkv.sym_size(0), k.sym_size(3) * heads}, qkv.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "decode_attention(Tensor qkv, Tensor(a!) k, Tensor(b!) v, Tensor lengths, Tensor(c!)? k_scales, "
                      "Tensor(d!)? v_scales, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, Tensor(e!) arrivals, "
                      "int heads, int count, int window, float eps, float scale, bool overlap=False) -> Tensor",
                   decode_attention_cuda, decode_attention_meta);
}

}  // namespace fuseline::decode_attention_op
