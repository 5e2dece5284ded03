// Rows of a table for tokens, plus rows of a table for positions, through dropout; and the gradients of both tables.
//
// On the CPU it is put together from ATen's own kernels, in float32 (float64 for float64) and rounded once at the end.

#include <ATen/ops/alias.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "cpu/philox.h"
#include "op.h"
#include "spent_gradient.h"

namespace fuseline::embedding_op {
namespace {

using Two = std::tuple<Tensor, Tensor>;

constexpr const char* kName = "embedding";

constexpr Op<"embedding", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
              const OptionalTensor&, double)> forward_op;

constexpr Op<"embedding_backward", Two(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, const OptionalTensor&,
              int64_t, const OptionalTensor&, double, std::array<bool, 2>)> backward_op;

void check_ids(const Tensor& ids, const char* name, const Tensor& weight) {
    TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong, kName, ": ", name, " are ", ids.scalar_type(),
                     "; they are int64: ", name, ".long().");
    TORCH_CHECK_VALUE(ids.device() == weight.device(), kName, ": ", name, " are on ", ids.device(), " and weight on ",
                      weight.device(), ".");
}

void check(const Tensor& tokens, const Tensor& weight, const OptionalTensor& position_weight,
           const OptionalTensor& positions, const OptionalTensor& seed, double p) {
    cpu_type(weight, kName);
    check_ids(tokens, "tokens", weight);
    TORCH_CHECK_VALUE(weight.dim() == 2, kName, ": weight has shape ", weight.sym_sizes(), "; it is [vocabulary, N].");
    check_probability(kName, p);
    TORCH_CHECK_VALUE(p == 0 || seed.has_value(), kName, ": dropout with p=", p, " wants a seed: one int64.");
    if (seed.has_value()) check_seed(kName, *seed, weight);
    TORCH_CHECK_VALUE(position_weight.has_value() || !positions.has_value(), kName,
                      ": positions are given without a position_weight.");
    if (!position_weight.has_value()) return;
    TORCH_CHECK_VALUE(position_weight->dim() == 2 && position_weight->sym_size(1) == weight.sym_size(1), kName,
                      ": position_weight has shape ", position_weight->sym_sizes(), " and weight ", weight.sym_sizes(),
                      "; their rows are equally long.");
    check_device(kName, *position_weight, "position_weight", weight, "weight");
    check_same_dtype(kName, *position_weight, "position_weight", weight, "weight");
    TORCH_CHECK_VALUE(tokens.dim() >= 1, kName, ": tokens have no dimension to count positions in.");
    if (!positions.has_value()) {
        TORCH_CHECK_VALUE(tokens.sym_size(-1) <= position_weight->sym_size(0), kName, ": ", tokens.sym_size(-1),
                          " tokens in a row, but position_weight has ", position_weight->sym_size(0), " positions.");
        return;
    }
    check_ids(*positions, "positions", weight);
    const bool shared = positions->dim() == 1 && positions->sym_size(0) == tokens.sym_size(-1);
    TORCH_CHECK_VALUE(shared || positions->sym_sizes() == tokens.sym_sizes(), kName, ": positions have shape ",
                      positions->sym_sizes(), " and tokens ", tokens.sym_sizes(),
                      "; they are the same, or positions are the last dimension of tokens.");
}

// The ids repeat every `period` items.
int64_t period_of(const Tensor& tokens, const OptionalTensor& positions) {
    return positions.has_value() ? positions->numel() : tokens.dim() == 0 ? 1 : tokens.size(-1);
}

Tensor empty_output(const Tensor& tokens, const Tensor& weight) {
    auto sizes = tokens.sym_sizes().vec();
    sizes.push_back(weight.sym_size(1));
    return at::empty_symint(sizes, weight.options());
}

// What dropout multiplies a tensor like this with.
Tensor multipliers(const OptionalTensor& seed, double p, const Tensor& like) {
    Tensor result = at::empty(like.sizes(), like.options());
    const auto bits = static_cast<uint64_t>(*seed->const_data_ptr<int64_t>());
    const uint32_t threshold = cpu::dropout_threshold(p);
    const auto fill = [&](auto* to) {
        using A = std::remove_pointer_t<decltype(to)>;
        const A scale = static_cast<A>(cpu::dropout_scale(p));
        at::parallel_for(0, result.numel(), 16384, [&](int64_t begin, int64_t end) {
            cpu::dropout_multipliers(bits, threshold, scale, begin, to + begin, end - begin);
        });
    };
    if (result.scalar_type() == at::kDouble) {
        fill(result.mutable_data_ptr<double>());
    } else {
        fill(result.mutable_data_ptr<float>());
    }
    return result;
}

Tensor rows_of(const Tensor& table, const Tensor& ids) {
    auto sizes = ids.sizes().vec();
    sizes.push_back(table.size(1));
    return table.index_select(0, ids.flatten()).view(sizes).to(accumulator_type(table.scalar_type()));
}

Tensor embedding_cpu(const Tensor& tokens, const Tensor& weight, const OptionalTensor& position_weight,
                     const OptionalTensor& positions, int64_t, const OptionalTensor& seed, double p) {
    check(tokens, weight, position_weight, positions, seed, p);
    Tensor sum = rows_of(weight, tokens);
    if (position_weight.has_value()) {
        sum = sum.add(positions.has_value() ? rows_of(*position_weight, *positions)
                                            : position_weight->narrow(0, 0, tokens.size(-1)).to(sum.scalar_type()));
    }
    if (p > 0) sum = sum.mul(multipliers(seed, p, sum));
    return sum.to(weight.scalar_type()).contiguous();
}

Tensor embedding_cuda(const Tensor& tokens, const Tensor& weight, const OptionalTensor& position_weight,
                      const OptionalTensor& positions, int64_t, const OptionalTensor& seed, double p) {
    check(tokens, weight, position_weight, positions, seed, p);
    const c10::DeviceGuard guard(weight.device());
    const Tensor ids = tokens.contiguous(), table = weight.contiguous();
    const OptionalTensor numbers = contiguous(positions), position_table = contiguous(position_weight);
    Tensor y = empty_output(tokens, weight);
    static const auto launch = FUSELINE_KERNEL(fuseline_embedding_forward);
    check_launch(launch(ids.const_data_ptr<int64_t>(), table.const_data_ptr(),
                        static_cast<const int64_t*>(data_or_null(numbers)), data_or_null(position_table), y.data_ptr(),
                        ids.numel(), table.size(1), table.size(0), period_of(tokens, positions),
                        position_table.has_value() ? position_table->size(0) : 0,
                        static_cast<const int64_t*>(data_or_null(seed)), p, kernel_dtype(weight, kName),
                        current_stream(weight)),
                 kName);
    return y;
}

Tensor embedding_meta(const Tensor& tokens, const Tensor& weight, const OptionalTensor& position_weight,
                      const OptionalTensor& positions, int64_t, const OptionalTensor& seed, double p) {
    check(tokens, weight, position_weight, positions, seed, p);
    return empty_output(tokens, weight);
}

Two embedding_backward_meta(const Tensor& grad_out, const Tensor& tokens, c10::SymInt rows, c10::SymInt position_rows,
                            const OptionalTensor&, int64_t, const OptionalTensor&, double, std::array<bool, 2> wanted) {
    TORCH_CHECK_VALUE(grad_out.dim() == tokens.dim() + 1 && grad_out.sym_sizes().slice(0, tokens.dim()) == tokens.sym_sizes(),
                      "embedding_backward: grad_out has shape ", grad_out.sym_sizes(), " and tokens ",
                      tokens.sym_sizes(), "; grad_out has one dimension more.");
    const auto table = [&](const c10::SymInt& count) {
        return at::empty_symint({count, grad_out.sym_size(-1)}, grad_out.options());
    };
    return {wanted[0] ? table(rows) : Tensor(), wanted[1] ? table(position_rows) : Tensor()};
}

Two embedding_backward_cpu(const Tensor& grad_out, const Tensor& tokens, c10::SymInt rows, c10::SymInt position_rows,
                           const OptionalTensor& positions, int64_t padding_idx, const OptionalTensor& seed, double p,
                           std::array<bool, 2> wanted) {
    const auto type = grad_out.scalar_type();
    Tensor grad = grad_out.to(accumulator_type(type)).contiguous();
    if (p > 0) grad = grad.mul(multipliers(seed, p, grad));
    // It adds up in the order of the ids, whatever the number of threads.
    const auto table = [&](const Tensor& ids, int64_t count, int64_t skipped) {
        return at::embedding_dense_backward(grad, ids.expand_as(tokens).contiguous(), count, skipped, false).to(type);
    };
    Tensor grad_weight, grad_positions;
    if (wanted[0]) grad_weight = table(tokens, rows.expect_int(), padding_idx);
    if (wanted[1]) {
        const Tensor ids = positions.has_value() ? *positions : at::arange(tokens.size(-1), tokens.options());
        grad_positions = table(ids, position_rows.expect_int(), -1);
    }
    return {grad_weight, grad_positions};
}

// Into `grad_weight` and `grad_positions` where they are defined. `adds`: to what grad_weight has.
void sums_by_id(const Tensor& grad_out, const Tensor& tokens, const OptionalTensor& positions, int64_t padding_idx,
                const OptionalTensor& seed, double p, const Tensor& grad_weight, bool adds, const Tensor& grad_positions) {
    const c10::DeviceGuard guard(grad_out.device());
    const Tensor grad = grad_out.contiguous();
    const int64_t items = tokens.numel(), n = grad.size(-1);
    const int dtype = kernel_dtype(grad, kName);
    const auto* bits = static_cast<const int64_t*>(data_or_null(seed));
    Tensor workspace;
    const auto sum_by_id = [&](const Tensor& ids, int64_t period, int64_t skipped, const Tensor& result, bool added) {
        static const auto workspace_bytes = FUSELINE_KERNEL(fuseline_embedding_backward_workspace);
        static const auto launch = FUSELINE_KERNEL(fuseline_embedding_backward);
        if (!workspace.defined()) {
            const auto bytes = static_cast<int64_t>(workspace_bytes(items, n));
            workspace = at::empty({bytes}, grad.options().dtype(at::kByte));
        }
        check_launch(launch(grad.const_data_ptr(), ids.const_data_ptr<int64_t>(), period, skipped, result.data_ptr(),
                            added, workspace.data_ptr(), items, n, result.size(0), bits, p, dtype, current_stream(grad)),
                     "embedding_backward");
    };
    if (grad_weight.defined()) sum_by_id(tokens.contiguous(), items, padding_idx, grad_weight, adds);
    if (grad_positions.defined() && positions.has_value()) {
        sum_by_id(positions->contiguous(), positions->numel(), -1, grad_positions, false);
    } else if (grad_positions.defined()) {
        static const auto launch = FUSELINE_KERNEL(fuseline_embedding_position_backward);
        check_launch(launch(grad.const_data_ptr(), grad_positions.data_ptr(), items, n, grad_positions.size(0),
                            period_of(tokens, positions), bits, p, dtype, current_stream(grad)),
                     "embedding_backward");
    }
}

Two embedding_backward_cuda(const Tensor& grad_out, const Tensor& tokens, c10::SymInt rows, c10::SymInt position_rows,
                            const OptionalTensor& positions, int64_t padding_idx, const OptionalTensor& seed, double p,
                            std::array<bool, 2> wanted) {
    const auto [grad_weight, grad_positions] = embedding_backward_meta(grad_out, tokens, rows, position_rows, positions,
                                                                       padding_idx, seed, p, wanted);
    sums_by_id(grad_out, tokens, positions, padding_idx, seed, p, grad_weight, false, grad_positions);
    return {grad_weight, grad_positions};
}

// Whether the sums of an embedding's gradient can be added to what its table's gradient has from elsewhere: nobody else
// holds it, and nobody records this backward pass.
bool takes_sums(const Tensor& grad_table, const Tensor& grad_out) {
    return grad_table.defined() && grad_table.is_cuda() && grad_out.is_cuda() && grad_table.use_count() == 1 &&
           grad_table.storage().use_count() == 1 && grad_table.is_contiguous() && !recorded(grad_table) &&
           !recorded(grad_out) && grad_table.scalar_type() == grad_out.scalar_type() &&
           grad_out.scalar_type() != at::kDouble && !at::GradMode::is_enabled() && !c10::impl::dispatch_mode_enabled();
}

struct Embedding : torch::autograd::Function<Embedding> {
    static constexpr bool is_traceable = true;

    // The rows, and the table if it is wanted beside them.
    static variable_list forward(AutogradContext* ctx, const Tensor& tokens, const Tensor& weight,
                          const OptionalTensor& position_weight, const OptionalTensor& positions, int64_t padding_idx,
                          const OptionalTensor& seed, double p, bool returns_table) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        ctx->set_materialize_grads(false);
        ctx->saved_data["rows"] = weight.sym_size(0);
        ctx->saved_data["position_rows"] = position_weight.has_value() ? position_weight->sym_size(0) : c10::SymInt(0);
        ctx->saved_data["padding_idx"] = padding_idx;
        ctx->saved_data["p"] = p;
        ctx->saved_data["wanted"] = c10::List<bool>({weight.requires_grad(), wants_grad(position_weight)});
        ctx->save_for_backward({tokens, positions.value_or(Tensor()), seed.value_or(Tensor())});
        const Tensor y = forward_op(tokens, weight, position_weight, positions, padding_idx, seed, p);
        return returns_table ? variable_list{y, at::alias(weight)} : variable_list{y};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        const auto saved = ctx->get_saved_variables();
        const auto flags = ctx->saved_data["wanted"].toBoolList();
        const std::array<bool, 2> wanted = {flags.get(0) && ctx->needs_input_grad(1),
                                            flags.get(1) && ctx->needs_input_grad(2)};
        static const Tensor none;
        const Tensor& from_table = grads.size() == 2 ? grads[1] : none;  // a copy of it would count as another holder
        variable_list result(8);
        if (!grads[0].defined()) {
            if (wanted[0]) result[1] = from_table;
            return result;
        }
        if (wanted[0] && takes_sums(from_table, grads[0])) {
            if (wanted[1]) {
                result[2] = at::empty({ctx->saved_data["position_rows"].toInt(), grads[0].size(-1)}, grads[0].options());
            }
            sums_by_id(grads[0], saved[0], optional(saved[1]), ctx->saved_data["padding_idx"].toInt(), optional(saved[2]),
                       ctx->saved_data["p"].toDouble(), from_table, true, result[2]);
            result[1] = from_table;
            return result;
        }
        auto [grad_weight, grad_positions] =
            backward_op(grads[0], saved[0], ctx->saved_data["rows"].toSymInt(),
                        ctx->saved_data["position_rows"].toSymInt(), optional(saved[1]),
                        ctx->saved_data["padding_idx"].toInt(), optional(saved[2]), ctx->saved_data["p"].toDouble(),
                        wanted);
        result[1] = wanted[0] && from_table.defined() ? grad_weight.add(from_table) : grad_weight;
        result[2] = grad_positions;
        return result;
    }
};

Tensor embedding_autograd(const Tensor& tokens, const Tensor& weight, const OptionalTensor& position_weight,
                          const OptionalTensor& positions, int64_t padding_idx, const OptionalTensor& seed, double p) {
    if (tracked(weight, position_weight)) {
        return Embedding::apply(tokens, weight, position_weight, positions, padding_idx, seed, p, false)[0];
    }
    return forward_op.below_autograd(tokens, weight, position_weight, positions, padding_idx, seed, p);
}

// The rows, and the table for who else reads it: the embedding's gradient is then added to that of others, of which it
// touches few rows.
Two embedding_and_table(const Tensor& tokens, const Tensor& weight, const OptionalTensor& position_weight,
                        const OptionalTensor& positions, int64_t padding_idx, const OptionalTensor& seed, double p) {
    const bool forward_mode = forward_mode_is_on();
    const bool transformed = is_transformed(weight, forward_mode) || is_transformed(position_weight, forward_mode);
    if (!tracked(weight) || recorded(weight) || transformed || c10::impl::dispatch_mode_enabled()) {
        return {forward_op(tokens, weight, position_weight, positions, padding_idx, seed, p), weight};
    }
    const auto made = Embedding::apply(tokens, weight, position_weight, positions, padding_idx, seed, p, true);
    return {made[0], made[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    define(m, "embedding(Tensor tokens, Tensor weight, Tensor? position_weight=None, Tensor? positions=None, "
              "int padding_idx=-1, Tensor? seed=None, float p=0.0) -> Tensor", embedding_cpu, embedding_cuda, embedding_meta);
    m.def("embedding_and_table(Tensor tokens, Tensor(a) weight, Tensor? position_weight=None, Tensor? positions=None, "
          "int padding_idx=-1, Tensor? seed=None, float p=0.0) -> (Tensor y, Tensor(a) table)", embedding_and_table);
    define(m, "embedding_backward(Tensor grad_out, Tensor tokens, SymInt rows, SymInt position_rows, Tensor? positions, "
              "int padding_idx, Tensor? seed, float p, bool[2] wanted) -> (Tensor grad_weight, Tensor grad_positions)",
           embedding_backward_cpu, embedding_backward_cuda, embedding_backward_meta);
    differentiate<embedding_autograd>(m, "embedding");
    refuse_second_derivative<"embedding_backward", "embedding", embedding_backward_meta>(m);
}

}  // namespace fuseline::embedding_op
