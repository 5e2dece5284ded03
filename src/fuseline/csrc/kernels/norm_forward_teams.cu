// The forward of norms, of x or of residual + dropout(x + x_bias), for many long rows: device/norm_forward_teams.cuh.
#include <cstdlib>

#include "device/norm_forward_teams.cuh"

namespace fuseline {
namespace {

int setting(const char* name) {
  const char* const value = std::getenv(name);
  return value ? std::atoi(value) : 0;
}

constexpr int64_t kShortestTeams = 8192;

// For the trial alone.
unsigned long long* mailbox() {
  static unsigned long long* const box = [] {
    void* at = nullptr;
    if (cudaMalloc(&at, size_t(32) << 20) != cudaSuccess) return cudaGetLastError(), static_cast<unsigned long long*>(nullptr);
    return static_cast<unsigned long long*>(at);
  }();
  return box;
}

template <class T, bool kAdded, bool kMasked>
bool run(const NormForward& a, const Device& device, void* stream, int& error) {
  constexpr int kSize = kVector<T>;
  const int offset = offset_in_vector(a.x);
  for (const void* tensor : {kAdded ? a.residual : a.x, static_cast<const void*>(a.y),
                             kAdded ? static_cast<const void*>(a.sum) : a.x}) {
    if (offset_in_vector(tensor) != offset) return false;
  }
  if (a.dropout.seed && offset / int(sizeof(T)) % 4 != 0) return false;
  TeamsForward given{a};
  Team& team = given.team;
  team.teams = teams_for(a.n, kSize, a.n % kSize == 0, device);
  if (const int teams = setting("FUSELINE_N_TEAMS"); teams > 0 && teams < team.teams && (a.n % kSize == 0 || teams % kSize == 0)) {
    team.teams = teams;
  }
  if (team.teams == 0) return false;
  team.blocks = device.processors / team.teams;
  if (team.blocks > kMostTeamBlocks || size_t(a.rows) * team.blocks * 8 > (size_t(32) << 20)) return false;
  const int64_t vectors = most_vectors_of_part(a.n, kSize, team.blocks);
  const int warps = int(divide_up(vectors, kWarp));
  team.part = int(vectors * 16);
  const int64_t stage = int64_t(kAdded ? 2 : 1) * team.part, room = device.shared_a_block - int64_t(sizeof(TeamStatics)) - 1024;
  team.stages = int(std::min<int64_t>(kMostTeamStages, room / stage));
  if (const int stages = setting("FUSELINE_N_STAGES"); stages > 0 && stages < team.stages) team.stages = stages;
  if (team.stages < 4) return false;
  team.ahead = std::min(kMostTeamAhead, team.stages / 2);
  if (const int ahead = setting("FUSELINE_N_AHEAD"); ahead > 0) team.ahead = std::min({ahead, kMostTeamAhead, team.stages - 1});
  team.mail = mailbox();
  if (!team.mail) return false;
  team.bulk = setting("FUSELINE_N_BULK") == 1;
  if (team.bulk && team.ahead >= team.stages - 1) team.ahead = team.stages - 2;
  const auto kernel = norm_forward_teams<T, kAdded, kMasked>;
  const int threads = (warps + 2 + kCollectors) * kWarp;
  const size_t bytes = size_t(team.stages * stage);
  int count = 0;
  if (resident_clusters(kernel, device, threads, bytes, 1, count) != cudaSuccess || count < team.teams * team.blocks) {
    return cudaGetLastError(), false;
  }
  error = launch_team(kernel, given, team, a.rows, threads, bytes, stream);
  return true;
}

}  // namespace

bool norm_forward_teams(const NormForward& a, int dtype, const Device& device, void* stream, int& error) {
  if (setting("FUSELINE_N_FORWARD") != 1 || row_overrides[FUSELINE_LAYER_NORM_FORWARD].given) return false;
  if (!device.clusters || a.n <= kShortestTeams || a.n > (1 << 30) || a.rows < device.processors) return false;
  const bool masked = a.x_bias || a.dropout.seed;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (!a.residual) return int(run<T, false, false>(a, device, stream, error));
    return int(masked ? run<T, true, true>(a, device, stream, error) : run<T, true, false>(a, device, stream, error));
  });
}

}  // namespace fuseline
