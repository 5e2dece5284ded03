// The forward of norms, of x or of residual + dropout(x + x_bias), for many long rows: device/norm_forward_teams.cuh.
#include <cstdlib>

#include "device/norm_forward_teams.cuh"
#include "device/norm_teams_launch.cuh"

namespace fuseline {
namespace {

int setting(const char* name) {
  const char* const value = std::getenv(name);
  return value ? std::atoi(value) : 0;
}

constexpr int64_t kShortestTeams = 16384;

template <class T>
int teams_of(const NormForward& a, const Device& device) {
  const int forced = setting("FUSELINE_N_TEAMS"), most = teams_for(a.n, kVector<T>, kTeamVectors, device);
  if (forced < 0) return 0;
  if (forced > 0 && forced <= most && forced * a.n % kVector<T> == 0) return forced;
  return most;
}

template <class T, int kSlots, bool kAdded, bool kMasked>
bool run(const NormForward& a, void* workspace, const Device& device, void* stream, int& error) {
  TeamsForward given{a};
  int threads = 0;
  size_t bytes = 0;
  if (!stand_alike<T>({a.x, a.residual, a.y, a.sum}, a.dropout.seed) ||
      !plan_teams<T>(given.team, teams_of<T>(a, device), a.n, kAdded ? 2 : 1, kSlots, device, threads, bytes)) {
    return false;
  }
  given.team.mail = static_cast<unsigned long long*>(workspace);
  return launch_team(norm_forward_teams<T, kSlots, kAdded, kMasked>, given, given.team, a.rows, threads, bytes, device, stream, error);
}

bool takes(int64_t rows, int64_t n, const Device& device) {
  return device.clusters && rows >= device.processors && n > kShortestTeams && n <= (int64_t(1) << 30);
}

}  // namespace

bool norm_forward_teams(const NormForward& a, void* workspace, int dtype, const Device& device, void* stream, int& error) {
  if (row_overrides[FUSELINE_LAYER_NORM_FORWARD].given || !workspace || !takes(a.rows, a.n, device)) return false;
  const bool masked = a.x_bias || a.dropout.seed;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (setting("FUSELINE_N_SLOTS") == 2) {
        if (!a.residual) return int(run<T, 2, false, false>(a, workspace, device, stream, error));
        return int(masked ? run<T, 2, true, true>(a, workspace, device, stream, error)
                          : run<T, 2, true, false>(a, workspace, device, stream, error));
      }
    }
    if (!a.residual) return int(run<T, 1, false, false>(a, workspace, device, stream, error));
    return int(masked ? run<T, 1, true, true>(a, workspace, device, stream, error)
                      : run<T, 1, true, false>(a, workspace, device, stream, error));
  });
}

size_t norm_forward_teams_bytes(int64_t rows, int64_t n, const Device& device) {
  return takes(rows, n, device) ? size_t(rows * device.processors) * sizeof(unsigned long long) : 0;
}

}  // namespace fuseline
