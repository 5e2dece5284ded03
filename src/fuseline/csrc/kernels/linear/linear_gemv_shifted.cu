// One to eight rows of activations times weights of 16 bits whose rows begin at any element: where K is odd, say.
//
// Floor and arithmetic are those of linear_gemv.cu, the kernel is its teams' (linear/linear_gemv_team.cuh), the rest stands in
// linear/linear_shifted.cuh. 5001 x 9001 takes 33.5 us beside one row and 38.5 beside four, where cuBLAS takes 50.7 and 72.1.

#include "linear_gemv_team.cuh"

namespace fuseline {
namespace {

constexpr int kMostRows = 8;

// Warps that share a row of W, or two beside more than one row of x, which are read from shared memory for both. A long row's
// vectors are better dealt among many; where a row ends, sums are added up, for as many rows of x. Beside one row of x, us by
// 1, 2, 4, 8 warps: 3001 x 3001 8.3, 8.7, 9.2, 10.4; 4095 x 4096 15.5, 14.2, 14.6, 15.6; 5001 x 9001 32.7, 32.2, 31.9, 33.5;
// 7001 x 7001 38.9, 36.1, 34.8, 35.3; 11007 x 4097 38.7, 35.5, 34.9, 33.4. Beside 4 rows, by 1, 2, 4 warps, for one row of W
// and for two: 5001 x 9001 43.4, 42.7, 43.4 and 41.6, 38.5, 37.1; 2047 x 8001 18.9, 21.8, 27.4 and 16.3, 17.9, 21.1. No model
// has such rows: teams of two warps, and of eight beside one row of x, are enough.
constexpr int kLongestOfTwo = 4608;

template <class T, int M>
int launch_shifted(const LinearArguments& a, const Device& device, void* stream) {
  constexpr int kRows = M > 1 ? 2 : 1;
  int team = 2;
  auto kernel = gemv_team_kernel<T, M, kRows, 2, true>;
  if constexpr (M == 1) {
    if (a.k > kLongestOfTwo) kernel = gemv_team_kernel<T, M, kRows, 8, true>, team = 8;
  }
  const size_t shared = size_t(M) * divide_up(a.k + kTurn - 1, 8) * 16;  // of x behind the longest head
  int resident = 0;
  const cudaError_t error = resident_clusters(kernel, device, kLinearThreads, shared, 1, resident);
  if (error != cudaSuccess) return int(error);
  if (resident < kTurn) return FUSELINE_UNSUPPORTED;
  const int64_t turns = std::min<int64_t>(divide_up(a.n, kLinearWarps / team * kRows * kTurn), resident / kTurn);
  return launch(kernel, a, turns * kTurn, dim3(kLinearThreads), shared, 1, stream, device.clusters);
}

template <class T>
int launch_shifted(const LinearArguments& a, const Device& device, void* stream) {
  return a.m == 1   ? launch_shifted<T, 1>(a, device, stream)
         : a.m <= 4 ? launch_shifted<T, 4>(a, device, stream)
                    : launch_shifted<T, kMostRows>(a, device, stream);
}

}  // namespace

int launch_gemv_shifted(const LinearArguments& a, const fuseline_linear& call, void* stream) {
  if (a.norm || a.halves || a.m > kMostRows || a.k == 0) return FUSELINE_UNSUPPORTED;
  // Of shorter rows more than the first and the last have vectors that reach out of the weight.
  if (a.weight_stride < 2 * (kTurn - 1)) return FUSELINE_UNSUPPORTED;
  const auto fits = [&](int rows) { return int64_t(rows) * (a.k + 2 * kTurn) * 2 <= kMostShared; };
  const int rows = fits(kMostRows) ? kMostRows : fits(4) ? 4 : 1;  // at a time
  if (!fits(rows)) return FUSELINE_UNSUPPORTED;
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
