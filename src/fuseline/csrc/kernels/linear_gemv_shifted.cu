// One to eight rows of activations times weights of 16 bits whose rows begin at any element: where K is odd, say.
//
// Floor and arithmetic are those of linear_gemv.cu, the kernel is its teams' (device/linear_gemv_team.cuh), the rest stands in
// device/linear_shifted.cuh: 5001 x 9001 takes 31.9 us, 0.94 of the copy bandwidth, where cuBLAS takes 50.7.

#include "device/linear_gemv_team.cuh"

namespace fuseline {
namespace {

constexpr int kMostRows = 8;

// Warps that share a row of W. A long row's vectors are better dealt among many; where a row ends, sums are added up, for as
// many rows of x. Beside one row of x, us by 1, 2, 4, 8 warps: 3001 x 3001 8.3, 8.7, 9.2, 10.4; 4095 x 4096 15.5, 14.2, 14.6,
// 15.6; 5001 x 9001 32.7, 32.2, 31.9, 33.5; 7001 x 7001 38.9, 36.1, 34.8, 35.3; 11007 x 4097 38.7, 35.5, 34.9, 33.4. Beside 4
// rows of 5001 x 9001 37.4, 42.2, 43.1, 52.5.
constexpr int team_of(int64_t k, int rows) {
  const int team = k <= 3584 ? 1 : k <= 4608 ? 2 : k <= 8192 ? 4 : 8;
  return team > rows ? team / rows : 1;
}

template <class T, int M>
int launch_shifted(const LinearArguments& a, const Device& device, void* stream) {
  const int team = team_of(a.k, M);
  auto kernel = gemv_team_kernel<T, M, 1, true>;
  if constexpr (M <= 4) kernel = team == 2 ? gemv_team_kernel<T, M, 2, true> : kernel;
  if constexpr (M <= 2) kernel = team == 4 ? gemv_team_kernel<T, M, 4, true> : kernel;
  if constexpr (M == 1) kernel = team == 8 ? gemv_team_kernel<T, M, 8, true> : kernel;
  const size_t shared = size_t(M) * divide_up(a.k + kTurn - 1, 8) * 16;  // of x behind the longest head
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, kLinearThreads, shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  if (resident < kTurn) return FUSELINE_UNSUPPORTED;
  const int64_t turns = std::min<int64_t>(divide_up(a.n, kLinearWarps / team * kTurn), resident / kTurn);
  return launch(kernel, a, turns * kTurn, dim3(kLinearThreads), shared, 1, stream, device.clusters);
}

template <class T>
int launch_shifted(const LinearArguments& a, const Device& device, void* stream) {
  return a.m == 1   ? launch_shifted<T, 1>(a, device, stream)
         : a.m == 2 ? launch_shifted<T, 2>(a, device, stream)
         : a.m <= 4 ? launch_shifted<T, 4>(a, device, stream)
                    : launch_shifted<T, kMostRows>(a, device, stream);
}

}  // namespace

int launch_gemv_shifted(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  if (a.norm || a.halves || a.m > kMostRows || a.k == 0) return FUSELINE_UNSUPPORTED;
  int rows = kMostRows;  // at a time, so that they fit
  while (int64_t(rows) * (a.k + 2 * kTurn) * 2 > kMostShared) rows /= 2;
  if (rows == 0) return FUSELINE_UNSUPPORTED;
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return int(error);
  for (int first = 0; first < a.m; first += rows) {
    LinearArguments some = a;
    some.m = std::min(a.m - first, rows);
    some.x = a.x + first * a.x_stride;
    some.y = a.y + int64_t(first) * a.n * 2;
    if (a.residual) some.residual = a.residual + int64_t(first) * a.n * 2;
    const int answer = call.dtype == FUSELINE_FLOAT16 ? launch_shifted<__half>(some, device, stream)
                                                      : launch_shifted<__nv_bfloat16>(some, device, stream);
    if (answer != 0) return answer;
  }
  return 0;
}

}  // namespace fuseline
