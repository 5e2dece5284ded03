// A CUDA runtime that launches nothing: it writes every launch down, for a GPU that the test makes up. Launchers linked to
// it run on machines without a GPU, and say what they would have launched.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace {

struct Gpu {
  int index, processors, shared_a_block, shared_a_processor, clusters, major, most_cluster;
} gpu;

std::string launches;

std::map<const void*, std::string>& names() {  // filled while libraries are loaded, before any global of this file is there
  static std::map<const void*, std::string> known;
  return known;
}

}  // namespace

extern "C" {

void recorder_set_gpu(const int* numbers) {
  gpu = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]};
}

// What was launched since the last call, a launch a line: mangled name, blocks, threads in x and y, blocks of a cluster, bytes of
// shared memory.
const char* recorder_take() {
  static std::string taken;
  taken.swap(launches);
  launches.clear();
  return taken.c_str();
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

// Launches by <<<>>>, of which the launchers here have none.
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { std::abort(); }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { std::abort(); }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
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
  *count = shared <= size_t(gpu.shared_a_block);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
  const int cluster = int(config->attrs[0].val.clusterDim.x);
  *count = cluster <= gpu.most_cluster ? gpu.processors / cluster : 0;
  return cluster <= gpu.most_cluster ? cudaSuccess : cudaErrorInvalidConfiguration;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  }
  char layout[128];
  std::snprintf(layout, sizeof(layout), " %u %u %u %u %zu\n", config->gridDim.x, config->blockDim.x, config->blockDim.y, cluster,
                config->dynamicSmemBytes);
  launches += names().at(kernel) + layout;
  return cudaSuccess;
}
}
