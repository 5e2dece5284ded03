// The host's half of norm_teams.cuh: how many teams there are, how many rows wait, and the launch.
#pragma once

#include <initializer_list>

#include "norm_teams.cuh"

namespace fuseline {

// Of the rows in shared memory two in three wait for mail. Share of the copy bandwidth of fp32 262,144 with a mask, backward, where
// there are nine, by 1, 2, 3, 4, 6 and 8 that wait: 0.451, 0.604, 0.686, 0.828, 0.962, 0.670.
constexpr int kWaitOfThree = 2;

inline int64_t most_vectors_of_part(int64_t n, int size, int blocks) {
  const int64_t lines = divide_up(divide_up(n + size - 1, size), kLineVectors);  // of any head
  return divide_up(lines, blocks) * kLineVectors;
}

// The most teams whose blocks have no more than so many vectors of a row, if all rows of a team stand alike; 0 if there are none.
inline int teams_for(int64_t n, int size, int64_t vectors, const Device& device) {
  int step = 1;
  while (step * n % size != 0) step *= 2;
  for (int teams = device.processors / step * step; teams >= step; teams -= step) {
    if (most_vectors_of_part(n, size, device.processors / teams) <= vectors) return teams;
  }
  return 0;
}

// False where rows are not alike, or too long for all blocks together.
template <class T>
bool plan_teams(Team& team, int teams, int64_t n, int tensors, const Device& device, int& threads, size_t& bytes) {
  if (teams == 0) return false;
  team.teams = teams, team.blocks = device.processors / teams;
  const int64_t vectors = most_vectors_of_part(n, kVector<T>, team.blocks);
  if (vectors > kTeamVectors || team.blocks > kMostTeamBlocks) return false;
  team.part = int(vectors * 16);
  const int64_t stage = int64_t(tensors) * team.part;
  const int64_t room = device.shared_a_block - int64_t(sizeof(TeamStatics)) - 1024;
  team.stages = int(std::min<int64_t>(kMostTeamStages, room / stage));
  team.ahead = std::min(kMostTeamAhead, team.stages * kWaitOfThree / 3);
  threads = int(divide_up(vectors, kWarp) + 2 + kCollectors) * kWarp;
  bytes = size_t(team.stages * stage);
  return team.ahead > 0;
}

// Whether tensors (null: none) stand alike in their vectors, and a mask's fours of elements keep to these.
template <class T>
bool stand_alike(std::initializer_list<const void*> tensors, bool masked) {
  int offset = -1;
  for (const void* const tensor : tensors) {
    if (!tensor) continue;
    if (offset >= 0 && offset_in_vector(tensor) != offset) return false;
    offset = offset_in_vector(tensor);
  }
  return offset % int(sizeof(T)) == 0 && (!masked || offset / int(sizeof(T)) % 4 == 0);
}

// False where they cannot all be resident.
template <class Arguments>
bool launch_team(void (*kernel)(Arguments), const Arguments& arguments, const Team& team, int64_t rows, int threads, size_t bytes,
                 const Device& device, void* stream, int& error) {
  int count = 0;
  if (resident_clusters(kernel, device, threads, bytes, 1, count) != cudaSuccess || count < team.teams * team.blocks) {
    return cudaGetLastError(), false;
  }
  const auto on = static_cast<cudaStream_t>(stream);
  error = int(cudaMemsetAsync(team.mail, 0xff, size_t(rows) * team.blocks * sizeof(*team.mail), on));
  if (error) return true;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks are resident, or the launch fails
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(team.teams * team.blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = bytes;
  config.stream = on;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments);
  const cudaError_t last = cudaGetLastError();
  if (launched == cudaErrorCooperativeLaunchTooLarge) return false;  // the stream has a part of the multiprocessors
  error = int(launched != cudaSuccess ? launched : last);
  return true;
}

}  // namespace fuseline
