// The backward of all norms for rows that no other kernel takes: norms/norm_backward_general.cuh.
#include "norm_backward_general.cuh"

#include "norm_sums.h"

namespace fuseline {
namespace {

constexpr int64_t kRowOfWarp = 512;   // elements of a row at most that one warp has
constexpr int64_t kRowsOfThread = 16;  // of a column, at least, before there are more shares

int column_blocks(int64_t n) { return int(divide_up(n, kWarp)); }

int shares_of(int64_t rows, int64_t n, const Device& device) {
  const int64_t of_device = divide_up(4 * device.processors, column_blocks(n));
  return int(std::clamp<int64_t>(divide_up(rows, kRowsOfThread * kGeneralWarps), 1, of_device));
}

// Of [sums, shares, columns].
int64_t floats_of_sums(int64_t rows, int64_t n, const Device& device) {
  return kSumsOfAddedNorm * shares_of(rows, n, device) * columns_of_partials(n);
}

template <class X, class Y>
int run(const NormBackward& a, const Device& device, void* stream) {
  GeneralNorm given{a, nullptr, column_blocks(a.n), shares_of(a.rows, a.n, device)};
  if (a.grad_x_bias) given.terms = reinterpret_cast<float2*>(a.partials + floats_of_sums(a.rows, a.n, device));
  const int64_t at_once = kWarp * kGeneralHeld;  // elements that a warp has
  int& cluster = given.norm.cluster = 1;
  while (device.clusters && cluster < kMaxCluster && a.n > cluster * at_once * kGeneralWarps) cluster *= 2;
  const int warps = int(std::min<int64_t>(kGeneralWarps, divide_up(a.n, cluster * at_once)));
  const dim3 block = a.n <= kRowOfWarp ? dim3(kWarp, 4) : dim3(unsigned(warps * kWarp));
  const auto rows = [&](const GeneralNorm& of) {
    const int64_t grid = divide_up(a.rows, block.y) * cluster;
    return launch(norm_backward_general<X, Y>, of, grid, block, 0, cluster, stream, device.clusters);
  };
  const auto sums = [&] {
    const int64_t grid = int64_t(given.column_blocks) * given.shares;
    const dim3 whole(kWarp, kGeneralWarps);
    const int error = launch(norm_backward_general_sums<X, Y>, given, grid, whole, 0, 1, stream, device.clusters);
    if (error || given.shares == 1) return error;
    return add_partials<Y>(a, kSumsOfAddedNorm, given.shares, device.clusters, stream);
  };
  int error = 0;
  if (given.terms) {  // the sums need them, and come before anything is written: a result may stand where an input does
    GeneralNorm terms = given;
    terms.norm.grad_x = terms.norm.grad_dropped = nullptr;
    bool over = false;
    for (const void* const result : {a.grad_x, a.grad_dropped}) {
      over = over || (result && (result == a.x || result == a.grad_y || result == a.grad_sum));
    }
    error = rows(over ? terms : given);
    if (!error) error = sums();
    return error || !over ? error : rows(given);
  }
  if (a.partials) error = sums();
  return error || !a.wants_rows() ? error : rows(given);
}

}  // namespace

int norm_backward_general(const NormBackward& a, int dtype, int y_dtype, const Device& device, void* stream) {
  return with_dtypes(dtype, y_dtype, [&](auto x, auto y) { return run<decltype(x), decltype(y)>(a, device, stream); });
}

int64_t norm_backward_general_bytes(int64_t rows, int64_t n, bool x_bias, const Device& device) {
  return floats_of_sums(rows, n, device) * int64_t(sizeof(float)) + (x_bias ? rows * int64_t(sizeof(float2)) : 0);
}

}  // namespace fuseline
