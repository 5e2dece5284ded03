// The backward of norms, of x or of residual + dropout(x + x_bias), for many long rows: device/norm_backward_teams.cuh.
#include "device/choice.h"
#include "device/norm_backward_teams.cuh"
#include "device/norm_sums.cuh"
#include "device/norm_teams.h"
#include "device/norm_teams_launch.cuh"

namespace fuseline {
namespace {

// Rows that read more so. Shares of the copy bandwidth by norm_backward_pieces.cuh and here: with a mask, of layer and RMS norms
// (and with the gradient of x's bias), fp32 131,072 0.370 and 0.971, 0.914 and 0.970, 262,144 0.378 and 0.973, 0.871 and 0.973; 16
// bits 262,144 0.711 and 0.915, 0.882 and 0.927; of x alone at 262,144 fp32 0.871 and 0.968, 0.906 and 0.978, 16 bits 0.862 and
// 0.910, 0.908 and 0.932. 50,257 with a mask fp32 0.761 and 0.928, 16 bits 0.567 and 0.775, 0.615 and 0.857; of sums 0.873 and 0.930,
// 0.862 and 0.895; of x 0.871 and 0.894, 0.877 and 0.897, 16 bits 0.779 and 0.834, 0.825 and 0.858. To 65,536 elements rows at
// multiples of 16 bytes read as much there, or 0.01 to 0.07 more; 98,304 with a mask reads 0.842 here.
constexpr int64_t kLongMasked4 = 110000, kLong = 131072, kLongOdd = 32768;  // elements; of fp32, of all, of rows at odd addresses

bool is_long(const NormBackward& a, bool drops, bool fp32) {
  if (a.n % (fp32 ? 4 : 8) != 0) return a.n > kLongOdd;
  if (drops) return a.n > (fp32 ? kLongMasked4 : kLong);
  return a.n > kLong && !a.grad_sum;
}

template <class T>
int most_teams(int64_t n, const Device& device) {
  return teams_for(n, kVector<T>, kTeamVectors, device);
}

// Teams of as many blocks as their threads allow, but of fp32 twice these: rows of fewer bytes a block, more of which wait. fp32
// 131,072 with a mask reads 0.971 by one team, 0.942 by two; 16 bits at 262,144 0.736 and 0.915.
template <class T>
int teams_of(int64_t n, const Device& device) {
  const int few = sizeof(T) == 4 ? teams_for(n, kVector<T>, kTeamVectors / 2, device) : 0;
  return few ? few : most_teams<T>(n, device);
}

template <class T, bool kCentred, bool kDrops>
bool run(const NormBackward& a, void* workspace, const Device& device, void* stream, int& error) {
  TeamsBackward given{a};
  Team& team = given.team;
  given.tensors = a.grad_sum ? 3 : 2;
  int threads = 0;
  size_t bytes = 0;
  if (!is_long(a, kDrops, sizeof(T) == 4) ||
      !stand_alike<T>({a.x, a.grad_y, a.grad_sum, a.grad_x, a.grad_dropped}, a.dropout.seed) ||
      !plan_teams<T>(team, teams_of<T>(a.n, device), a.n, given.tensors, device, threads, bytes)) {
    return false;
  }
  const int sums = !a.partials || team.teams == 1 ? 0
                   : a.grad_x_bias                ? kSumsOfAddedNorm
                   : a.mean                       ? kSumsOfLayerNorm
                                                  : kSumsOfRmsNorm;
  team.mail = reinterpret_cast<unsigned long long*>(static_cast<float*>(workspace) + sums * team.teams * a.columns);
  if (!launch_team(norm_backward_teams<T, kCentred, kDrops>, given, team, a.rows, threads, bytes, device, stream, error)) {
    return false;
  }
  if (!error && sums > 0) error = add_partials<T>(a, sums, team.teams, false, stream);
  return true;
}

template <class T, bool kCentred>
bool run_centred(const NormBackward& a, void* workspace, const Device& device, void* stream, int& error) {
  return a.grad_dropped || a.grad_x_bias ? run<T, kCentred, true>(a, workspace, device, stream, error)
                                         : run<T, kCentred, false>(a, workspace, device, stream, error);
}

bool many_long(int64_t rows, int64_t n, const Device& device) {
  return device.clusters && rows >= device.processors && n > kLongOdd && n <= (int64_t(1) << 30);
}

}  // namespace

bool norm_backward_teams(const NormBackward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                         int& error) {
  if (row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given || !workspace) return false;
  if (dtype != y_dtype || !many_long(a.rows, a.n, device) || (a.grad_bias && !a.mean)) return false;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return int(a.mean ? run_centred<T, true>(a, workspace, device, stream, error)
                      : run_centred<T, false>(a, workspace, device, stream, error));
  });
}

size_t norm_backward_teams_bytes(int64_t rows, int64_t n, const Device& device) {
  if (!many_long(rows, n, device)) return 0;
  const int64_t teams = std::max(most_teams<float>(n, device), most_teams<__half>(n, device));
  const size_t partials = size_t(kSumsOfAddedNorm * teams * columns_of_partials(n)) * sizeof(float);
  return teams == 0 ? 0 : partials + size_t(rows * device.processors) * sizeof(unsigned long long);
}

}  // namespace fuseline
