// Rotary positions, and their gradient: the same turn backwards; of one tensor, or of two (queries and keys) in one launch.
//
// x is [.., H, T, D] or [.., T, H, D], read through its strides; the result lies in memory in the order x does. On the CPU
// it is put together from ATen's own kernels, in float32 (float64 for float64) and rounded once at the end.

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "op.h"

namespace fuseline::rope_op {
namespace {

constexpr const char* kName = "rope";

// How x is turned: all arguments but x.
struct Turn {
    OptionalTensor cos, sin, positions;
    double base;
    bool interleaved;
    std::optional<int64_t> dims;
    int64_t seq_dim;
};

using Signature = Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double, bool,
                         std::optional<int64_t>, int64_t);

Tensor forward_op(const Tensor& x, const Turn& turn) {
    constexpr Op<"rope", Signature> op;
    return op(x, turn.cos, turn.sin, turn.positions, turn.base, turn.interleaved, turn.dims, turn.seq_dim);
}

using Two = std::tuple<Tensor, Tensor>;
using PairSignature = Two(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                          double, bool, std::optional<int64_t>, int64_t);

template <OpName name>
Two pair_op(const Tensor& q, const Tensor& k, const Turn& turn) {
    constexpr Op<name, PairSignature> op;
    return op(q, k, turn.cos, turn.sin, turn.positions, turn.base, turn.interleaved, turn.dims, turn.seq_dim);
}

Tensor backward_op(const Tensor& grad_out, const Turn& turn) {
    constexpr Op<"rope_backward", Signature> op;
    return op(grad_out, turn.cos, turn.sin, turn.positions, turn.base, turn.interleaved, turn.dims, turn.seq_dim);
}

// The dimension of x that counts tokens.
int64_t token_dim(const Tensor& x, const Turn& turn) {
    const int64_t dim = turn.seq_dim < 0 ? turn.seq_dim + x.dim() : turn.seq_dim;
    const bool fits = x.dim() >= 2 && x.dim() <= 4 && (dim == x.dim() - 2 || dim == x.dim() - 3) && dim >= 0;
    TORCH_CHECK_VALUE(fits && (x.dim() < 4 || dim >= 1), kName, ": x has shape ", x.sym_sizes(), " and seq_dim is ",
                      turn.seq_dim, ". x is [T, D], [H, T, D] or [B, H, T, D] with seq_dim=-2, or [T, H, D] or "
                      "[B, T, H, D] with seq_dim=-3.");
    return dim;
}

int64_t rotary_dims(const Tensor& x, const Turn& turn) {
    if (turn.dims.has_value()) return *turn.dims;
    const int64_t D = x.size(-1);
    return D - D % 2;
}

void check_table(const OptionalTensor& table, const char* name, const Tensor& x, const Turn& turn, int64_t tokens) {
    TORCH_CHECK_VALUE(table->dim() == 2, kName, ": ", name, " has shape ", table->sym_sizes(),
                      "; it is [positions, dims / 2].");
    TORCH_CHECK_VALUE(table->device() == x.device(), kName, ": ", name, " is on ", table->device(), " and x on ",
                      x.device(), ".");
    TORCH_CHECK_TYPE(table->is_floating_point(), kName, ": ", name, " is ", table->scalar_type(), "; give float32.");
    TORCH_CHECK_NOT_IMPLEMENTED(!wants_grad(table), kName, ": ", name, " requires a gradient, and has none here. "
                                "Detach it.");
    const auto D = x.sym_size(-1);
    const auto pairs = turn.dims.has_value() ? c10::SymInt(*turn.dims / 2) : (D - D % 2) / 2;
    TORCH_CHECK_VALUE(table->sym_size(1) == pairs, kName, ": ", name, " has shape ", table->sym_sizes(), " for ",
                      pairs * 2, " rotary dimensions; its rows are half as long.");
    TORCH_CHECK_VALUE(turn.positions.has_value() || table->sym_size(0) >= x.sym_size(tokens), kName, ": ", name,
                      " has ", table->sym_size(0), " positions, and x ", x.sym_size(tokens), " tokens.");
}

void check(const Tensor& x, const Turn& turn) {
    cpu_type(x, kName);
    const int64_t tokens = token_dim(x, turn);
    if (turn.dims.has_value()) {
        TORCH_CHECK_VALUE(*turn.dims >= 0 && *turn.dims % 2 == 0 && x.sym_size(-1) >= *turn.dims, kName, ": dims is ",
                          *turn.dims, ", and x has ", x.sym_size(-1), " elements a head; dims is even and no more.");
    }
    TORCH_CHECK_VALUE(turn.cos.has_value() == turn.sin.has_value(), kName,
                      ": cos and sin are given both or not at all.");
    TORCH_CHECK_VALUE(turn.base > 0, kName, ": base is ", turn.base, "; it is positive.");
    if (turn.cos.has_value()) {
        check_table(turn.cos, "cos", x, turn, tokens);
        check_table(turn.sin, "sin", x, turn, tokens);
    }
    if (!turn.positions.has_value()) return;
    const Tensor& positions = *turn.positions;
    TORCH_CHECK_TYPE(positions.scalar_type() == at::kLong, kName, ": positions are ", positions.scalar_type(),
                     "; they are int64: positions.long().");
    TORCH_CHECK_VALUE(positions.device() == x.device(), kName, ": positions are on ", positions.device(), " and x on ",
                      x.device(), ".");
    const bool shared = positions.dim() == 1 && positions.sym_size(0) == x.sym_size(tokens);
    const bool apart = positions.dim() == 2 && tokens > 0 && positions.sym_size(0) == x.sym_size(0) &&
                       positions.sym_size(1) == x.sym_size(tokens);
    TORCH_CHECK_VALUE(shared || apart, kName, ": positions have shape ", positions.sym_sizes(), " for x of shape ",
                      x.sym_sizes(), "; they are [T] or [B, T].");
}

// Contiguous, but with heads and tokens the way round they lie in x.
Tensor empty_beside(const Tensor& x) {
    if (x.dim() != 4 || !(x.sym_stride(1) < x.sym_stride(2))) return at::empty_symint(x.sym_sizes(), x.options());
    const auto& sizes = x.sym_sizes();
    const std::array<c10::SymInt, 4> strides = {sizes[1] * sizes[2] * sizes[3], sizes[3], sizes[1] * sizes[3], 1};
    return at::empty_strided_symint(sizes, strides, x.options());
}

// x as [B, H, T, D]: which of its dimensions those are, -1 for one that it has not.
struct Dimensions {
    int64_t batch = -1, head = -1, token;

    Dimensions(const Tensor& x, const Turn& turn) : token(token_dim(x, turn)) {
        const bool heads_last = token == x.dim() - 3;
        if (x.dim() == 4) {
            batch = 0, head = heads_last ? 2 : 1;
        } else if (x.dim() == 3) {
            // [T, H, D], or [N, T, D], N being heads unless each has positions of its own.
            if (heads_last) {
                head = 1;
            } else {
                (turn.positions.has_value() && turn.positions->dim() == 2 ? batch : head) = 0;
            }
        }
    }
    static int64_t size(const Tensor& x, int64_t dim) { return dim < 0 ? 1 : x.size(dim); }
    static int64_t stride(const Tensor& x, int64_t dim) { return dim < 0 ? 0 : x.stride(dim); }
    std::array<int64_t, 3> strides(const Tensor& x) const {
        return {stride(x, batch), stride(x, head), stride(x, token)};
    }
};

template <bool backward>
Tensor rope_cpu(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& positions,
                double base, bool interleaved, std::optional<int64_t> dims, int64_t seq_dim) {
    const Turn turn{cos, sin, positions, base, interleaved, dims, seq_dim};
    check(x, turn);
    const Dimensions at(x, turn);
    const int64_t rotary = rotary_dims(x, turn), pairs = rotary / 2;
    const auto type = accumulator_type(x.scalar_type());
    const auto exact = x.options().dtype(at::kDouble);
    Tensor cosine, sine;  // [T, pairs] or [B, T, pairs]
    if (cos.has_value()) {
        const auto rows = [&](const Tensor& table) {
            if (!positions.has_value()) return table.narrow(0, 0, x.size(at.token));
            auto sizes = positions->sizes().vec();
            sizes.push_back(pairs);
            return table.index_select(0, positions->flatten()).view(sizes);
        };
        cosine = rows(*cos), sine = rows(*sin);
    } else {
        const Tensor numbers = positions.has_value() ? positions->to(at::kDouble) : at::arange(x.size(at.token), exact);
        const Tensor exponents = at::arange(pairs, exact).mul(-2.0 / static_cast<double>(std::max<int64_t>(1, rotary)));
        const Tensor angles = numbers.unsqueeze(-1).mul(at::pow(base, exponents));
        cosine = at::cos(angles), sine = at::sin(angles);
    }
    cosine = cosine.to(type), sine = sine.to(type);
    if (backward) sine = sine.neg();
    // Heads stand between batch and tokens, or between tokens and pairs.
    if (at.head >= 0 && at.head > at.token) {
        cosine = cosine.unsqueeze(-2), sine = sine.unsqueeze(-2);
    } else if (at.head >= 0 && cosine.dim() == 3) {
        cosine = cosine.unsqueeze(1), sine = sine.unsqueeze(1);
    }
    const Tensor turned = x.narrow(-1, 0, rotary).to(type);
    Tensor left, right;
    if (interleaved) {
        const Tensor both = turned.unflatten(-1, {pairs, 2});
        left = both.select(-1, 0), right = both.select(-1, 1);
    } else {
        left = turned.narrow(-1, 0, pairs), right = turned.narrow(-1, pairs, pairs);
    }
    const Tensor one = left.mul(cosine).sub(right.mul(sine)), other = right.mul(cosine).add(left.mul(sine));
    const Tensor result = interleaved ? at::stack({one, other}, -1).flatten(-2) : at::cat({one, other}, -1);
    Tensor y = empty_beside(x);
    y.narrow(-1, 0, rotary).copy_(result);
    y.narrow(-1, rotary, x.size(-1) - rotary).copy_(x.narrow(-1, rotary, x.size(-1) - rotary));
    return y;
}

// One launch for `given`, one tensor or two that have all sizes but the heads alike.
template <size_t kCount>
std::array<Tensor, kCount> turned(const std::array<Tensor, kCount>& given, const Turn& turn, bool backward) {
    const Tensor& first = given[0];
    const c10::DeviceGuard guard(first.device());
    const Dimensions at(first, turn);
    const int64_t rotary = rotary_dims(first, turn), T = first.size(at.token), D = first.size(-1);
    TORCH_CHECK_VALUE(turn.cos.has_value() || rotary <= 512, kName, ": ", rotary, " rotary dimensions; for more than 512 "
                      "give cos and sin.");
    std::array<Tensor, kCount> xs, ys;
    std::array<fuseline_rope_tensor, kCount> tensors;
    for (size_t i = 0; i < kCount; ++i) {
        xs[i] = D > 1 && given[i].stride(-1) != 1 ? given[i].contiguous() : given[i];
        ys[i] = empty_beside(given[i]);
        tensors[i].x = xs[i].const_data_ptr(), tensors[i].y = ys[i].data_ptr();
        tensors[i].heads = Dimensions::size(xs[i], at.head);
        std::ranges::copy(at.strides(xs[i]), tensors[i].x_strides);
        std::ranges::copy(at.strides(ys[i]), tensors[i].y_strides);
    }
    const auto table = [](const OptionalTensor& t) {
        return t.has_value() ? OptionalTensor(t->to(at::kFloat).contiguous()) : std::nullopt;
    };
    const OptionalTensor cosine = table(turn.cos), sine = table(turn.sin), numbers = contiguous(turn.positions);
    const auto floats = [](const OptionalTensor& t) { return static_cast<const float*>(data_or_null(t)); };
    static const auto launch = FUSELINE_KERNEL(fuseline_rope);
    check_launch(launch(tensors.data(), int(kCount), floats(cosine), floats(sine),
                        turn.cos.has_value() ? turn.cos->size(0) : 0, turn.base,
                        static_cast<const int64_t*>(data_or_null(numbers)),
                        numbers.has_value() && numbers->dim() == 2 ? T : 0, Dimensions::size(first, at.batch), T, D, rotary,
                        turn.interleaved, backward, kernel_dtype(first, kName), current_stream(first)),
                 kName);
    return ys;
}

template <bool backward>
Tensor rope_cuda(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& positions,
                 double base, bool interleaved, std::optional<int64_t> dims, int64_t seq_dim) {
    const Turn turn{cos, sin, positions, base, interleaved, dims, seq_dim};
    check(x, turn);
    return turned<1>({x}, turn, backward)[0];
}

// Whether one launch can take both: sizes are alike but for the heads.
bool go_together(const Tensor& q, const Tensor& k, const Turn& turn) {
    if (q.dim() != k.dim() || q.scalar_type() != k.scalar_type() || q.device() != k.device()) return false;
    const Dimensions at(q, turn);
    for (int64_t dim = 0; dim < q.dim(); ++dim) {
        if (dim != at.head && q.size(dim) != k.size(dim)) return false;
    }
    return true;
}

template <bool backward>
Two rope_pair_cpu(const Tensor& q, const Tensor& k, const OptionalTensor& cos, const OptionalTensor& sin,
                  const OptionalTensor& positions, double base, bool interleaved, std::optional<int64_t> dims,
                  int64_t seq_dim) {
    return {rope_cpu<backward>(q, cos, sin, positions, base, interleaved, dims, seq_dim),
            rope_cpu<backward>(k, cos, sin, positions, base, interleaved, dims, seq_dim)};
}

template <bool backward>
Two rope_pair_cuda(const Tensor& q, const Tensor& k, const OptionalTensor& cos, const OptionalTensor& sin,
                   const OptionalTensor& positions, double base, bool interleaved, std::optional<int64_t> dims,
                   int64_t seq_dim) {
    const Turn turn{cos, sin, positions, base, interleaved, dims, seq_dim};
    check(q, turn), check(k, turn);
    if (!go_together(q, k, turn)) return {turned<1>({q}, turn, backward)[0], turned<1>({k}, turn, backward)[0]};
    const auto both = turned<2>({q, k}, turn, backward);
    return {both[0], both[1]};
}

Two rope_pair_meta(const Tensor& q, const Tensor& k, const OptionalTensor& cos, const OptionalTensor& sin,
                   const OptionalTensor& positions, double base, bool interleaved, std::optional<int64_t> dims,
                   int64_t seq_dim) {
    const Turn turn{cos, sin, positions, base, interleaved, dims, seq_dim};
    check(q, turn), check(k, turn);
    return {empty_beside(q), empty_beside(k)};
}

Tensor rope_meta(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& positions,
                 double base, bool interleaved, std::optional<int64_t> dims, int64_t seq_dim) {
    check(x, {cos, sin, positions, base, interleaved, dims, seq_dim});
    return empty_beside(x);
}

void save(AutogradContext* ctx, const Turn& turn) {
    ctx->saved_data["base"] = turn.base;
    ctx->saved_data["interleaved"] = turn.interleaved;
    ctx->saved_data["dims"] = turn.dims.has_value() ? c10::IValue(*turn.dims) : c10::IValue();
    ctx->saved_data["seq_dim"] = turn.seq_dim;
    ctx->save_for_backward({turn.cos.value_or(Tensor()), turn.sin.value_or(Tensor()), turn.positions.value_or(Tensor())});
}

Turn saved(AutogradContext* ctx) {
    const auto tensors = ctx->get_saved_variables();
    const c10::IValue dims = ctx->saved_data["dims"];
    return {optional(tensors[0]),
            optional(tensors[1]),
            optional(tensors[2]),
            ctx->saved_data["base"].toDouble(),
            ctx->saved_data["interleaved"].toBool(),
            dims.isNone() ? std::nullopt : std::optional<int64_t>(dims.toInt()),
            ctx->saved_data["seq_dim"].toInt()};
}

struct Rope : torch::autograd::Function<Rope> {
    static constexpr bool is_traceable = true;

    static Tensor forward(AutogradContext* ctx, const Tensor& x, const Turn& turn) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        save(ctx, turn);
        return forward_op(x, turn);
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        return {backward_op(grads[0], saved(ctx)), Tensor()};
    }
};

struct RopePair : torch::autograd::Function<RopePair> {
    static constexpr bool is_traceable = true;

    static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Turn& turn) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        ctx->set_materialize_grads(false);
        save(ctx, turn);
        const auto [turned_q, turned_k] = pair_op<"rope_pair">(q, k, turn);
        // What is frozen stays so: nobody behind it computes its gradient.
        variable_list frozen;
        if (!q.requires_grad()) frozen.push_back(turned_q);
        if (!k.requires_grad()) frozen.push_back(turned_k);
        ctx->mark_non_differentiable(frozen);
        return {turned_q, turned_k};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const Turn turn = saved(ctx);
        if (ctx->needs_input_grad(0) && ctx->needs_input_grad(1) && grads[0].defined() && grads[1].defined()) {
            const auto [grad_q, grad_k] = pair_op<"rope_pair_backward">(grads[0], grads[1], turn);
            return {grad_q, grad_k, Tensor()};
        }
        const auto one = [&](size_t i) {
            return ctx->needs_input_grad(i) && grads[i].defined() ? backward_op(grads[i], turn) : Tensor();
        };
        return {one(0), one(1), Tensor()};
    }
};

Tensor rope_autograd(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin,
                     const OptionalTensor& positions, double base, bool interleaved, std::optional<int64_t> dims,
                     int64_t seq_dim) {
    const Turn turn{cos, sin, positions, base, interleaved, dims, seq_dim};
    if (tracked(x, cos, sin)) {
        check(x, turn);
        return Rope::apply(x, turn);
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_op(x, turn);
}

Two rope_pair_autograd(const Tensor& q, const Tensor& k, const OptionalTensor& cos, const OptionalTensor& sin,
                       const OptionalTensor& positions, double base, bool interleaved, std::optional<int64_t> dims,
                       int64_t seq_dim) {
    const Turn turn{cos, sin, positions, base, interleaved, dims, seq_dim};
    if (tracked(q, k, cos, sin)) {
        check(q, turn), check(k, turn);
        const variable_list both = RopePair::apply(q, k, turn);
        return {both[0], both[1]};
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    return pair_op<"rope_pair">(q, k, turn);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "rope(Tensor x, Tensor? cos=None, Tensor? sin=None, *, Tensor? positions=None, float base=10000.0, "
              "bool interleaved=False, int? dims=None, int seq_dim=-2) -> Tensor",
           rope_cpu<false>, rope_cuda<false>, rope_meta);
    define(m, "rope_backward(Tensor grad_out, Tensor? cos, Tensor? sin, Tensor? positions, float base, bool interleaved, "
              "int? dims, int seq_dim) -> Tensor", rope_cpu<true>, rope_cuda<true>, rope_meta);
    differentiate<rope_autograd>(m, "rope");
    refuse_second_derivative<"rope_backward", "rope", rope_meta>(m);
    define(m, "rope_pair(Tensor q, Tensor k, Tensor? cos=None, Tensor? sin=None, *, Tensor? positions=None, "
              "float base=10000.0, bool interleaved=False, int? dims=None, int seq_dim=-2) -> (Tensor, Tensor)",
           rope_pair_cpu<false>, rope_pair_cuda<false>, rope_pair_meta);
    define(m, "rope_pair_backward(Tensor grad_q, Tensor grad_k, Tensor? cos, Tensor? sin, Tensor? positions, float base, "
              "bool interleaved, int? dims, int seq_dim) -> (Tensor, Tensor)",
           rope_pair_cpu<true>, rope_pair_cuda<true>, rope_pair_meta);
    differentiate<rope_pair_autograd>(m, "rope_pair");
    refuse_second_derivative<"rope_pair_backward", "rope", rope_pair_meta>(m);
}

}  // namespace fuseline::rope_op
