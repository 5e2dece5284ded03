// Random bits as a function of a seed and a position: Philox-4x32-7, as in csrc/kernels/device/philox.cuh, which says
// how elements and words go together.

#pragma once

#include <cstdint>

namespace fuseline::cpu {
namespace {

inline void philox_uniform(uint64_t seed, uint64_t block, uint32_t (&words)[4]) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 7; ++round) {
        const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(a);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Of 65536: p is taken to the nearest of them.
inline uint32_t dropout_threshold(double p) {
    const double parts = p * 65536.0 + 0.5;
    return p >= 1 ? 65536u : parts >= 65535.0 ? 65535u : static_cast<uint32_t>(parts);
}

inline double dropout_scale(double p) { return p < 1 ? 65536.0 / (65536.0 - dropout_threshold(p)) : 0.0; }

// Multipliers (0 or scale) of elements first .. first + count of a contiguous tensor.
template <typename A>
inline void dropout_multipliers(uint64_t seed, uint32_t threshold, A scale, int64_t first, A* multipliers,
                                int64_t count) {
    uint32_t words[4];
    for (int64_t i = 0; i < count;) {
        const int64_t index = first + i;
        philox_uniform(seed, static_cast<uint64_t>(index) / 8, words);
        for (int64_t place = index % 8; place < 8 && i < count; ++place, ++i) {
            const uint32_t bits = place < 4 ? words[place] >> 16 : words[place - 4] & 0xffffu;
            multipliers[i] = bits >= threshold ? scale : A(0);
        }
    }
}

}  // namespace
}  // namespace fuseline::cpu
