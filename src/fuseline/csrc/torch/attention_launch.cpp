// Which of the attention kernels takes a call on the GPU: those of short sequences, with whole problems on chip, where they
// can, else the general ones.

#include "attention_launch.h"

#include <algorithm>

#include "fuseline_attention_short.h"

namespace fuseline {

// fuseline_torch.h has it, and with it torch's headers, which nothing else here needs.
void* kernel_symbol(const char* name);
#define FUSELINE_KERNEL(name) reinterpret_cast<decltype(&::name)>(::fuseline::kernel_symbol(#name))

namespace {

// Whether packed sequences come forward sooner by the general kernels: longest 128, head dim 64, 161 us on chip and 128 (H100);
// head dim 128, 117 and 130; longest 64, 66 and 73. On chip every sequence takes a whole block's turn, however short it is.
bool is_longer_packed(const fuseline_attention& call) {
    constexpr int64_t kTurn = 64;
    return call.cu_seqlens_q != nullptr && std::max(call.max_seqlen_q, call.max_seqlen_k) > kTurn && call.head_dim > 32 &&
           call.head_dim <= 64;
}

bool is_short(const fuseline_attention& call, bool backward) {
    static const auto fits = FUSELINE_KERNEL(fuseline_attention_short_fits);
    return fits(&call, backward) != 0 && (backward || !is_longer_packed(call));
}

size_t short_workspace(const fuseline_attention& call, bool backward) {
    static const auto bytes = FUSELINE_KERNEL(fuseline_attention_short_workspace);
    return bytes(&call, backward);
}

bool is_short(const fuseline_attention_gradients& gradients) {
    return gradients.grad_mask == nullptr && gradients.grad_sinks == nullptr && is_short(gradients.call, true);
}

}  // namespace

size_t attention_forward_workspace(const fuseline_attention& call) {
    static const auto bytes = FUSELINE_KERNEL(fuseline_attention_forward_workspace);
    return is_short(call, false) ? short_workspace(call, false) : bytes(&call);
}

size_t attention_backward_workspace(const fuseline_attention_gradients& gradients) {
    static const auto bytes = FUSELINE_KERNEL(fuseline_attention_backward_workspace);
    return is_short(gradients) ? short_workspace(gradients.call, true) : bytes(&gradients);
}

int launch_attention_forward(const fuseline_attention& call, void* stream) {
    static const auto general = FUSELINE_KERNEL(fuseline_attention_forward);
    static const auto on_chip = FUSELINE_KERNEL(fuseline_attention_short_forward);
    return is_short(call, false) ? on_chip(&call, stream) : general(&call, stream);
}

int launch_attention_backward(const fuseline_attention_gradients& gradients, void* stream) {
    static const auto general = FUSELINE_KERNEL(fuseline_attention_backward);
    static const auto on_chip = FUSELINE_KERNEL(fuseline_attention_short_backward);
    return is_short(gradients) ? on_chip(&gradients, stream) : general(&gradients, stream);
}

}  // namespace fuseline
