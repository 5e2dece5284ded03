// Layouts of an H200's own, for widths that models have, in 16 bits: where they read at least 5% more than the H100's, by times
// on one H200 of rows of 33 and of 134 MB a tensor. A line is for rows of exactly its number; other widths take the H100's line.
// After each line the shares of the copy bandwidth with 134 MB a tensor, by the H100's line and by this one.
//
// Included by choice.h, which says what each kernel's numbers are.
#pragma once

namespace fuseline {
namespace h200 {

inline constexpr RowChoice kManyLayerNormBackward2[] = {
    {512, Ring{2, 512, 1, 3}},  // 0.68, 0.84
    {768, Ring{4, 384, 1, 3}},  // 0.72, 0.84
    {1024, Held{2, 512}},  // 0.67, 0.79
    {1280, Held{1, 512}},  // 0.64, 0.77
    {1600, Ring{4, 512, 1, 3}},  // 0.62, 0.78
};
inline constexpr RowChoice kManyRmsNormForward2[] = {
    {1024, Held{4, 64, 1, 1}},  // 0.76, 0.87
    {2048, Packed{4, 512}},  // 0.80, 0.91
    {4096, Packed{4, 512}},  // 0.79, 0.88
};
inline constexpr RowChoice kManyRmsNormBackward2[] = {
    {896, Held{1, 512}},  // 0.65, 0.81
    {1024, Ring{2, 576, 1, 4}},  // 0.64, 0.84
    {2048, Ring{2, 512, 1, 3}},  // 0.73, 0.85
    {3072, Ring{2, 576, 1, 3}},  // 0.74, 0.85
    {5120, Ring{2, 640, 1, 4}},  // 0.63, 0.83
};
inline constexpr RowChoice kManyAddLayerNormBackward2[] = {
    {384, Ring{2, 512, 1, 3}},  // 0.77, 0.84
    {768, Ring{3, 384, 1, 3}},  // 0.67, 0.85
    {1024, Rules{1, 32}},  // 0.72, 0.87
    {1600, Ring{2, 512, 1, 3}},  // 0.68, 0.77
};
inline constexpr RowChoice kManyAddRmsNormBackward2[] = {
    {896, Ring{2, 512, 1, 3}},  // 0.74, 0.85
    {2048, Ring{2, 512, 1, 4}},  // 0.67, 0.88
    {4096, Ring{2, 512, 1, 3}},  // 0.67, 0.87
};
inline constexpr RowChoice kManyDropoutAddLayerNormBackward2[] = {
    {384, Ring{2, 512, 1, 3}},  // 0.68, 0.84
    {512, Ring{2, 384, 1, 3}},  // 0.71, 0.88
    {768, Ring{3, 384, 1, 3}},  // 0.68, 0.85
    {1024, Ring{2, 512, 1, 3}},  // 0.70, 0.87
    {1600, Ring{2, 512, 1, 3}},  // 0.70, 0.79
};

inline constexpr RowChoices kWidths[FUSELINE_FAMILIES] = {
    {},
    {},
    {},
    {},
    {},
    {},
    row_choices(kManyLayerNormBackward2),
    row_choices(kManyRmsNormForward2),
    row_choices(kManyRmsNormBackward2),
    {},
    row_choices(kManyAddLayerNormBackward2),
    {},
    row_choices(kManyAddRmsNormBackward2),
    {},
    row_choices(kManyDropoutAddLayerNormBackward2),
    {},
    {},
};

}  // namespace h200
}  // namespace fuseline
