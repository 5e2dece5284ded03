// The forward of norms of residual + dropout(x + x_bias) for many long rows: device/norm_forward_teams.cuh.
#include "device/choice.h"
#include "device/norm_forward_teams.cuh"
#include "device/norm_teams.h"
#include "device/norm_teams_launch.cuh"

namespace fuseline {
namespace {

// Rows that read more so. Shares of the copy bandwidth by norm_forward_copied.cuh or norm_forward_pieces.cuh and here: fp32 131,072
// with a mask, layer and RMS norms, 0.840 and 0.940, 0.852 and 0.946, without 0.917 and 0.954; 262,144 0.692 and 0.944, 0.713 and
// 0.952, 0.839 and 0.950; 50,257 0.885 and 0.890, 0.865 and 0.906, 0.887 and 0.930; 16 bits at 262,144 0.894 and 0.914 of RMS norms
// with a mask, without 0.889 and 0.949. Elsewhere they read less: 16 bits with a mask, layer norms at 262,144, 0.858 and 0.851, 131,072
// 0.918 and 0.851, 50,257 0.599 and 0.546; fp32 65,536 0.908 and 0.914, 32,768 0.971 and 0.891; norms of x alone 0.50 to 0.85.
constexpr int64_t kLong4 = 65536, kLong2 = 131072, kLongOdd4 = 32768;  // elements, of fp32, of 16 bits, of fp32 at odd addresses

bool is_long(const NormForward& a, bool masked, bool fp32) {
  if (fp32) return a.n > (a.n % 4 == 0 ? kLong4 : kLongOdd4);
  return a.n > kLong2 && a.n % 8 == 0 && !(masked && a.centred);
}

template <class T, bool kMasked>
bool run(const NormForward& a, void* workspace, const Device& device, void* stream, int& error) {
  TeamsForward given{a};
  int threads = 0;
  size_t bytes = 0;
  if (!is_long(a, kMasked, sizeof(T) == 4) || !stand_alike<T>({a.x, a.residual, a.y, a.sum}, a.dropout.seed) ||
      !plan_teams<T>(given.team, teams_for(a.n, kVector<T>, kTeamVectors, device), a.n, 2, device, threads, bytes)) {
    return false;
  }
  given.team.mail = static_cast<unsigned long long*>(workspace);
  return launch_team(norm_forward_teams<T, kMasked>, given, given.team, a.rows, threads, bytes, device, stream, error);
}

bool many_long(int64_t rows, int64_t n, const Device& device) {
  return device.clusters && rows >= device.processors && n > kLongOdd4 && n <= (int64_t(1) << 30);
}

}  // namespace

bool norm_forward_teams(const NormForward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                        int& error) {
  if (row_overrides[FUSELINE_LAYER_NORM_FORWARD].given || !workspace || !a.residual) return false;
  if (dtype != y_dtype || !many_long(a.rows, a.n, device)) return false;
  return 0 != with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return int(a.x_bias || a.dropout.seed ? run<T, true>(a, workspace, device, stream, error)
                                          : run<T, false>(a, workspace, device, stream, error));
  });
}

size_t norm_forward_teams_bytes(int64_t rows, int64_t n, const Device& device) {
  return many_long(rows, n, device) ? size_t(rows * device.processors) * sizeof(unsigned long long) : 0;
}

}  // namespace fuseline
