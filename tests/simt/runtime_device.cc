// What the runtime says of errors, versions and its one device.
#include <cstdlib>
#include <cstring>

#include "tests/simt/runtime.h"
#include "tests/simt/runtime_state.h"

using simt::DeviceBytes;
using simt::Return;

namespace {

constexpr int kVersion = CUDART_VERSION;
constexpr int kMultiprocessors = 4;

int FromEnvironment(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text == nullptr ? otherwise : atoi(text);
}

int ComputeMajor() { return FromEnvironment("SIMT_COMPUTE_MAJOR", 9); }

}  // namespace

size_t simt::DeviceBytes() {
  const char* text = getenv("SIMT_DEVICE_BYTES");
  return text == nullptr ? size_t{4} << 30 : strtoull(text, nullptr, 10);
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define ENGRAM_SIMT_NAME(name) \
  case name:                   \
    return #name;
    ENGRAM_SIMT_NAME(cudaSuccess)
    ENGRAM_SIMT_NAME(cudaErrorInvalidValue)
    ENGRAM_SIMT_NAME(cudaErrorMemoryAllocation)
    ENGRAM_SIMT_NAME(cudaErrorInvalidConfiguration)
    ENGRAM_SIMT_NAME(cudaErrorNoDevice)
    ENGRAM_SIMT_NAME(cudaErrorInvalidDevice)
    ENGRAM_SIMT_NAME(cudaErrorInvalidResourceHandle)
    ENGRAM_SIMT_NAME(cudaErrorNotReady)
    ENGRAM_SIMT_NAME(cudaErrorIllegalAddress)
    ENGRAM_SIMT_NAME(cudaErrorHostMemoryAlreadyRegistered)
    ENGRAM_SIMT_NAME(cudaErrorHostMemoryNotRegistered)
    ENGRAM_SIMT_NAME(cudaErrorLaunchFailure)
    ENGRAM_SIMT_NAME(cudaErrorNotSupported)
    ENGRAM_SIMT_NAME(cudaErrorStreamCaptureUnsupported)
#undef ENGRAM_SIMT_NAME
    default:
      return "cudaErrorUnknown";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return cudaGetErrorName(error);
  }
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = FromEnvironment("SIMT_DRIVER", kVersion);
  return Return(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return Return(cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = FromEnvironment("SIMT_DEVICES", 1);
  return Return(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return Return(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) { return Return(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaSetDeviceFlags(unsigned) { return Return(cudaSuccess); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  if (device != 0) return Return(cudaErrorInvalidDevice);
  strcpy(properties->name, "SIMT executor");
  strcpy(properties->uuid.bytes, "simt executor");
  properties->totalGlobalMem = DeviceBytes();
  properties->sharedMemPerBlock = simt::kDefaultShared;
  properties->sharedMemPerBlockOptin = simt::kMostShared;
  properties->major = ComputeMajor();
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  return Return(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return Return(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = ComputeMajor();
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(simt::kMostShared);
      break;
    default:
      return Return(cudaErrorInvalidValue);
  }
  return Return(cudaSuccess);
}
