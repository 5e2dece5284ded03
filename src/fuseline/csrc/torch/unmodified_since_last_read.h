// Remembers which tensors an earlier call read and whether anything has modified them since. Where nothing has, the launch
// just before this call's did not write them, and this call may read them while that launch ends
// (kernels/device/overlap.cuh).
//
// A write in place increments a tensor's version. Writes through `.data`, by collectives and through foreign pointers do not,
// and the caller has to wait for those. Fused optimizers do not increment it either, and inference tensors have no versions:
// inference tensors and tensors that want a gradient are therefore always taken as modified. The earlier call must have been
// on the same stream, after whoever wrote: a call on another stream could have overtaken that write. Inside a capture, tensors
// that a call outside it read count as well, from any stream, because the capture's own launches have not written them.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace fuseline {

class UnmodifiedSinceLastRead {
  public:
    static constexpr size_t kMost = 3;
    using Tensors = std::array<const at::Tensor*, kMost>;  // null where there is none

    // Whether the last call with the first tensor's memory was with all of these as they are now, and there; from now on it
    // was. `capture` is 0 outside captures.
    bool known(const Tensors& tensors, const void* stream, uint64_t capture) {
        Kept now;
        now.stream = stream, now.capture = capture;
        for (size_t i = 0; i < kMost; ++i) {
            if (!tensors[i]) continue;
            if (tensors[i]->is_inference() || tensors[i]->requires_grad()) return false;
            now.data[i] = tensors[i]->const_data_ptr();
            now.storage[i] = tensors[i]->storage().unsafeGetStorageImpl();
            now.version[i] = tensors[i]->_version();
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto* const key = now.data[0];
        const auto found = kept_.find(key);
        bool known = false;
        if (found != kept_.end() && found->second.same_as(now)) {
            const bool together = found->second.capture == capture;
            known = together ? found->second.stream == stream : capture != 0;
            if (together && known) return true;
        }
        if (kept_.size() >= most_) forget_dead();
        for (size_t i = 0; i < kMost; ++i) {  // no other memory takes a kept address
            if (tensors[i]) now.alive[i] = tensors[i]->storage().getWeakStorageImpl();
        }
        kept_.insert_or_assign(key, std::move(now));
        return known;
    }

  private:
    struct Kept {
        std::array<const void*, kMost> data{};
        std::array<const c10::StorageImpl*, kMost> storage{};
        std::array<uint32_t, kMost> version{};
        const void* stream = nullptr;
        uint64_t capture = 0;
        std::array<std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>, kMost> alive;

        bool same_as(const Kept& other) const {
            return data == other.data && storage == other.storage && version == other.version;
        }
    };

    void forget_dead() {
        for (auto one = kept_.begin(); one != kept_.end();) {
            one = one->second.alive[0]->expired() ? kept_.erase(one) : std::next(one);
        }
        most_ = std::max<size_t>(1024, 2 * kept_.size());
    }

    std::mutex mutex_;
    std::unordered_map<const void*, Kept> kept_;  // by where the first tensor stands
    size_t most_ = 1024;
};

}  // namespace fuseline
