// Linear layers with weights of 8 and 4 bits on the CPU, for few rows of activations.
//
// What limits a row or two is memory, which is why a byte a weight beats four. A tile's half, 16 features by 32 columns,
// is unpacked into 2 KB that stay in the L1, and multiplied with every row of x (one row alone multiplies int8 as it is
// unpacked, the same products in the same order); sums are 16 lanes a feature, added up at the end in a fixed order.

#include "quant_linear.h"

#include "vector_math.h"

namespace fuseline::cpu {
namespace {

constexpr int64_t lanes = 16;

int64_t chunks_of(const QuantWeights& w) { return (w.k + 2 * tile_half - 1) / (2 * tile_half); }

// Of two bytes, sign-extended: by shifts of whole words, which compilers make vectors of, as they do not of bytes.
float low_byte(uint32_t pair) { return static_cast<float>(static_cast<int32_t>(pair << 24) >> 24); }
float high_byte(uint32_t pair) { return static_cast<float>(static_cast<int32_t>(pair) >> 8); }

// Rows g and g + 8 stand byte by byte beside each other, 32 columns one after the other.
void unpack_int8(const uint8_t* half, float* to) {
    for (int64_t g = 0; g < 8; ++g) {
        int16_t pairs[tile_half];
        std::memcpy(pairs, half + g * 2 * tile_half, sizeof pairs);
        float* const above = to + g * tile_half;
        float* const below = above + 8 * tile_half;
#pragma omp simd
        for (int64_t i = 0; i < tile_half; ++i) {
            above[i] = low_byte(static_cast<uint32_t>(pairs[i]));
            below[i] = high_byte(static_cast<uint32_t>(pairs[i]));
        }
    }
}

// Where a column's nibble of row g stands in its word.
constexpr uint32_t shifts[tile_half] = {0, 16, 8, 24, 0, 16, 8, 24, 0, 16, 8, 24, 0, 16, 8, 24,
                                        0, 16, 8, 24, 0, 16, 8, 24, 0, 16, 8, 24, 0, 16, 8, 24};

// Words of eight nibbles: four columns, 0 2 1 3, of rows g and g + 8 in turn. Lane 4 g + q has 16 bytes for both halves.
void unpack_int4(const uint8_t* chunk, int64_t half, const float* scales, const uint8_t* zeros, float* to) {
    for (int64_t g = 0; g < 8; ++g) {
        float* const above = to + g * tile_half;
        float* const below = above + 8 * tile_half;
        const int zero_above = zeros == nullptr ? 8 : zeros[2 * g], zero_below = zeros == nullptr ? 8 : zeros[2 * g + 1];
        const float scale_above = scales[2 * g], scale_below = scales[2 * g + 1];
        uint32_t words[tile_half];  // a column to a word, so that all are shifted at once
        for (int64_t word = 0; word < 8; ++word) {
            uint32_t bits;
            std::memcpy(&bits, chunk + (4 * g + word / 2) * 16 + (2 * half + word % 2) * 4, sizeof bits);
            for (int64_t i = 0; i < 4; ++i) words[4 * word + i] = bits;
        }
#pragma omp simd
        for (int64_t i = 0; i < tile_half; ++i) {
            const uint32_t bits = words[i] >> shifts[i];
            above[i] = scale_above * static_cast<float>(static_cast<int>(bits & 15u) - zero_above);
            below[i] = scale_below * static_cast<float>(static_cast<int>(bits >> 4 & 15u) - zero_below);
        }
    }
}

// A half tile as floats, [16][32]; int8 without its scales.
void unpack(const QuantWeights& w, int64_t tile, int64_t chunk, int64_t half, float* to) {
    const int64_t at = tile * chunks_of(w) + chunk;
    if (!w.four_bits) return unpack_int8(w.weight + (2 * at + half) * tile_rows * tile_half, to);
    const int64_t groups = (w.k + w.group_size - 1) / w.group_size;
    const int64_t of = (2 * chunk + half) * tile_half / w.group_size;
    const int64_t place = (tile * groups + (of < groups ? of : groups - 1)) * tile_rows;
    unpack_int4(w.weight + at * tile_rows * tile_half, half, w.scales + place,
                w.zeros == nullptr ? nullptr : w.zeros + place, to);
}

// sums += a half tile of int8 times the one row of x there is: what is unpacked is used where it is.
void multiply_int8(const uint8_t* half, const float* x, float* sums) {
    for (int64_t g = 0; g < 8; ++g) {
        int16_t pairs[tile_half];
        std::memcpy(pairs, half + g * 2 * tile_half, sizeof pairs);
        float* const above = sums + g * lanes;
        float* const below = above + 8 * lanes;
#pragma omp simd
        for (int64_t i = 0; i < lanes; ++i) {
            const uint32_t one = static_cast<uint32_t>(pairs[i]), other = static_cast<uint32_t>(pairs[i + lanes]);
            above[i] = multiply_add(low_byte(other), x[i + lanes], multiply_add(low_byte(one), x[i], above[i]));
            below[i] = multiply_add(high_byte(other), x[i + lanes], multiply_add(high_byte(one), x[i], below[i]));
        }
    }
}

void linear_tile(const QuantLinear& task, int64_t tile, float* scratch) {
    const QuantWeights& w = task.weights;
    const int64_t chunks = chunks_of(w), width = chunks * 2 * tile_half;
    float* const half = scratch;
    float* const sums = scratch + tile_rows * tile_half;  // [m][16][lanes]
    for (int64_t i = 0; i < task.m * tile_rows * lanes; ++i) sums[i] = 0;
    const bool straight = task.m == 1 && !w.four_bits;
    for (int64_t c = 0; c < 2 * chunks; ++c) {
        if (straight) {
            multiply_int8(w.weight + (tile * 2 * chunks + c) * tile_rows * tile_half, task.x + c * tile_half, sums);
            continue;
        }
        unpack(w, tile, c / 2, c % 2, half);
        for (int64_t m = 0; m < task.m; ++m) {
            const float* const x = task.x + m * width + c * tile_half;
            for (int64_t row = 0; row < tile_rows; ++row) {
                const float* const from = half + row * tile_half;
                float* const sum = sums + (m * tile_rows + row) * lanes;
#pragma omp simd
                for (int64_t i = 0; i < lanes; ++i) {
                    sum[i] = multiply_add(from[i + lanes], x[i + lanes], multiply_add(from[i], x[i], sum[i]));
                }
            }
        }
    }
    for (int64_t m = 0; m < task.m; ++m) {
        for (int64_t row = 0; row < tile_rows && tile * tile_rows + row < w.n; ++row) {
            const int64_t feature = tile * tile_rows + row;
            const float* const sum = sums + (m * tile_rows + row) * lanes;
            float total = 0;
            for (int64_t i = 0; i < lanes; ++i) total += sum[i];
            const float shift = task.bias == nullptr ? 0.f : task.bias[feature];
            task.y[m * w.n + feature] = (w.four_bits ? total : total * w.scales[feature]) + shift;
        }
    }
}

template <typename A>
void dequantize_tile(const Dequantize& task, int64_t tile) {
    const QuantWeights& w = task.weights;
    float half[tile_rows * tile_half];
    const float plain[tile_rows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    for (int64_t c = 0; c < 2 * chunks_of(w); ++c) {
        const float* scales = plain;
        if (w.four_bits) {
            const int64_t groups = (w.k + w.group_size - 1) / w.group_size, of = c * tile_half / w.group_size;
            const int64_t place = (tile * groups + (of < groups ? of : groups - 1)) * tile_rows;
            scales = w.scales + place;
            unpack_int4(w.weight + (tile * chunks_of(w) + c / 2) * tile_rows * tile_half, c % 2, plain,
                        w.zeros == nullptr ? nullptr : w.zeros + place, half);
        } else {
            unpack(w, tile, c / 2, c % 2, half);
        }
        for (int64_t row = 0; row < tile_rows && tile * tile_rows + row < w.n; ++row) {
            const int64_t feature = tile * tile_rows + row;
            const A scale = w.four_bits ? scales[row % 8 * 2 + row / 8] : w.scales[feature];
            A* const to = static_cast<A*>(task.to) + feature * w.k;
            for (int64_t i = 0; i < tile_half && c * tile_half + i < w.k; ++i) {
                to[c * tile_half + i] = scale * static_cast<A>(half[row * tile_half + i]);
            }
        }
    }
}

}  // namespace

void FUSELINE_NAME(quant_linear)(const QuantLinear& task, int64_t begin, int64_t end, float* scratch) {
    for (int64_t tile = begin; tile < end; ++tile) linear_tile(task, tile, scratch);
}

void FUSELINE_NAME(dequantize)(const Dequantize& task, int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
        if (task.is_double) {
            dequantize_tile<double>(task, tile);
        } else {
            dequantize_tile<float>(task, tile);
        }
    }
}

}  // namespace fuseline::cpu
