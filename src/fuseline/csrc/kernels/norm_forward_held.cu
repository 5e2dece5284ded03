// The forward of norms whose rows keep to 16-byte steps and fit the registers of a block, for x of y's dtype.
#include "device/norm_forward_held.cuh"

#include "device/choice.h"

namespace fuseline {
namespace {

constexpr int kShortRows = 2;  // a thread has of rows that take one vector of it

constexpr int kMostHeld = 4;   // vectors of a thread

struct HeldPlan {
  int held = 0;           // vectors a thread holds; 0: no block holds such rows
  int threads = 0;        // share a row
  bool one_warp = false;  // has the whole row
  int beside = 1;         // rows a block has at a time
  int rows = 1;           // and in all
};

template <class T>
HeldPlan plan_held(int64_t rows, int64_t n, const Device& device) {
  HeldPlan plan;
  const int64_t vectors = n / kVector<T>;
  const RowChoice* const choice = choice_for(FUSELINE_LAYER_NORM_FORWARD, sizeof(T), n);
  if (!choice || vectors > int64_t(kMostThreads) * kMostHeld) return plan;
  // Few rows are spread over all threads that there are; these then have little to do after each other.
  const int64_t threads = int64_t(device.processors) * 1024;
  const bool few = rows * vectors <= 2 * threads;
  plan.held = std::min(power_of_two_from(choice->held), kMostHeld);
  if (few) plan.held = rows * vectors > threads || vectors > kWarp * kFewStates ? 2 : 1;
  const int most = few || vectors > kWarp * plan.held ? kMostThreads : kWarp;
  while (divide_up(vectors, plan.held) > most) plan.held *= 2;
  plan.threads = int(divide_up(vectors, plan.held));
  plan.one_warp = plan.threads <= kWarp;
  // Three vectors a thread leave none idle: rows of 384, and of 768.
  if (plan.one_warp && !few && plan.held > 1 && power_of_two_from(plan.threads) * plan.held * 3 >= vectors * 4) {
    plan.threads = int(divide_up(vectors, 3)), plan.held = 3;
  }
  if (!plan.one_warp) {
    plan.threads = int(divide_up(plan.threads, kWarp)) * kWarp;
    return plan;
  }
  plan.threads = power_of_two_from(plan.threads);
  const int a_warp = kWarp / plan.threads;
  const int64_t spread = divide_up(divide_up(rows, device.processors), a_warp) * a_warp;
  const int block = std::max(std::min(choice->block, kMostShortRowBlock), kWarp);
  plan.beside = int(std::min<int64_t>(block / plan.threads, spread));
  plan.rows = plan.beside * (plan.held == 1 && !few ? kShortRows : 1);
  return plan;
}

template <class T>
auto held_kernel(const HeldPlan& plan) -> void (*)(NormForward) {
  if (plan.one_warp && plan.rows > plan.beside) return norm_forward_held<T, 1, kShortRows, true>;
  const auto one_of = [&](auto one_warp) -> void (*)(NormForward) {
    constexpr bool kOneWarp = decltype(one_warp)::value;
    switch (plan.held) {
      case 1:
        return norm_forward_held<T, 1, 1, kOneWarp>;
      case 2:
        return norm_forward_held<T, 2, 1, kOneWarp>;
      case 3:
        return norm_forward_held<T, 3, 1, true>;
      default:
        return norm_forward_held<T, kMostHeld, 1, kOneWarp>;
    }
  };
  return plan.one_warp ? one_of(std::true_type{}) : one_of(std::false_type{});
}

}  // namespace

bool norm_forward_held(const NormForward& a, int dtype, const Device& device, void* stream, int& error) {
  bool taken = false;
  error = with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    bool aligned = a.n % kVector<T> == 0;
    for (const void* tensor : {a.x, a.weight, a.bias, static_cast<const void*>(a.y)}) {
      aligned = aligned && offset_in_vector(tensor) == 0;
    }
    const HeldPlan plan = aligned ? plan_held<T>(a.rows, a.n, device) : HeldPlan{};
    taken = plan.held > 0;
    if (!taken) return 0;
    return launch(held_kernel<T>(plan), a, divide_up(a.rows, plan.rows),
                  dim3(unsigned(plan.threads), unsigned(plan.beside)), 0, 1, stream, device.clusters);
  });
  return taken || error;
}

}  // namespace fuseline
