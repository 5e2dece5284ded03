// A linear head and its loss, chunk of rows after chunk: what linear_cross_entropy.cpp is made of.

#pragma once

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "cross_entropy.h"
#include "op.h"
#include "weight_copies.h"

namespace fuseline::linear_head {

using losses::OptionalSize;

constexpr const char* kName = "linear_cross_entropy";

// What every op of this family takes after its tensors: the loss's options, and the rows of a chunk.
struct Options : losses::Options {
    c10::SymInt chunk_size;
};

// ---- the ops that a chunk goes through ----

// The loss of the rows of a chunk of logits: summed, of each, or of all rows their mean.
inline Tensor chunk_loss(const Tensor& logits, const Tensor& target, const OptionalTensor& class_weight, const Options& o,
                         c10::string_view reduction) {
    constexpr Op<"cross_entropy", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, double, c10::string_view,
                                         std::optional<double>, double, OptionalSize, bool)> op;
    return op(logits, target, class_weight, o.ignore_index, o.label_smoothing, reduction, o.soft_cap,
                   o.z_loss, o.vocab_size, false);
}

// The same loss, summed or their mean, and its gradient over the logits.
inline Tensor chunk_loss_and_gradient(const Tensor& logits, const Tensor& target, const OptionalTensor& class_weight,
                                      const Options& o, c10::string_view reduction) {
    constexpr Op<"cross_entropy_forward_", Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, double,
                                                  c10::string_view, std::optional<double>, double, OptionalSize)> op;
    return op(logits, target, class_weight, o.ignore_index, o.label_smoothing, reduction, o.soft_cap, o.z_loss,
                   o.vocab_size);
}

constexpr Op<"scale_rows_", void(const Tensor&, const Tensor&)> scale_rows_op;

// ---- chunks ----

inline void check(const Tensor& hidden, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
           const Options& o) {
    cpu_type(hidden, kName);
    TORCH_CHECK_VALUE(hidden.dim() >= 1 && weight.dim() == 2 && hidden.sym_size(-1) == weight.sym_size(1), kName,
                      ": hidden has shape ", hidden.sym_sizes(), " and weight ", weight.sym_sizes(),
                      "; they are [..., C] and [V, C].");
    TORCH_CHECK_VALUE(target.sym_sizes() == hidden.sym_sizes().slice(0, hidden.dim() - 1), kName,
                      ": target has shape ", target.sym_sizes(), " and hidden ", hidden.sym_sizes(),
                      "; target has the shape of hidden without the last dimension.");
    TORCH_CHECK_VALUE(target.device() == hidden.device(), kName, ": target is on ", target.device(), " and hidden on ",
                      hidden.device(), ". Move it with target.to(hidden.device).");
    const auto same_place = [&](const Tensor& given, const char* name) {
        check_device(kName, given, name, hidden, "hidden");
        check_same_dtype_or_float(kName, given, name, hidden, "hidden");
    };
    same_place(weight, "weight");
    if (bias.has_value()) {
        same_place(*bias, "bias");
        TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kName, ": bias has shape ",
                          bias->sym_sizes(), "; it is [", weight.sym_size(0), "], one for each class.");
    }
    TORCH_CHECK_VALUE(o.reduction == "mean" || o.reduction == "sum" || o.reduction == "none", kName,
                      ": reduction is '", o.reduction, "'; it is 'mean', 'sum' or 'none'.");
    if (o.vocab_size.has_value()) {
        TORCH_CHECK_VALUE(*o.vocab_size >= 1 && *o.vocab_size <= weight.sym_size(0), kName, ": vocab_size is ",
                          *o.vocab_size, "; weight has ", weight.sym_size(0), " rows, and at least one counts.");
    }
    TORCH_CHECK_VALUE(o.chunk_size >= 1, kName, ": chunk_size is ", o.chunk_size, "; it is at least one row.");
}

// The products of a head where a kernel of ours is faster than the matrix library's, into `out`; false elsewhere. `factors`
// of rows, if they are given, multiply those of the gradient of hidden.
bool multiply_logits(const Tensor& hidden, const Tensor& weight, const Tensor& out);
bool multiply_grad_hidden(const Tensor& grad_logits, const Tensor& weight, const Tensor& out, const Tensor& factors = {});
bool multiply_grad_weight(const Tensor& grad_logits, const Tensor& hidden, const Tensor& out);

// The head as matrices of one dtype, and the rows in chunks of about equal size. A row of logits has room for `width` words,
// a multiple of 16 bytes, so that each begins where kernels can copy whole vectors, as rows of 50,257 bf16 logits do not.
struct Head {
    Tensor hidden, weight, target;
    OptionalTensor bias, class_weight;
    int64_t rows, chunks, each, words, width;

    Head(const Tensor& h, const Tensor& w, const Tensor& t, const OptionalTensor& b, const OptionalTensor& c,
         const Options& o)
        : hidden(h.contiguous().view({-1, h.size(-1)})),
          weight(lowered(w, h.scalar_type()).contiguous()),
          target(t.reshape({-1})),
          class_weight(c) {
        if (b.has_value()) bias = lowered(*b, h.scalar_type()).contiguous();
        const int64_t vector = 16 / h.element_size();
        words = weight.size(0), width = (words + vector - 1) / vector * vector;
        rows = hidden.size(0);
        const int64_t most = o.chunk_size.guard_int(__FILE__, __LINE__);
        chunks = std::max<int64_t>(1, (rows + most - 1) / most);
        each = std::max<int64_t>(1, (rows + chunks - 1) / chunks);
        if (chunks > 1) each = std::min(most, (each + 127) / 128 * 128);  // whole tiles for the matrix products
    }

    // With words of zeros up to `width`. Matrix libraries take products over 50,264 words up to six times as fast as those
    // over 50,257. Logits of the words beyond `words` are no words' until the loss, which does not count them, makes them
    // zeros.
    Head padded() const {
        Head head(*this);
        if (width == words) return head;
        const auto pad = [&](const Tensor& given) {
            auto sizes = given.sizes().vec();
            sizes[0] = width;
            const Tensor room = at::empty(sizes, given.options());
            room.narrow(0, 0, words).copy_(given);
            room.narrow(0, words, width - words).zero_();
            return room;
        };
        head.weight = pad(weight);
        if (bias.has_value()) head.bias = pad(*bias);
        return head;
    }

    // Of a padded head: [rows of the part, width]
    Tensor logits(const Tensor& part) const {
        Tensor out = at::empty({part.size(0), width}, part.options());
        if (bias.has_value()) {
            at::addmm_out(out, *bias, part, weight.t());
        } else if (!multiply_logits(part, weight, out)) {
            at::mm_out(out, part, weight.t());
        }
        return out;
    }

    // How many of the words count.
    int64_t counted(const Options& o) const { return o.columns(weight.narrow(0, 0, words).t()); }

    // The options of a loss of `width` words, of which as many count as before.
    Options of_width(Options o) const {
        if (width != words) o.vocab_size = counted(o);
        return o;
    }

    // Calls work(begin, length) for each chunk.
    template <class Work>
    void each_chunk(const Work& work) const {
        for (int64_t begin = 0; begin < rows; begin += each) work(begin, std::min(each, rows - begin));
    }
};

// The loss, of each row in one dimension, where kernels take it without logits in memory; undefined elsewhere. They round
// no logits.
Tensor loss_without_logits(const Head& head, const Options& o);

// What the gradients' products take of a chunk: the gradient of its logits, `width` wide, and its rows of hidden; or, with `factors` of its
// rows, powers whose product with them is that gradient, and hidden times them (kernels/fuseline_linear_head.h), which is
// rounded once more; so is the gradient of hidden where the product is the matrix library's.
struct ChunkGradient {
    Tensor logits, hidden, factors;
};

// The gradients of hidden, weight and bias of a padded head, chunk after chunk. With more than two chunks, or where a sum over all rows may
// leave fp16's range, those of weight and bias are added up in fp32. Two are added with one rounding more than one has.
struct Gradients {
    const Head& head;
    std::array<bool, 3> wanted;
    Tensor hidden, weight, bias;

    Gradients(const Head& of, std::array<bool, 3> want, at::ScalarType sums) : head(of), wanted(want) {
        const bool several = head.rows > 2 * head.each;
        if (wanted[0]) hidden = at::empty(head.hidden.sizes(), head.hidden.options());
        const bool wide = several || sums != head.hidden.scalar_type();
        const auto options = head.weight.options().dtype(wide ? accumulator_type(sums) : sums);
        if (wanted[1]) weight = head.rows > 0 ? at::empty(head.weight.sizes(), options)
                                              : at::zeros(head.weight.sizes(), options);
        if (wanted[2]) bias = at::zeros({head.width}, options);
    }

    // Words that do not count have no gradient: 0 times what is no number would be NaN.
    void clear_from(int64_t counted) {
        const int64_t rest = head.words - counted;
        if (rest > 0 && weight.defined()) weight.narrow(0, counted, rest).zero_();
        if (rest > 0 && bias.defined()) bias.narrow(0, counted, rest).zero_();
    }

    // The weight's gradient of a chunk, added to those before it.
    void add_weight(const Tensor& grad_logits, const Tensor& part, bool first) {
        if (first && multiply_grad_weight(grad_logits, part, weight)) return;
        const Tensor across = grad_logits.t();
        if (weight.scalar_type() != part.scalar_type() && !part.is_cuda()) {
            const Tensor product = at::mm(across.to(weight.scalar_type()), part.to(weight.scalar_type()));
            first ? weight.copy_(product) : weight.add_(product);
        } else if (weight.scalar_type() != part.scalar_type()) {
            first ? at::mm_out(weight, across, part, weight.scalar_type())
                  : at::addmm_out(weight, weight, across, part, weight.scalar_type());
        } else {
            first ? at::mm_out(weight, across, part) : at::addmm_out(weight, weight, across, part);
        }
    }

    void add(const Tensor& grad_logits, int64_t begin) {
        add(ChunkGradient{grad_logits, head.hidden.narrow(0, begin, grad_logits.size(0)), {}}, begin);
        if (wanted[2]) bias.add_(grad_logits.sum(at::IntArrayRef{0}, false, bias.scalar_type()));
    }

    void add(const ChunkGradient& chunk, int64_t begin) {
        if (wanted[0]) {
            Tensor to = hidden.narrow(0, begin, chunk.logits.size(0));
            if (!multiply_grad_hidden(chunk.logits, head.weight, to, chunk.factors)) {
                at::mm_out(to, chunk.logits, head.weight);
                if (chunk.factors.defined()) scale_rows_op(to, chunk.factors);
            }
        }
        if (wanted[1]) add_weight(chunk.logits, chunk.hidden, begin == 0);
    }

    Tensor weight_as(at::ScalarType type) const { return wanted[1] ? of_words(weight).to(type) : Tensor(); }
    Tensor bias_as(at::ScalarType type) const { return wanted[2] ? of_words(bias).to(type) : Tensor(); }

    Tensor of_words(const Tensor& padded) const { return padded.narrow(0, 0, head.words); }
};

// The divisor of the mean: the sum of the class weights of all targets that are not ignored. A target that is no class
// counts with the last one's weight; its loss tells.
inline Tensor divisor(const Head& head, const Options& o, const at::TensorOptions& options) {
    const Tensor kept = head.target.ne(o.ignore_index);
    if (!head.class_weight.has_value()) return kept.sum(options.dtype().toScalarType());
    const Tensor classes = at::where(kept, head.target, 0).clamp(0, head.class_weight->size(0) - 1);
    const Tensor weights = head.class_weight->index_select(0, classes).to(options.dtype());
    return weights.mul(kept).sum();
}

// The loss of all rows, and the gradients of it, added to `gradients`, where kernels have them without a pass over logits;
// undefined elsewhere. Those of a mean are divided.
Tensor loss_by_powers(const Head& head, const Options& o, Gradients& gradients);

// What saved gradients of the weight are kept in: no sum of fp16 products leaves the range of fp32.
inline at::ScalarType saved_type(const Tensor& hidden, const Tensor& weight) {
    return hidden.scalar_type() == at::kHalf ? at::kFloat : weight.scalar_type();
}

}  // namespace fuseline::linear_head
