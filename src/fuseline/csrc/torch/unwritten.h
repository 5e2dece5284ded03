// Which tensors have stood unwritten since an earlier call took them: the launch just before this call's did not write them,
// so that this one may read them while that ends (kernels/device/overlap.cuh).
//
// What is written in place counts a tensor's version up, but for writing through `.data`, collectives and foreign pointers,
// which is to be waited for. Fused optimizers do not count either, and inference tensors have no versions: these and what
// wants a gradient are never known. The earlier call was on the same stream, behind whoever wrote: another stream might
// have come to it past that. Only a capture knows what calls outside it took, on any stream, since its own launches have
// not written that.

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

class Unwritten {
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
