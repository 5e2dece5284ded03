// Which of the attention kernels takes a call on the GPU.

#include "attention_launch.h"

namespace fuseline {

// fuseline_torch.h has it, and with it torch's headers, which nothing else here needs.
void* kernel_symbol(const char* name);
#define FUSELINE_KERNEL(name) reinterpret_cast<decltype(&::name)>(::fuseline::kernel_symbol(#name))

size_t attention_forward_workspace(const fuseline_attention& call) {
    static const auto bytes = FUSELINE_KERNEL(fuseline_attention_forward_workspace);
    return bytes(&call);
}

size_t attention_backward_workspace(const fuseline_attention_gradients& gradients) {
    static const auto bytes = FUSELINE_KERNEL(fuseline_attention_backward_workspace);
    return bytes(&gradients);
}

int launch_attention_forward(const fuseline_attention& call, void* stream) {
    static const auto launch = FUSELINE_KERNEL(fuseline_attention_forward);
    return launch(&call, stream);
}

int launch_attention_backward(const fuseline_attention_gradients& gradients, void* stream) {
    static const auto launch = FUSELINE_KERNEL(fuseline_attention_backward);
    return launch(&gradients, stream);
}

}  // namespace fuseline
