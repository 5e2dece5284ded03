// Which tensors have stood unwritten since an earlier call took them: the launch just before this call's did not write them,
// so that this one may read them while that ends (kernels/device/overlap.cuh).
//
// What is written in place counts a tensor's version up, whoever writes it; writing through `.data` or foreign pointers does
// not, and inference tensors have no versions: the former is to be waited for, the latter are never known.

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

    // Whether the last call with the first tensor's memory was with all of these as they are now; from now on it was.
    bool known(const Tensors& tensors) {
        Kept now;
        for (size_t i = 0; i < kMost; ++i) {
            if (!tensors[i]) continue;
            if (tensors[i]->is_inference()) return false;
            now.storage[i] = tensors[i]->storage().unsafeGetStorageImpl();
            now.version[i] = tensors[i]->_version();
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = kept_.find(now.storage[0]);
        if (found != kept_.end() && found->second.storage == now.storage && found->second.version == now.version) return true;
        if (kept_.size() >= most_) forget_dead();
        for (size_t i = 0; i < kMost; ++i) {  // no other memory takes a kept address
            if (tensors[i]) now.alive[i] = tensors[i]->storage().getWeakStorageImpl();
        }
        kept_.insert_or_assign(now.storage[0], std::move(now));
        return false;
    }

  private:
    struct Kept {
        std::array<const c10::StorageImpl*, kMost> storage{};
        std::array<uint32_t, kMost> version{};
        std::array<std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>, kMost> alive;
    };

    void forget_dead() {
        for (auto one = kept_.begin(); one != kept_.end();) {
            one = one->second.alive[0]->expired() ? kept_.erase(one) : std::next(one);
        }
        most_ = std::max<size_t>(1024, 2 * kept_.size());
    }

    std::mutex mutex_;
    std::unordered_map<const c10::StorageImpl*, Kept> kept_;
    size_t most_ = 1024;
};

}  // namespace fuseline
