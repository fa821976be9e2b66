// Memory that the server shares with one worker: a sealed memfd, mapped here once, or memory of the device that steps
// are computed on.
//
// The server makes it, so its size is the server's: seals keep everyone from shrinking it (a touch of what is cut off
// would be SIGBUS) and from growing it. All of it is allocated at once, so that a control group's limit is met when the
// region is made and not in the middle of a step.
//
// What stands in it may change at any moment, also between two reads of the same step: the worker writes as it likes.
// So offsets and lengths come from messages, never from here; what is read here are a highway's values, which kernels
// compute with and index nothing by. A worker that scribbles gets a wrong result in its own region.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace engram {

// Memory of a device, which another process on the same device can open.
struct DeviceMemory {
  char* data = nullptr;        // an address of the device's: nothing on the host reads or writes there
  std::string handle;          // what the other process opens it by: a CUDA IPC handle, kDeviceHandleBytes
  std::function<void()> free;  // called once, when the region goes
};

inline constexpr int64_t kDeviceHandleBytes = 64;

// Makes device memory of so many bytes, all zeros: what stood there before may be another worker's. RESOURCE_EXHAUSTED
// where there is none; any error names the call that failed.
using DeviceMemorySource = std::function<absl::StatusOr<DeviceMemory>(int64_t bytes)>;

// A driver may put several small allocations into one block of 2 MiB, and a handle opens the whole block: regions are
// whole blocks, so that no worker sees its neighbour.
inline constexpr int64_t kDeviceBlockBytes = int64_t{2} << 20;

// Immutable but for the memory itself; any thread.
class Region {
 public:
  // `bytes` >= 1, in whole pages. RESOURCE_EXHAUSTED, with the system's reason, where there is no such memory.
  static absl::StatusOr<std::shared_ptr<Region>> Create(int64_t bytes);

  static std::shared_ptr<Region> OnDevice(DeviceMemory memory, int64_t bytes);

  // Gives the memory back, whoever else still has the descriptor or a mapping: they find zeros, and pages that they
  // touch from then on are their own to account for.
  ~Region();

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  int64_t bytes() const { return bytes_; }
  // For the worker; stays the region's. -1 for one on the device, which has a handle instead.
  int fd() const { return fd_; }
  const std::string& device_handle() const { return device_.handle; }

  // Bytes [offset, offset + bytes); null where they are not all within. On the device: its address.
  char* At(uint64_t offset, uint64_t bytes) const;

 private:
  Region(int fd, char* data, int64_t bytes, DeviceMemory device);

  const int fd_;
  char* const data_;
  const int64_t bytes_;
  const DeviceMemory device_;
};

// Rounded up to whole pages; `bytes` is at least 1 and below 2^62.
int64_t WholePages(int64_t bytes);

}  // namespace engram
