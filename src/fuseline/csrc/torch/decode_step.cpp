// A whole decoding step for one row, on CUDA; other devices run the reference in Python.
//
// The cache, the token and the workspace are written, so that the op has no gradient and is for inference alone.

#include <ATen/ops/empty.h>

#include "fuseline_decode_step.h"
#include "op.h"

namespace fuseline::decode_step_op {
namespace {

constexpr const char* kName = "decode_step";
constexpr int64_t kParts = 6;  // norm, qkv, out, norm, up, down

void check_part(const Tensor& x, const Tensor& like, at::IntArrayRef sizes, const char* name) {
    TORCH_CHECK_VALUE(x.sizes() == sizes && x.is_contiguous() && x.scalar_type() == like.scalar_type() &&
                          x.device() == like.device(),
                      kName, ": ", name, " is ", x.scalar_type(), " of shape ", x.sizes(), "; it is ", like.scalar_type(), " ",
                      sizes, ", dense, on the head's device.");
}

void check_part(const OptionalTensor& x, const Tensor& like, at::IntArrayRef sizes, const char* name) {
    if (x.has_value()) check_part(*x, like, sizes, name);
}

void check_table(const Tensor& x, const Tensor& like, int64_t rows, int64_t width, const char* name) {
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) >= rows, kName, ": ", name, " has shape ", x.sizes(), "; it has ", rows,
                      " rows or more.");
    check_part(x, like, {x.size(0), width}, name);
}

void check_one(const Tensor& x, const Tensor& like, const char* name) {
    TORCH_CHECK_VALUE(x.numel() == 1 && x.scalar_type() == at::kLong && x.device() == like.device(), kName, ": ", name, " is ",
                      x.scalar_type(), " of shape ", x.sizes(), "; it is one int64 on the head's device.");
}

int code_of(c10::string_view activation) {
    TORCH_CHECK_VALUE(activation == "gelu" || activation == "gelu_tanh" || activation == "swiglu", kName,
                      ": there is no activation named '", activation, "'.");
    return activation == "gelu"        ? FUSELINE_ACTIVATION_GELU
           : activation == "gelu_tanh" ? FUSELINE_ACTIVATION_GELU_TANH
                                       : FUSELINE_ACTIVATION_SWIGLU;
}

// Bytes of workspace, 0 if the device cannot take a step of such a model in one launch.
int64_t decode_step_workspace(const Tensor& like, int64_t num_layers, int64_t embed_dim, int64_t heads, int64_t kv_heads,
                              int64_t head_dim, int64_t ffn_dim, int64_t vocab_size, c10::string_view activation) {
    if (like.scalar_type() != at::kBFloat16) return 0;
    const c10::DeviceGuard guard(like.device());
    const auto call = std::make_unique<fuseline_step>();
    call->num_layers = num_layers, call->embed_dim = embed_dim, call->heads = heads, call->kv_heads = kv_heads;
    call->head_dim = head_dim, call->ffn_dim = ffn_dim, call->vocab_size = vocab_size;
    call->dtype = kernel_dtype(like, kName);
    call->norm = FUSELINE_NORM_RMS, call->activation = code_of(activation);
    static const auto bytes = FUSELINE_KERNEL(fuseline_decode_step_workspace);
    return std::max<int64_t>(0, bytes(call.get()));
}

Tensor decode_step_cuda(const Tensor& token, const Tensor& workspace, const Tensor& k, const Tensor& v,
                        const Tensor& length, at::TensorList weights, const c10::List<OptionalTensor>& biases,
                        const Tensor& token_table, const OptionalTensor& position_table, const OptionalTensor& cos,
                        const OptionalTensor& sin, const Tensor& norm, const OptionalTensor& norm_bias,
                        const Tensor& head, int64_t heads, int64_t vocab_size, int64_t window, double eps, double scale,
                        c10::string_view norm_kind, c10::string_view activation) {
    TORCH_CHECK_VALUE(k.dim() == 5 && k.size(1) == 1 && k.sizes() == v.sizes() && k.strides() == v.strides() &&
                          k.stride(4) == 1 && k.stride(3) == k.size(4) && v.scalar_type() == k.scalar_type() &&
                          k.scalar_type() == head.scalar_type(),
                      kName, ": k is ", k.scalar_type(), " of shape ", k.sizes(), " and v of ", v.sizes(),
                      "; they are alike, of the head's dtype: [layers, 1, heads, positions, head_dim].");
    const int64_t L = k.size(0), K = k.size(2), D = k.size(4);
    TORCH_CHECK_VALUE(head.dim() == 2 && int64_t(weights.size()) == L * kParts && biases.size() == weights.size(), kName, ": ",
                      weights.size(), " weights and ", biases.size(), " biases for ", L, " layers; each layer has ", kParts, ".");
    TORCH_CHECK_VALUE(L <= FUSELINE_STEP_LAYERS, kName, ": ", L, " layers are more than the ", FUSELINE_STEP_LAYERS,
                      " that go into one launch.");
    TORCH_CHECK_VALUE(norm_kind == "rms" || norm_kind == "layer", kName, ": there is no norm named '", norm_kind, "'.");
    const c10::DeviceGuard guard(head.device());
    const auto call = std::make_unique<fuseline_step>();
    call->activation = code_of(activation);
    call->norm = norm_kind == "rms" ? FUSELINE_NORM_RMS : FUSELINE_NORM_LAYER;
    const int64_t C = head.size(1), parts = call->activation == FUSELINE_ACTIVATION_SWIGLU ? 2 : 1;
    const int64_t F = L ? weights[4].size(0) / parts : 0;
    const int64_t rows[kParts] = {C, (heads + 2 * K) * D, C, C, parts * F, C};
    const int64_t columns[kParts] = {0, C, heads * D, 0, C, F};
    const char* const names[kParts] = {"norm", "qkv", "out", "mlp_norm", "up", "down"};
    for (int64_t i = 0; i < L; ++i) {
        fuseline_step_layer& layer = call->layers[i];
        const void** const to[kParts][2] = {{&layer.norm_weight, &layer.norm_bias},         {&layer.qkv_weight, &layer.qkv_bias},
                                            {&layer.out_weight, &layer.out_bias},           {&layer.mlp_norm_weight, &layer.mlp_norm_bias},
                                            {&layer.up_weight, &layer.up_bias},             {&layer.down_weight, &layer.down_bias}};
        for (int64_t part = 0; part < kParts; ++part) {
            const Tensor& weight = weights[i * kParts + part];
            const OptionalTensor bias = biases[i * kParts + part];
            if (columns[part]) {
                check_part(weight, head, {rows[part], columns[part]}, names[part]);
            } else {
                check_part(weight, head, {rows[part]}, names[part]);
            }
            check_part(bias, head, {rows[part]}, "a bias");
            *to[part][0] = weight.const_data_ptr(), *to[part][1] = data_or_null(bias);
        }
        const int64_t at = i * k.stride(0) * k.element_size();
        layer.k = static_cast<char*>(k.mutable_data_ptr()) + at, layer.v = static_cast<char*>(v.mutable_data_ptr()) + at;
    }
    check_table(head, head, vocab_size, C, "head");
    check_table(token_table, head, vocab_size, C, "token_table");
    if (position_table.has_value()) check_table(*position_table, head, k.size(3), C, "position_table");
    check_part(norm, head, {C}, "norm");
    check_part(norm_bias, head, {C}, "norm_bias");
    TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), kName, ": cos and sin come together.");
    for (const OptionalTensor& table : {cos, sin}) {
        TORCH_CHECK_VALUE(!table.has_value() || (table->dim() == 2 && table->size(0) >= k.size(3) && table->size(1) * 2 == D &&
                                                 table->is_contiguous() && table->scalar_type() == at::kFloat),
                          kName, ": tables of angles are float32 [", k.size(3), " or more, ", D / 2, "].");
    }
    check_one(token, head, "token");
    check_one(length, head, "length");
    call->num_layers = L, call->embed_dim = C, call->heads = heads, call->kv_heads = K, call->head_dim = D;
    call->ffn_dim = F, call->vocab_size = vocab_size, call->head_stride = k.stride(2), call->window = std::max<int64_t>(window, 0);
    call->eps = eps, call->scale = scale, call->dtype = kernel_dtype(head, kName);
    call->token_table = token_table.const_data_ptr(), call->position_table = data_or_null(position_table);
    call->cos = static_cast<const float*>(data_or_null(cos)), call->sin = static_cast<const float*>(data_or_null(sin));
    call->norm_weight = norm.const_data_ptr(), call->norm_bias = data_or_null(norm_bias);
    call->head_weight = head.const_data_ptr();
    call->length = length.mutable_data_ptr<int64_t>(), call->token = token.mutable_data_ptr<int64_t>();
    static const auto bytes = FUSELINE_KERNEL(fuseline_decode_step_workspace);
    const int64_t wanted = bytes(call.get());
    if (wanted < 0) check_launch(static_cast<int>(wanted), kName);
    TORCH_CHECK_VALUE(workspace.nbytes() >= static_cast<size_t>(wanted) && workspace.is_contiguous() &&
                          workspace.device() == head.device(),
                      kName, ": workspace has ", workspace.nbytes(), " bytes; ", wanted, " are needed, zero at first.");
    call->workspace = workspace.mutable_data_ptr();
    Tensor logits = at::empty({1, vocab_size}, head.options());
    call->logits = logits.mutable_data_ptr();
    static const auto launch = FUSELINE_KERNEL(fuseline_decode_step);
    check_launch(launch(call.get(), current_stream(head)), kName);
    return logits;
}

Tensor decode_step_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, at::TensorList,
                        const c10::List<OptionalTensor>&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, const Tensor&, const OptionalTensor&, const Tensor& head, int64_t,
                        int64_t vocab_size, int64_t, double, double, c10::string_view, c10::string_view) {
    return at::empty({1, vocab_size}, head.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define_on_cuda(m, "decode_step(Tensor(a!) token, Tensor(b!) workspace, Tensor(c!) k, Tensor(d!) v, Tensor(e!) length, Tensor[] weights, "
                      "Tensor?[] biases, Tensor token_table, Tensor? position_table, Tensor? cos, Tensor? sin, Tensor norm, "
                      "Tensor? norm_bias, Tensor head, int heads, int vocab_size, int window, float eps, float scale, str norm_kind, "
                      "str activation) -> Tensor", decode_step_cuda, decode_step_meta);
    m.def("decode_step_workspace(Tensor like, int num_layers, int embed_dim, int heads, int kv_heads, int head_dim, "
          "int ffn_dim, int vocab_size, str activation) -> int");
    m.impl("decode_step_workspace", torch::dispatch(c10::DispatchKey::CUDA, decode_step_workspace));
}

}  // namespace fuseline::decode_step_op
