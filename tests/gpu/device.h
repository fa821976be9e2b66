// What the programs for a machine with a GPU share: the module's table, linked in rather than opened, one device and
// stream, and memory whose surroundings show who wrote beyond an end.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/module.h"

extern "C" const engram::kernels::cuda::Module* engram_cuda_module();

namespace engram::gpu {

using kernels::Bf16;

struct CudaFailure : std::runtime_error {
  CudaFailure(int code, const std::string& text) : std::runtime_error(text), error(code) {}
  int error;
};

// Throws CudaFailure, as do all of Device and Guarded, where the device or its runtime refuses.
inline void Must(int error, const char* what) {
  if (error == 0) return;
  throw CudaFailure(error, std::string(what) + ": CUDA error " + std::to_string(error) + ", " +
                               engram_cuda_module()->error_text(error));
}

// The first device and a stream on it. One thread.
class Device {
 public:
  Device() : module_(*engram_cuda_module()) {
    int count = 0;
    Must(module_.device_count(&count), "cudaGetDeviceCount");
    if (count == 0) throw CudaFailure(0, "cudaGetDeviceCount says 0");
    Must(module_.use_device(0), "use_device(0)");
    Must(module_.device_info(0, &info_), "device_info(0)");
    Must(module_.create_stream(&stream_), "create_stream");
  }
  ~Device() { module_.destroy_stream(stream_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const kernels::cuda::Module& module() const { return module_; }
  const kernels::cuda::DeviceInfo& info() const { return info_; }
  CUstream_st* stream() const { return stream_; }
  int multiprocessors() const { return info_.multiprocessors; }
  void Wait() const { Must(module_.wait_stream(stream_), "at the stream's end"); }

  int64_t FreeBytes() const {
    kernels::cuda::DeviceInfo now;
    Must(module_.device_info(0, &now), "device_info(0)");
    return now.free_bytes;
  }

 private:
  const kernels::cuda::Module& module_;
  kernels::cuda::DeviceInfo info_;
  CUstream_st* stream_ = nullptr;
};

enum class Place { kDevice, kPinned };

// `count` values in device or pinned memory, `offset` values behind an address aligned to 256. Poisoned: every byte of
// the values is 0xFF, so that what a kernel leaves out is a NaN, and of the zones before and behind 0xA5.
template <typename T>
class Guarded {
 public:
  Guarded(const Device& device, int64_t count, int64_t offset = 0, Place place = Place::kDevice)
      : device_(device), count_(count), before_(kZone + offset * static_cast<int64_t>(sizeof(T))), place_(place) {
    Must(place == Place::kDevice ? device.module().allocate(total(), &memory_)
                                 : device.module().allocate_pinned(total(), &memory_),
         "allocating");
    Fill(memory_, 0xA5, total());
    Poison();
  }
  Guarded(const Device& device, const std::vector<T>& values, int64_t offset = 0, Place place = Place::kDevice)
      : Guarded(device, static_cast<int64_t>(values.size()), offset, place) {
    Write(values);
  }
  ~Guarded() { place_ == Place::kDevice ? device_.module().free(memory_) : device_.module().free_pinned(memory_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() const { return reinterpret_cast<T*>(static_cast<uint8_t*>(memory_) + before_); }

  void Poison() { Fill(data(), 0xFF, bytes()); }

  void Write(const std::vector<T>& values) {
    Must(device_.module().copy(data(), values.data(), bytes(), device_.stream()), "copy to the device");
    device_.Wait();
  }

  // Waits for the stream; throws where anything beside the values was written.
  std::vector<T> Read() const {
    std::vector<uint8_t> all(static_cast<size_t>(total()));
    Must(device_.module().copy(all.data(), memory_, total(), device_.stream()), "copy from the device");
    device_.Wait();
    for (int64_t i = 0; i < total(); ++i) {
      if (i >= before_ && i < before_ + bytes()) continue;
      if (all[static_cast<size_t>(i)] == 0xA5) continue;
      throw std::runtime_error("byte " + std::to_string(i - before_) + " was written, of " + std::to_string(bytes()));
    }
    std::vector<T> values(static_cast<size_t>(count_));
    if (count_ > 0) std::memcpy(values.data(), all.data() + before_, static_cast<size_t>(bytes()));
    return values;
  }

 private:
  static constexpr int64_t kZone = 4096;
  void Fill(void* memory, int value, int64_t bytes) {
    if (place_ == Place::kDevice) {
      Must(device_.module().fill(memory, value, bytes, device_.stream()), "fill");
    } else {
      device_.Wait();
      std::memset(memory, value, static_cast<size_t>(bytes));
    }
  }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }
  int64_t total() const { return before_ + bytes() + kZone; }

  const Device& device_;
  const int64_t count_, before_;
  const Place place_;
  void* memory_ = nullptr;
};

}  // namespace engram::gpu
