// Work that the current stream does not wait for, on a second one: inside a CUDA graph, whose branches run side by side
// (the layer's backward takes 0.77 to 0.97 of its time then, on an H100). Eagerly events cost the host more than that (1.2
// to 1.4), and all stays on one stream.

#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <optional>
#include <utility>

#include "fuseline_small_layer.h"
#include "fuseline_torch.h"

namespace fuseline {

class Beside {
public:
    explicit Beside(const Tensor& x) {
        if (!x.is_cuda()) return;
        static const auto captured = FUSELINE_KERNEL(fuseline_is_captured);
        const c10::impl::VirtualGuardImpl device(x.device().type());
        const c10::Stream current = device.getStream(x.device());
        if (!captured(current.native_handle())) return;
        // One beside each stream, as cuBLAS keeps a workspace for each that it sees: graphs that were captured on two
        // streams may be replayed at once.
        static thread_local std::map<std::pair<c10::DeviceIndex, c10::StreamId>, c10::Stream> seconds;
        const auto place = std::make_pair(x.device().index(), current.id());
        auto found = seconds.find(place);
        if (found == seconds.end()) found = seconds.emplace(place, device.getStreamFromGlobalPool(x.device())).first;
        if (found->second != current) current_ = current, second_ = found->second;
    }

    // Calls work() on the second stream, after all that is on the current one by now. What it writes and reads has to come
    // from the current stream, and to live until join().
    template <class Work>
    void run(const Work& work) {
        if (!second_.has_value()) return work();
        wait(*current_, *second_);
        forked_ = true;
        const c10::StreamGuard guard(*second_);
        work();
    }

    // What comes next on the current stream waits for all that was run.
    void join() {
        if (forked_) wait(*second_, *current_);
    }

private:
    static void wait(const c10::Stream& of, const c10::Stream& by) {
        c10::Event event(of.device_type());
        event.record(of);
        event.block(by);
    }

    std::optional<c10::Stream> current_, second_;
    bool forked_ = false;
};

}  // namespace fuseline
