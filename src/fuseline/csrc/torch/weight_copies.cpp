// Copies of weights in 16 bits, made once for a step (fuseline.acceleration.weight_copies), which ops take in the place of
// casts of their own.
//
// A step begins with the copies that it made and ends by taking them back. In between a copy stands for the weight at its
// address, unless the weight was changed since. Weights that an op casts itself are noted, so that the next step has copies
// of them. What is recorded for a compiler is cast: the compiled code runs in other steps too. So is what runs on another
// stream than the step began on: a CUDA graph that somebody captures within a step outlives the step's copies.

#include "weight_copies.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "spent_gradient.h"

namespace fuseline {
namespace weight_copies {
namespace {

struct Copy {
    Tensor weight, copy;
    int64_t version;
    c10::StreamId stream;
};

struct Copies {
    std::mutex mutex;
    std::unordered_map<const void*, Copy> of;  // by the weight's address
    std::set<const void*> cast;                // weights without a copy that ops asked for
    int64_t steps = 0;                         // that have begun and not ended
};

Copies& copies() {
    static Copies* const all = new Copies;  // outlives the library's own end
    return *all;
}

int64_t version_of(const Tensor& x) { return x.is_inference() ? 0 : x._version(); }

c10::StreamId stream_of(const Tensor& x) {
    return x.is_cuda() ? c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()).id() : 0;
}

bool lies_like(const Tensor& x, const Tensor& other) { return x.sizes() == other.sizes() && x.strides() == other.strides(); }

// The copy of a weight, also where the weight is the transpose of what was copied or has its elements in other dimensions;
// undefined where there is none.
Tensor copy_of(const Tensor& weight, at::ScalarType type) {
    Copies& all = copies();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.steps == 0) return {};
    const auto found = all.of.find(weight.const_data_ptr());
    if (found != all.of.end() && found->second.copy.scalar_type() == type &&
        found->second.version == version_of(found->second.weight) && found->second.stream == stream_of(weight)) {
        const Copy& kept = found->second;
        if (lies_like(weight, kept.weight)) return kept.copy;
        if (kept.weight.dim() == 2 && lies_like(weight, kept.weight.t())) return kept.copy.t();
        const bool whole = weight.numel() == kept.weight.numel() && weight.is_contiguous() && kept.weight.is_contiguous();
        if (whole) return kept.copy.view(weight.sizes());
    }
    all.cast.insert(weight.const_data_ptr());
    return {};
}

void begin(at::TensorList weights, at::TensorList made) {
    TORCH_CHECK_VALUE(weights.size() == made.size(), "weight_copies_begin: ", weights.size(), " weights and ", made.size(),
                      " copies; there is one of each.");
    Copies& all = copies();
    const std::lock_guard<std::mutex> lock(all.mutex);
    ++all.steps;
    for (size_t i = 0; i < weights.size(); ++i) {
        TORCH_CHECK_VALUE(lies_like(weights[i], made[i]), "weight_copies_begin: copy ", i, " lies otherwise than its weight.");
        all.of.insert_or_assign(weights[i].const_data_ptr(), Copy{weights[i], made[i], version_of(weights[i]), stream_of(weights[i])});
    }
}

// Returns the addresses of the weights that ops cast themselves.
std::vector<int64_t> end(at::TensorList weights) {
    Copies& all = copies();
    const std::lock_guard<std::mutex> lock(all.mutex);
    --all.steps;
    for (const Tensor& weight : weights) all.of.erase(weight.const_data_ptr());
    std::vector<int64_t> cast;
    for (const void* address : all.cast) cast.push_back(reinterpret_cast<int64_t>(address));
    all.cast.clear();
    return cast;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("weight_copies_begin(Tensor[] weights, Tensor[] copies) -> ()", begin);
    m.def("weight_copies_end(Tensor[] weights) -> int[]", end);
    m.def("lowered_weight(Tensor(a) weight, ScalarType dtype) -> Tensor(a)", [](const Tensor& weight, at::ScalarType dtype) {
        return lowered(weight, dtype);
    });
}

}  // namespace weight_copies

Tensor lowered(const Tensor& weight, at::ScalarType type) {
    if (weight.scalar_type() == type) return weight;
    const bool plain = !weight.is_meta() && weight.numel() > 0 && !recorded(weight) && !c10::impl::dispatch_mode_enabled();
    const Tensor copy = plain ? weight_copies::copy_of(weight, type) : Tensor();
    return copy.defined() ? copy : weight.to(type);
}

}  // namespace fuseline
