#include "server/engine/cuda_module.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

using kernels::cuda::Module;

// "" where the system does not say.
std::string FolderOfExecutable() {
  char path[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0 || length == static_cast<ssize_t>(sizeof path)) return "";
  const std::string whole(path, static_cast<size_t>(length));
  return whole.substr(0, whole.rfind('/') + 1);
}

std::string LoaderError() {
  const char* error = ::dlerror();
  return error == nullptr ? "the loader gives no reason" : error;
}

// The loader's reason names the library of the module's own that is missing, such as libcublasLt.
absl::StatusOr<void*> OpenLibrary(const std::string& path) {
  if (!path.empty()) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
    return absl::NotFoundError(absl::StrCat("CUDA module ", path, ": ", LoaderError()));
  }
  const std::string beside = FolderOfExecutable() + kCudaModuleFile;
  if (::access(beside.c_str(), F_OK) == 0) return OpenLibrary(beside);
  void* library = ::dlopen(kCudaModuleFile, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  return absl::NotFoundError(absl::StrCat("CUDA module ", kCudaModuleFile, ": not at ", beside,
                                          " and not where the loader looks: ", LoaderError()));
}

absl::StatusOr<const Module*> OpenModule(const std::string& path) {
  ASSIGN_OR_RETURN(void* library, OpenLibrary(path));
  const std::string name = path.empty() ? kCudaModuleFile : path;
  auto* open = reinterpret_cast<kernels::cuda::ModuleFn*>(::dlsym(library, kernels::cuda::kModuleSymbol));
  const Module* module = open == nullptr ? nullptr : open();
  if (module == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("CUDA module ", name, ": has no ", kernels::cuda::kModuleSymbol, ", so it is none"));
  }
  if (module->version != kernels::cuda::kModuleVersion) {
    return absl::FailedPreconditionError(absl::StrCat("CUDA module ", name, ": is of version ", module->version,
                                                      "; this server expects ", kernels::cuda::kModuleVersion));
  }
  return module;
}

std::string VersionText(int version) { return absl::StrFormat("%d.%d", version / 1000, version % 1000 / 10); }

}  // namespace

absl::StatusOr<std::shared_ptr<const CudaDevice>> CudaDevice::Open(const std::string& path, int number) {
  ASSIGN_OR_RETURN(const Module* module, OpenModule(path));
  std::shared_ptr<CudaDevice> device(new CudaDevice(*module, number));
  if (const int error = module->versions(&device->driver_, &device->runtime_); error != 0 || device->driver_ == 0) {
    return absl::FailedPreconditionError(absl::StrCat("no CUDA driver on this machine",
                                                      error == 0 ? "" : absl::StrCat(": ", module->error_text(error))));
  }
  int count = 0;
  if (const int error = module->device_count(&count); error != 0) {
    return absl::FailedPreconditionError(absl::StrCat("no CUDA device can be used: ", module->error_text(error),
                                                      " (driver for CUDA ", VersionText(device->driver_),
                                                      ", module built with ", VersionText(device->runtime_), ")"));
  }
  if (count == 0) return absl::FailedPreconditionError("this machine has no CUDA device");
  if (number >= count) {
    return absl::InvalidArgumentError(absl::StrCat("--device ", number, ": this machine has ", count));
  }
  RETURN_IF_ERROR(device->Use());
  RETURN_IF_ERROR(device->ToStatus(module->device_info(number, &device->info_), "device_info"));
  if (device->info_.compute_major < kLeastComputeMajor) {
    return absl::FailedPreconditionError(absl::StrCat("--device ", number, ": ", device->info_.name, " is ",
                                                      device->architecture(), "; sm_", kLeastComputeMajor,
                                                      "0 or later is needed"));
  }
  return device;
}

std::string CudaDevice::architecture() const { return absl::StrCat("sm_", info_.compute_major, info_.compute_minor); }

std::string CudaDevice::Describe() const {
  return absl::StrCat(info_.name, ", ", architecture(), ", driver ", VersionText(driver_), ", runtime ",
                      VersionText(runtime_));
}

absl::StatusOr<int64_t> CudaDevice::FreeBytes() const {
  kernels::cuda::DeviceInfo now;
  RETURN_IF_ERROR(ToStatus(module_.device_info(number_, &now), "device_info"));
  return now.free_bytes;
}

absl::Status CudaDevice::Use() const { return ToStatus(module_.use_device(number_), "use_device"); }

absl::Status CudaDevice::ToStatus(int error, absl::string_view call) const {
  if (error == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cuda ", call, ": ", module_.error_text(error)));
}

}  // namespace engram
