// Linear layers with quantized weights on the CPU: tasks for quant_linear_rows.cpp. A task's rows are tiles of 16 output
// features, in the kernels' layout (kernels/fuseline_quant.h).

#pragma once

#include "rows.h"

namespace fuseline::cpu {

constexpr int64_t tile_rows = 16, tile_half = 32;  // features, and columns of half a tile

struct QuantWeights {
    const uint8_t* weight;
    const float* scales;    // int8: of each feature; int4: [tile][group][8][2]
    const uint8_t* zeros;   // int4: in the scales' order; null for 8
    int64_t n, k;
    int64_t group_size;     // 0 for int8
    bool four_bits;
};

// y[m][n] = x W^T + bias.
struct QuantLinear {
    QuantWeights weights;
    const float* x;         // [m, k rounded up to 64], zeros behind k
    const float* bias;      // [n] or null
    float* y;               // [m, n]
    int64_t m;
    int64_t scratch() const { return tile_rows * (tile_half + m * 16); }  // floats
};

// The weights themselves, [n, k] of double or of float.
struct Dequantize {
    QuantWeights weights;
    void* to;
    bool is_double;
};

FUSELINE_DECLARE(quant_linear, const QuantLinear&, int64_t begin, int64_t end, float* scratch)
FUSELINE_DECLARE(dequantize, const Dequantize&, int64_t begin, int64_t end)

}  // namespace fuseline::cpu
