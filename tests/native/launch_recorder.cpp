// A CUDA runtime that launches nothing: it writes every launch down, for a GPU that the test makes up. Launchers linked to
// it run on machines without a GPU, and say what they would have launched.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace {

bool many_blocks = false;  // a multiprocessor holds as many as its shared memory does, else one
bool captured = false;     // streams record a graph

struct Gpu {
  int index, processors, shared_a_block, shared_a_processor, memory_gbs, clusters, major, most_cluster;
} gpu;

std::string launches;

std::map<const void*, std::string>& names() {  // filled while libraries are loaded, before any global of this file is there
  static std::map<const void*, std::string> known;
  return known;
}

void record(const void* kernel, dim3 grid, dim3 block, unsigned cluster, size_t shared) {
  char layout[128];
  std::snprintf(layout, sizeof(layout), " %u %u %u %u %zu\n", grid.x * grid.y * grid.z, block.x, block.y, cluster, shared);
  launches += names().at(kernel) + layout;
}

struct {
  dim3 grid, block;
  size_t shared;
} configuration;  // between the brackets of <<<>>>

}  // namespace

extern "C" {

void recorder_set_gpu(const int* numbers) {
  gpu = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]};
}

void recorder_hold_many_blocks() { many_blocks = true; }
void recorder_capture(int into_a_graph) { captured = into_a_graph != 0; }

// What was launched since the last call, a launch a line: mangled name, blocks, threads in x and y, blocks of a cluster, bytes of
// shared memory.
const char* recorder_take() {
  static std::string taken;
  taken.swap(launches);
  launches.clear();
  return taken.c_str();
}

// The mangled names of all kernels of the library, a name a line.
const char* recorder_kernels() {
  static std::string all;
  all.clear();
  for (const auto& [kernel, name] : names()) all += name + "\n";
  return all.c_str();
}

void** __cudaRegisterFatBinary(void*) {
  static void* binary;
  return &binary;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, uint3*, uint3*, dim3*, dim3*, int*) {
  names()[host] = device;
}

// Launches by <<<>>>.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t) {
  record(kernel, grid, block, 1, shared);
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void*) {
  configuration = {grid, block, shared};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void*) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = gpu.index;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = gpu.processors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = gpu.shared_a_block;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = gpu.shared_a_processor;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = gpu.memory_gbs * 1000;  // kHz, with 4,000 bits
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 4000;
      break;
    case cudaDevAttrClusterLaunch:
      *value = gpu.clusters;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    default:
      std::abort();
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t shared, unsigned) {
  *count = shared > size_t(gpu.shared_a_block) ? 0 : many_blocks ? int(gpu.shared_a_processor / (shared + 1024)) : 1;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
  const int cluster = int(config->attrs[0].val.clusterDim.x);
  const int blocks = many_blocks ? int(gpu.shared_a_processor / (config->dynamicSmemBytes + 1024)) : 1;
  *count = cluster <= gpu.most_cluster ? gpu.processors * blocks / cluster : 0;
  return cluster <= gpu.most_cluster ? cudaSuccess : cudaErrorInvalidConfiguration;
}

// Tensor maps: no kernel reads them.
int encode_nothing(...) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(encode_nothing);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  }
  record(kernel, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes);
  return cudaSuccess;
}
}
