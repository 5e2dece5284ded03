// How a step of AdamW and the norm of all gradients are divided: tensors into launches, their elements into pieces, pieces among
// blocks. The one place that decides; optimizer/ launches what the plan says, and `fuseline explain adamw` prints it.
#pragma once

#include <vector>

#include "../fuseline_kernels.h"
#include "device.h"

namespace fuseline {

constexpr int kTensorBlock = 256;                          // threads of a block
constexpr int kPieceBytes = 16 << 10;                      // of one tensor; the last of a tensor may have fewer
constexpr int kMostParameters = 376, kMostGradients = 1536;  // of a launch, whose arguments hold no more

enum class OptimizerKernel { adamw, gradient_norm };

// As profilers show it.
inline const char* name_of(OptimizerKernel kernel) { return kernel == OptimizerKernel::adamw ? "adamw" : "gradient_norm"; }

struct TensorsLaunch {
  OptimizerKernel kernel;
  int64_t first, tensors;  // those of the launch
  int64_t pieces = 0;      // of all of them, numbered through
  int64_t each = 1;        // pieces of a block, which follow each other
  LaunchShape shape;
};

struct TensorsPlan {
  int code = 0;  // why nothing is launched
  const char* reason = "";
  size_t workspace = 0;  // bytes: a float for each block of the norm
  std::vector<TensorsLaunch> launches;

  auto begin() const { return launches.begin(); }
  auto end() const { return launches.end(); }
};

namespace optimizer_plans {

// One tensor: how many elements it has, and of which dtype.
struct TensorSize {
  int64_t elements;
  int dtype;

  bool known() const { return dtype >= FUSELINE_FLOAT32 && dtype <= FUSELINE_BFLOAT16; }
  int64_t pieces() const { return divide_up(elements, kPieceBytes / (dtype == FUSELINE_FLOAT32 ? 4 : 2)); }
};

inline TensorsPlan refuse(int code, const char* reason) {
  TensorsPlan plan;
  plan.code = code, plan.reason = reason;
  return plan;
}

// A launch for every `most` tensors, tensor(i) being the i-th. each(pieces): how many of a launch's pieces a block takes.
template <class TensorAt, class Each>
TensorsPlan divided(OptimizerKernel kernel, int64_t tensors, int64_t most, TensorAt&& tensor, Each&& each) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  TensorsPlan plan;
  for (int64_t first = 0; first == 0 || first < tensors; first += most) {
    TensorsLaunch by{kernel, first, std::min(most, tensors - first)};
    for (int64_t i = first; i < first + by.tensors; ++i) {
      const TensorSize one = tensor(i);
      if (one.elements < 0) return refuse(FUSELINE_BAD_SIZE, "a tensor has less than no elements");
      if (!one.known()) return refuse(FUSELINE_UNSUPPORTED, "the kernels take fp32, fp16 and bf16");
      by.pieces += one.pieces();
    }
    if (by.pieces > kMostBlocks) return refuse(FUSELINE_BAD_SIZE, "the tensors have more pieces than a launch has blocks");
    by.each = each(by.pieces);
    by.shape = {std::max<int64_t>(1, divide_up(by.pieces, by.each)), kTensorBlock};
    plan.launches.push_back(by);
  }
  return plan;
}

// Blocks of the norm that a device holds at once: as many as its threads, since launch bounds leave registers enough. A
// multiprocessor holds 2,048 threads, or 1,536 where its blocks share 100 KB of memory (compute capability 8.6, 8.9 and 12).
inline int64_t norm_blocks_at_once(const Device& device) {
  constexpr int kLittleShared = 128 << 10;
  const int threads = device.shared_a_processor < kLittleShared ? 1536 : 2048;
  return int64_t(device.processors) * (threads / kTensorBlock);
}

}  // namespace optimizer_plans

// elements(i): of the i-th parameter.
template <class ElementsAt>
TensorsPlan plan_adamw(int64_t parameters, ElementsAt&& elements, int dtype) {
  using namespace optimizer_plans;
  if (parameters < 0) return refuse(FUSELINE_BAD_SIZE, "there are less than no parameters");
  if (!TensorSize{0, dtype}.known()) return refuse(FUSELINE_UNSUPPORTED, "the kernel takes fp32, fp16 and bf16");
  if (parameters == 0) return refuse(0, "there is no parameter");
  const auto tensor = [&](int64_t i) { return TensorSize{elements(i), dtype}; };
  TensorsPlan plan = divided(OptimizerKernel::adamw, parameters, kMostParameters, tensor, [](int64_t) { return int64_t(1); });
  if (plan.code == 0) plan.reason = "each element is computed alone: a block has a piece of 16 KB of one parameter";
  return plan;
}

// elements(i) and dtype(i): of the i-th gradient.
template <class ElementsAt, class DtypeAt>
TensorsPlan plan_gradient_norm(int64_t gradients, ElementsAt&& elements, DtypeAt&& dtype, const Device& device) {
  using namespace optimizer_plans;
  constexpr int64_t kWaves = 8;      // blocks that one place of the device gets in turn, at most
  constexpr int64_t kFewPieces = 4;  // a block takes so many before there is a second wave
  if (gradients < 0) return refuse(FUSELINE_BAD_SIZE, "there are less than no gradients");
  const int64_t at_once = norm_blocks_at_once(device);
  const auto tensor = [&](int64_t i) { return TensorSize{elements(i), dtype(i)}; };
  TensorsPlan plan = divided(OptimizerKernel::gradient_norm, gradients, kMostGradients, tensor, [&](int64_t pieces) {
    const int64_t of_one_wave = std::min(kFewPieces, divide_up(pieces, at_once));
    return std::max<int64_t>({1, of_one_wave, divide_up(pieces, kWaves * at_once)});
  });
  if (plan.code != 0) return plan;
  int64_t most = 0;
  for (const TensorsLaunch& by : plan) {
    most = std::max(most, by.each);
    plan.workspace += size_t(by.shape.grid) * sizeof(float);
  }
  plan.reason = most == 1            ? "the device holds a block for each piece of 16 KB"
                : most <= kFewPieces ? "a block reads a few neighboring pieces of 16 KB, and looks up the tensor of the first alone"
                                     : "blocks come in eight waves, so that the L2 holds the last gradients in the end";
  return plan;
}

}  // namespace fuseline
