// The backward of all norms for few of the longest rows: device/norm_backward_across.cuh.
#include "device/norm_backward_across.cuh"

namespace fuseline {
namespace {

// Rows that other kernels for few rows hold, too, and how many of them take as long there. In us of residual + RMS norms of
// bf16, there and here: 16 x 16,384 7.4 and 5.6, 4 x 65,536 7.9 and 5.5, 64 x 32,768 14.3 and 15.5, 64 x 65,536 29.0 and 22.2; 4
// x 49,152 6.8 there, 8 6.7 here.
constexpr int64_t kLongRow = 65536, kLeastColumns = 16384, kLeastElements = 1 << 17, kMostShorterRows = 16;
// Of x and grad_y together, which the L2 keeps in part: 64 x 131,072 44.7 and 36.2, 128 x 131,072 68.6 and 82.0, 64 x 262,144 of
// a layer norm 61.5 and 67.4. Rows anywhere in their vectors cost more, 16 x 131,071 28.3 and 17.7, a layer norm's 64 48.9 and
// 50.8; but longer ones of fp32 than these, of x alone and of a sum, no cluster holds: 32 x 131,071 are 259 there, 16 26.8 here.
constexpr int64_t kMostRows = 64, kMostBytes = int64_t(32) << 20, kLongestOdd = 98304, kLongestOddSum = 65536;

bool takes(const NormBackward& a, int64_t bytes, bool aligned, bool fp32, const Device& device) {
  if (a.n < kLeastColumns || a.n > (int64_t(1) << 30) || a.rows > kMostRows) return false;
  if (a.n <= kLongRow && a.rows * a.n < kLeastElements) return false;
  if (a.n < kLongRow && a.rows > kMostShorterRows) return false;
  const bool sum = a.grad_sum || a.grad_dropped || a.grad_x_bias;
  // Beyond two blocks a multiprocessor each block would read the sums of many more.
  const bool at_once = divide_up(a.n, kAcrossThreads * kVector<float>) <= 2 * device.processors;
  if (!aligned && fp32 && at_once && a.n > (sum ? kLongestOddSum : kLongestOdd)) return true;
  return a.rows * a.n * bytes <= (aligned ? kMostBytes : kMostBytes / 2);
}

// Threads side by side in a row, of so many blocks.
int across_for(int64_t vectors, int64_t blocks) {
  return int(std::min<int64_t>(divide_up(divide_up(vectors, blocks), kWarp) * kWarp, kAcrossThreads));
}

template <class X, class Y, bool kShifted>
bool run(const NormBackward& a, float2* row_sums, const Device& device, void* stream, int& error) {
  constexpr int kSize = kVector<Y>;
  const auto sums = norm_backward_across_sums<X, Y, kShifted>;
  const auto rows = norm_backward_across_rows<X, Y, kShifted>;
  const int64_t vectors = divide_up(a.n, kSize);
  AcrossNorm given{a, row_sums, across_for(vectors, device.processors)};
  int64_t blocks = 0;
  int threads = 0;
  size_t bytes_of_sums = 0, bytes_of_rows = 0;
  const auto fits = [&] {
    blocks = divide_up(vectors, given.across);
    threads = int(std::min<int64_t>(kAcrossThreads / given.across, a.rows)) * given.across;
    const size_t of_a_row = (given.across / kWarp + 1) * sizeof(float2);
    bytes_of_sums = AcrossRow<X, Y, kShifted, false>::room(a, threads) + size_t(a.rows) * of_a_row;
    bytes_of_rows = AcrossRow<X, Y, kShifted, true>::room(a, threads) + size_t(a.rows) * sizeof(float4);
    int of_sums = 0, of_rows = 0;
    if (resident_clusters(sums, device, threads, bytes_of_sums, 1, of_sums) != cudaSuccess ||
        resident_clusters(rows, device, threads, bytes_of_rows, 1, of_rows) != cudaSuccess) {
      return cudaGetLastError(), 0;
    }
    return std::min(of_sums, of_rows);
  };
  // Rows that are several turns of a block have two blocks a multiprocessor, where these are there at once: residual + RMS
  // norm 16 x 131,072 12.7 us in place of 14.2, 64 x 131,072 36.2 and 40.3, but 4 x 131,072 7.25 and 6.95.
  const int whole = given.across;
  if (a.rows * whole > kAcrossThreads) given.across = across_for(vectors, 2 * device.processors);
  if (given.across < whole) {
    const int at_once = fits();
    if (at_once < blocks) given.across = whole;
  }
  if (fits() == 0) return false;
  error = launch(sums, given, blocks, dim3(unsigned(threads)), bytes_of_sums, 1, stream, device.clusters);
  if (error || !a.wants_rows()) return true;
  error = launch(rows, given, blocks, dim3(unsigned(threads)), bytes_of_rows, 1, stream, device.clusters);
  return true;
}

}  // namespace

bool norm_backward_across(const NormBackward& a, void* workspace, int dtype, int y_dtype, const Device& device, void* stream,
                          int& error) {
  if (!workspace || row_overrides[FUSELINE_LAYER_NORM_BACKWARD].given) return false;
  return 0 != with_dtypes(dtype, y_dtype, [&](auto x, auto y) {
    using X = decltype(x);
    using Y = decltype(y);
    const bool aligned = in_vectors<kVector<Y>>(a);
    if (!takes(a, sizeof(X) + sizeof(Y), aligned, sizeof(Y) == 4, device)) return 0;
    float2* const row_sums = static_cast<float2*>(workspace);
    if (aligned) return int(run<X, Y, false>(a, row_sums, device, stream, error));
    for (const void* const result : {a.grad_x, a.grad_dropped}) {  // what neighbours still read is not written
      if (result && (result == a.x || result == a.grad_y || result == a.grad_sum)) return 0;
    }
    return int(run<X, Y, true>(a, row_sums, device, stream, error));
  });
}

size_t norm_backward_across_bytes(int64_t rows, int64_t n, const Device& device) {
  if (rows > kMostRows || n < kLeastColumns) return 0;
  constexpr int64_t kLeastVector = kVector<float>;  // elements
  const int64_t blocks = std::max<int64_t>(2 * device.processors, divide_up(n, kAcrossThreads * kLeastVector)) + 1;
  return size_t(rows * blocks) * sizeof(float2);
}

}  // namespace fuseline
