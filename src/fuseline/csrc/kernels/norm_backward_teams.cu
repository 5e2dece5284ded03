// The backward of norms, of x or of residual + dropout(x + x_bias), for many long rows: device/norm_backward_teams.cuh.
#include <cstdlib>

#include "device/norm_backward_teams.cuh"
#include "device/norm_sums.cuh"
#include "device/norm_teams_launch.cuh"

namespace fuseline {
namespace {

int setting(const char* name) {
  const char* const value = std::getenv(name);
  return value ? std::atoi(value) : 0;
}

constexpr int64_t kShortestTeams = 16384;

template <class T>
int most_teams(int64_t n, const Device& device) {
  return teams_for(n, kVector<T>, kTeamVectors, device);
}

// How many teams. Fewer have rows of fewer bytes a block, of which more wait for mail: fp32 131,072 reads 0.964 of the copy
// bandwidth by one, 0.942 by two.
template <class T>
int teams_of(const NormBackward& a, const Device& device) {
  const int forced = setting("FUSELINE_N_TEAMS"), most = most_teams<T>(a.n, device);
  if (forced < 0) return 0;
  if (forced > 0) return forced <= most && forced * a.n % kVector<T> == 0 ? forced : most;
  const int few = teams_for(a.n, kVector<T>, kTeamVectors / 2, device);
  return sizeof(T) == 4 && few ? few : most;
}

template <class T, int kSlots, bool kCentred, bool kDrops>
bool run(const NormBackward& a, void* workspace, const Device& device, void* stream, int& error) {
  TeamsBackward given{a};
  Team& team = given.team;
  given.tensors = a.grad_sum ? 3 : 2;
  int threads = 0;
  size_t bytes = 0;
  if (!stand_alike<T>({a.x, a.grad_y, a.grad_sum, a.grad_x, a.grad_dropped}, a.dropout.seed) ||
      !plan_teams<T>(team, teams_of<T>(a, device), a.n, given.tensors, kSlots, device, threads, bytes)) {
    return false;
  }
  const int sums = !a.partials || team.teams == 1 ? 0
                   : a.grad_x_bias                ? kSumsOfAddedNorm
                   : a.mean                       ? kSumsOfLayerNorm
                                                  : kSumsOfRmsNorm;
  team.mail = reinterpret_cast<unsigned long long*>(static_cast<float*>(workspace) + sums * team.teams * a.columns);
  const auto kernel = norm_backward_teams<T, kSlots, kCentred, kDrops>;
  if (!launch_team(kernel, given, team, a.rows, threads, bytes, device, stream, error)) return false;
  if (!error && sums > 0) error = add_partials<T>(a, sums, team.teams, false, stream);
  return true;
}

bool takes(int64_t rows, int64_t n, const Device& device) {
  return device.clusters && rows >= device.processors && n > kShortestTeams && n <= (int64_t(1) << 30);
}

}  // namespace

bool norm_backward_teams(const NormBackward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                         int& error) {
  if (row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given || !workspace) return false;
  if (dtype != y_dtype || !takes(a.rows, a.n, device) || (a.grad_bias && !a.mean)) return false;
  const bool drops = a.grad_dropped || a.grad_x_bias;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (setting("FUSELINE_N_SLOTS") == 2) {
        if (a.mean) {
          return int(drops ? run<T, 2, true, true>(a, workspace, device, stream, error)
                           : run<T, 2, true, false>(a, workspace, device, stream, error));
        }
        return int(drops ? run<T, 2, false, true>(a, workspace, device, stream, error)
                         : run<T, 2, false, false>(a, workspace, device, stream, error));
      }
    }
    if (a.mean) {
      return int(drops ? run<T, 1, true, true>(a, workspace, device, stream, error)
                       : run<T, 1, true, false>(a, workspace, device, stream, error));
    }
    return int(drops ? run<T, 1, false, true>(a, workspace, device, stream, error)
                     : run<T, 1, false, false>(a, workspace, device, stream, error));
  });
}

size_t norm_backward_teams_bytes(int64_t rows, int64_t n, const Device& device) {
  if (!takes(rows, n, device)) return 0;
  const int64_t teams = std::max(most_teams<float>(n, device), most_teams<__half>(n, device));
  const size_t partials = size_t(kSumsOfAddedNorm * teams * columns_of_partials(n)) * sizeof(float);
  return teams == 0 ? 0 : partials + size_t(rows * device.processors) * sizeof(unsigned long long);
}

}  // namespace fuseline
