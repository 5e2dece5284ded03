// For the .cpp of an extension: the stream torch is working on, without a header of CUDA's or of torch's CUDA build.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fuseline {

// The current stream of x's device, as a cudaStream_t.
inline void* current_stream(const at::Tensor& x) {
    return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()).native_handle();
}

}  // namespace fuseline
