// Opens libengram_cuda.so at run time, or says what is missing: nothing in the server is linked to CUDA.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/module.h"

namespace engram {

inline constexpr char kCudaModuleFile[] = "libengram_cuda.so";

// What a device of the module is asked to be: kernels are compiled for sm_80 and later.
inline constexpr int kLeastComputeMajor = 8;

// A device that steps can run on. Any thread; memory and streams are those of the threads that called Use().
class CudaDevice {
 public:
  // `path`: of the module; "": beside the executable, else where the loader looks. Errors are one line each and name
  // what is missing: the module (or a library of its own), its version, the driver, a device, this device.
  static absl::StatusOr<std::shared_ptr<const CudaDevice>> Open(const std::string& path, int number);

  const kernels::cuda::Module& module() const { return module_; }
  int number() const { return number_; }
  const kernels::cuda::DeviceInfo& info() const { return info_; }  // free_bytes: of when it was opened
  std::string architecture() const;                                // "sm_90"
  // For the log: "NVIDIA H100, sm_90, driver 13.0, runtime 13.0".
  std::string Describe() const;

  // Of its memory, now.
  absl::StatusOr<int64_t> FreeBytes() const;

  // Makes it the calling thread's device.
  absl::Status Use() const;

  // OK for 0; else INTERNAL with the call's name and the error's text: "cuda copy: an illegal memory access was
  // encountered".
  absl::Status ToStatus(int error, absl::string_view call) const;

 private:
  explicit CudaDevice(const kernels::cuda::Module& module, int number) : module_(module), number_(number) {}

  const kernels::cuda::Module& module_;  // stays open to the end of the process, as the CUDA runtime wants it
  const int number_;
  kernels::cuda::DeviceInfo info_;
  int driver_ = 0, runtime_ = 0;
};

}  // namespace engram
