// The backward of norms, of x or of residual + dropout(x + x_bias), for many long rows: device/norm_backward_teams.cuh.
#include <cstdlib>

#include "device/norm_backward_teams.cuh"
#include "device/norm_sums.cuh"

namespace fuseline {
namespace {

int setting(const char* name) {
  const char* const value = std::getenv(name);
  return value ? std::atoi(value) : 0;
}

constexpr int64_t kShortestTeams = 8192;

template <class T>
bool stands_alike(const NormBackward& a) {
  const int offset = offset_in_vector(a.x);
  for (const void* tensor : {a.grad_y, a.grad_sum ? a.grad_sum : a.x, a.grad_x ? static_cast<const void*>(a.grad_x) : a.x,
                             a.grad_dropped ? static_cast<const void*>(a.grad_dropped) : a.x}) {
    if (offset_in_vector(tensor) != offset) return false;
  }
  return !a.dropout.seed || offset / int(sizeof(T)) % 4 == 0;
}

template <class T, bool kCentred, bool kDrops>
bool run(const NormBackward& a, void* workspace, const Device& device, void* stream, int& error) {
  if (!stands_alike<T>(a)) return false;
  constexpr int kSize = kVector<T>;
  TeamsNorm given{a};
  Team& team = given.team;
  team.teams = teams_for(a.n, kSize, a.n % kSize == 0, device);
  if (const int teams = setting("FUSELINE_N_TEAMS"); teams > 0 && teams < team.teams && (a.n % kSize == 0 || teams % kSize == 0)) {
    team.teams = teams;
  }
  if (team.teams == 0) return false;
  team.blocks = device.processors / team.teams;
  if (team.blocks > kMostTeamBlocks) return false;
  const int64_t vectors = most_vectors_of_part(a.n, kSize, team.blocks);
  const int warps = int(divide_up(vectors, kWarp));
  given.tensors = a.grad_sum ? 3 : 2;
  team.part = int(vectors * 16);
  const int64_t stage = int64_t(given.tensors) * team.part, room = device.shared_a_block - int64_t(sizeof(TeamStatics)) - 1024;
  team.stages = int(std::min<int64_t>(kMostTeamStages, room / stage));
  if (const int stages = setting("FUSELINE_N_STAGES"); stages > 0 && stages < team.stages) team.stages = stages;
  if (team.stages < 4) return false;
  team.ahead = std::min(kMostTeamAhead, team.stages / 2);
  if (const int ahead = setting("FUSELINE_N_AHEAD"); ahead > 0) team.ahead = std::min({ahead, kMostTeamAhead, team.stages - 1});
  const size_t partials = a.partials && team.teams > 1 ? size_t(3) * team.teams * a.columns * sizeof(float) : 0;
  team.mail = reinterpret_cast<unsigned long long*>(static_cast<char*>(workspace) + partials);
  team.bulk = setting("FUSELINE_N_BULK") == 1;
  if (team.bulk && team.ahead >= team.stages - 1) team.ahead = team.stages - 2;
  const auto kernel = norm_backward_teams<T, kCentred, kDrops>;
  const int threads = (warps + 2 + kCollectors) * kWarp;
  const size_t bytes = size_t(team.stages * stage);
  int count = 0;
  if (resident_clusters(kernel, device, threads, bytes, 1, count) != cudaSuccess || count < team.teams * team.blocks) {
    return cudaGetLastError(), false;
  }
  error = launch_team(kernel, given, team, a.rows, threads, bytes, stream);
  const int sums = a.grad_x_bias ? kSumsOfAddedNorm : a.mean ? kSumsOfLayerNorm : kSumsOfRmsNorm;
  if (!error && partials) error = add_partials<T>(a, sums, team.teams, false, stream);
  return true;
}

}  // namespace

bool norm_backward_teams(const NormBackward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                         int& error) {
  if (setting("FUSELINE_N_BACKWARD") != 1) return false;
  if (dtype != y_dtype || !device.clusters || (a.grad_bias && !a.mean) || a.n <= kShortestTeams || a.n > (1 << 30) ||
      a.rows < device.processors || !workspace || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) {
    return false;
  }
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const bool drops = a.grad_dropped || a.grad_x_bias;
    if (a.mean) {
      return int(drops ? run<T, true, true>(a, workspace, device, stream, error)
                       : run<T, true, false>(a, workspace, device, stream, error));
    }
    return int(drops ? run<T, false, true>(a, workspace, device, stream, error)
                     : run<T, false, false>(a, workspace, device, stream, error));
  });
}

// The most that any layout needs: partial sums, and mail.
size_t norm_backward_teams_bytes(int64_t rows, int64_t n, const Device& device) {
  if (n <= kShortestTeams || rows < device.processors) return 0;
  const int teams = teams_for(n, kVector<__half>, true, device);
  const size_t partials = size_t(3) * teams * columns_of_partials(n) * sizeof(float);
  return partials + size_t(rows) * device.processors * sizeof(unsigned long long);
}

}  // namespace fuseline
