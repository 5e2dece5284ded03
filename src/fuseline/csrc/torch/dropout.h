// Dropout's factors on the CPU, for the ops that drop.

#pragma once

#include <ATen/ops/empty.h>

#include "cpu/philox.h"
#include "fuseline_torch.h"

namespace fuseline {

// What dropout with probability p multiplies the elements of x with, 0 or 1 / (1 - p), in accumulators.
inline Tensor dropout_factors(const Tensor& x, double p, const Tensor& seed) {
    const auto type = accumulator_type(x.scalar_type());
    const Tensor factors = at::empty(x.sizes(), x.options().dtype(type));
    const auto word = static_cast<uint64_t>(seed.const_data_ptr<int64_t>()[0]);
    const uint32_t threshold = cpu::dropout_threshold(p);
    const double scale = cpu::dropout_scale(p);
    at::parallel_for(0, factors.numel(), 4096, [&](int64_t begin, int64_t end) {
        if (type == at::kDouble) {
            cpu::dropout_multipliers(word, threshold, scale, begin, factors.data_ptr<double>() + begin, end - begin);
        } else {
            cpu::dropout_multipliers(word, threshold, static_cast<float>(scale), begin,
                                     factors.data_ptr<float>() + begin, end - begin);
        }
    });
    return factors;
}

}  // namespace fuseline
