// What shared memory is for: values that another thread needs. ReLU through it, where every thread reads back what it
// wrote, and a transposition, directly and through it. No torch header.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;
constexpr int kRows = 8;  // of a tile that a block moves at a time: 32 x 8 threads

// Twice the way: memory, shared memory, memory. The barrier is not needed, for no thread reads another's value.
__global__ void relu_shared(const float* x, float* y, int64_t count) {
    __shared__ float tile[kThreads];
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < count) tile[threadIdx.x] = x[i];
    __syncthreads();
    if (i < count) y[i] = tile[threadIdx.x] < 0.0f ? 0.0f : tile[threadIdx.x];  // NaN stays NaN
}

// A warp reads 32 neighbours of a row and writes 32 values that lie a column apart: 32 transactions for one.
__global__ void transpose_direct(const float* x, float* y, int rows, int columns) {
    const int column = blockIdx.x * kTile + threadIdx.x;
    for (int k = 0; k < kTile; k += kRows) {
        const int row = blockIdx.y * kTile + threadIdx.y + k;
        if (row < rows && column < columns) y[int64_t(column) * rows + row] = x[int64_t(row) * columns + column];
    }
}

// A tile is read row by row and written column by column of the tile, which are rows of y: neighbours both times.
__global__ void transpose_shared(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[kTile][kTile + 1];  // one column more: a warp that reads a column meets 32 banks
    const int column = blockIdx.x * kTile + threadIdx.x;
    for (int k = 0; k < kTile; k += kRows) {
        const int row = blockIdx.y * kTile + threadIdx.y + k;
        if (row < rows && column < columns) tile[threadIdx.y + k][threadIdx.x] = x[int64_t(row) * columns + column];
    }
    __syncthreads();
    const int y_column = blockIdx.y * kTile + threadIdx.x;
    for (int k = 0; k < kTile; k += kRows) {
        const int y_row = blockIdx.x * kTile + threadIdx.y + k;
        if (y_row < columns && y_column < rows) y[int64_t(y_row) * rows + y_column] = tile[threadIdx.x][threadIdx.y + k];
    }
}

}  // namespace

extern "C" int example_relu_shared(const float* x, float* y, int64_t count, void* stream) {
    const unsigned blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    relu_shared<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, y, count);
    return cudaGetLastError();
}

extern "C" int example_transpose(const float* x, float* y, int rows, int columns, int shared, void* stream) {
    const dim3 blocks((columns + kTile - 1) / kTile, (rows + kTile - 1) / kTile), threads(kTile, kRows);
    const auto kernel = shared ? transpose_shared : transpose_direct;
    kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(x, y, rows, columns);
    return cudaGetLastError();
}
