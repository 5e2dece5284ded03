// What the files of the self-attention layer share: what its ops take, its sizes, and the two ways to compute it.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include "op.h"

namespace fuseline::self_attention {

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kName = "self_attention_layer";

// What the ops take after their tensors.
struct Options {
    int64_t num_heads, num_kv_heads;
    bool causal, mask_hides;  // mask_hides: True of the mask hides a key, else it keeps it
    double dropout_p;
    std::optional<double> softmax_scale;  // 1 / sqrt(head_dim)
    bool fused;
};

// One projection [3 D, D] for all heads, in the place of one with rows for each.
inline bool is_shared(const Tensor& x, const Tensor& qkv_weight) { return x.sym_size(2) != qkv_weight.sym_size(1); }

struct Sizes {
    int64_t B, S, E, H, kv, D, out;
    bool shared;
    double scale;  // of the scores

    Sizes(const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight, const Options& o)
        : B(x.size(0)),
          S(x.size(1)),
          E(x.size(2)),
          H(o.num_heads),
          kv(o.num_kv_heads),
          D(qkv_weight.size(0) / (is_shared(x, qkv_weight) ? 3 : o.num_heads + 2 * o.num_kv_heads)),
          out(out_weight.size(0)),
          shared(is_shared(x, qkv_weight)),
          scale(o.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(1, D))))) {}

    int64_t tokens() const { return B * S; }
    int64_t groups() const { return H + 2 * kv; }  // of D columns of q, k, v
    int64_t projected() const { return groups() * D; }
};

// In ATen's operators (self_attention_composed.cpp): the output, q, k and v, what was attended to, and the probabilities.
Four composed_forward(const Sizes& s, const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                      const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                      const OptionalTensor& seed, const Options& o);
Five composed_backward(const Sizes& s, const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight,
                       const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv,
                       const Tensor& attended, const Tensor& weights, const Options& o, std::array<bool, 5> wanted);

// In the kernels (self_attention_fused.cpp), if they take this layer; no probabilities are kept, and without `keep` nothing.
bool runs_fused(const Sizes& s, const Tensor& x, const Options& o, bool backward);
Four fused_forward(const Sizes& s, const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
                   const Tensor& out_weight, const OptionalTensor& out_bias, const OptionalTensor& mask,
                   const OptionalTensor& seed, const Options& o, bool keep);
Five fused_backward(const Sizes& s, const Tensor& grad_out, const Tensor& x, const Tensor& qkv_weight,
                    const Tensor& out_weight, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& qkv,
                    const Tensor& attended, const Options& o, std::array<bool, 5> wanted);

}  // namespace fuseline::self_attention
