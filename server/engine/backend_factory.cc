#include "server/engine/backend_factory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cpu/cpu_kernels.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/cuda_backend.h"
#include "server/model/status_macros.h"
#include "server/observe/log.h"

namespace engram {
namespace {

// A device that the model fits on.
struct Fit {
  std::shared_ptr<const CudaDevice> device;
  CudaMemoryPlan plan;
  std::shared_ptr<const EngramModel> model;  // its tables mapped
};

bool TablesOnDevice(const BackendOptions& options) { return options.tables != TableHome::kHost; }

CudaPlanOptions PlanOptions(const BackendOptions& options) {
  return {.max_batch_tokens = options.max_batch_tokens,
          .prepare_memory_bytes = options.prepare_memory_bytes,
          .tables_on_device = TablesOnDevice(options)};
}

void LogPlan(const CudaDevice& device, const CudaMemoryPlan& plan, int64_t free_bytes) {
  Log(LogLevel::kInfo, "device",
      {{"number", absl::StrCat(device.number())},
       {"what", device.Describe()},
       {"need_bytes", absl::StrCat(plan.DeviceBytes())},
       {"free_bytes", absl::StrCat(free_bytes)}});
  for (const CudaMemoryPlan::Item& item : plan.items) {
    if (item.bytes == 0) continue;
    Log(LogLevel::kInfo, item.on_device ? "device memory" : "pinned memory",
        {{"for", item.name},
         {"bytes", absl::StrCat(item.bytes)},
         {"gib", absl::StrFormat("%.2f", static_cast<double>(item.bytes) / (1 << 30))}});
  }
}

absl::StatusOr<Fit> FitDevice(std::shared_ptr<const CudaDevice> device, const BackendOptions& options,
                              std::shared_ptr<const EngramModel> model) {
  RETURN_IF_ERROR(device->Use());
  const CudaPlanOptions of = PlanOptions(options);
  ASSIGN_OR_RETURN(CudaMemoryPlan plan, PlanCudaMemory(*model, of, device->module()));
  ASSIGN_OR_RETURN(const int64_t free_bytes, device->FreeBytes());
  LogPlan(*device, plan, free_bytes);
  RETURN_IF_ERROR(CheckCudaMemory(plan, of, free_bytes));
  return Fit{std::move(device), std::move(plan), std::move(model)};
}

absl::StatusOr<Serving> ServeOnDevice(Fit fit, const BackendOptions& options, const LoadModelFn& load) {
  Serving serving;
  serving.model = std::move(fit.model);
  if (!TablesOnDevice(options)) {
    ASSIGN_OR_RETURN(serving.model, load(Residency::kRam));
  }
  ASSIGN_OR_RETURN(serving.backend, CudaBackend::Create(fit.device, serving.model, fit.plan,
                                                        {.threads = options.threads,
                                                         .max_batch_tokens = options.max_batch_tokens,
                                                         .prepare_memory_bytes = options.prepare_memory_bytes,
                                                         .tables_on_device = TablesOnDevice(options),
                                                         .failed = options.failed,
                                                         .broken = options.broken}));
  serving.tables = TablesOnDevice(options) ? TableHome::kDevice : TableHome::kHost;
  serving.isa = fit.device->architecture();
  serving.memory = fit.plan.items;
  return serving;
}

absl::StatusOr<Serving> ServeOnCpu(const BackendOptions& options, const LoadModelFn& load) {
  Serving serving;
  serving.tables = options.tables == TableHome::kMmap ? TableHome::kMmap : TableHome::kRam;
  ASSIGN_OR_RETURN(serving.model, load(serving.tables == TableHome::kMmap ? Residency::kMmap : Residency::kRam));
  const kernels::CpuTwin& twin = *kernels::FindCpuTwin(options.cpu_isa);
  ASSIGN_OR_RETURN(serving.backend, CpuBackend::Create(serving.model, *twin.kernels,
                                                       {.threads = options.threads,
                                                        .max_batch_tokens = options.max_batch_tokens,
                                                        .keep_prepared_bytes = options.prepare_memory_bytes}));
  serving.isa = twin.instructions;
  return serving;
}

// "ram" and "mmap" ask for the CPU, "device" and "host" for a GPU.
BackendKind KindOf(const BackendOptions& options) {
  if (options.kind != BackendKind::kAuto) return options.kind;
  switch (options.tables) {
    case TableHome::kRam:
    case TableHome::kMmap:
      return BackendKind::kCpu;
    case TableHome::kDevice:
    case TableHome::kHost:
      return BackendKind::kCuda;
    case TableHome::kUnsaid:
      break;
  }
  return BackendKind::kAuto;
}

void LogCpuInstead(const absl::Status& reason) {
  Log(LogLevel::kInfo, "computing on the CPU", {{"no_gpu", std::string(reason.message())}});
}

// `named` for errors that an operator who asked for a GPU sees.
absl::Status Named(const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("--backend cuda: ", status.message()));
}

}  // namespace

std::string TableHomeName(TableHome home) {
  switch (home) {
    case TableHome::kRam:
      return "ram";
    case TableHome::kMmap:
      return "mmap";
    case TableHome::kDevice:
      return "device";
    case TableHome::kHost:
      return "host";
    case TableHome::kUnsaid:
      break;
  }
  return "";
}

absl::StatusOr<Serving> MakeServing(const BackendOptions& options, const LoadModelFn& load) {
  const BackendKind kind = KindOf(options);
  if (kind == BackendKind::kCpu) return ServeOnCpu(options, load);
  absl::StatusOr<std::shared_ptr<const CudaDevice>> device = CudaDevice::Open(options.cuda_module, options.device);
  if (!device.ok() && kind == BackendKind::kAuto) {
    LogCpuInstead(device.status());
    return ServeOnCpu(options, load);
  }
  if (!device.ok()) return Named(device.status());
  ASSIGN_OR_RETURN(std::shared_ptr<const EngramModel> mapped, load(Residency::kMmap));
  absl::StatusOr<Fit> fit = FitDevice(*std::move(device), options, std::move(mapped));
  if (!fit.ok() && kind == BackendKind::kAuto) {
    LogCpuInstead(fit.status());
    return ServeOnCpu(options, load);
  }
  if (!fit.ok()) return Named(fit.status());
  return ServeOnDevice(*std::move(fit), options, load);
}

absl::Status CheckServing(const BackendOptions& options, const LoadModelFn& load) {
  const BackendKind kind = KindOf(options);
  absl::StatusOr<std::shared_ptr<const CudaDevice>> device =
      kind == BackendKind::kCpu ? nullptr : CudaDevice::Open(options.cuda_module, options.device);
  if (!device.ok() && kind == BackendKind::kCuda) return Named(device.status());
  ASSIGN_OR_RETURN(std::shared_ptr<const EngramModel> mapped, load(Residency::kMmap));
  if (!device.ok() || *device == nullptr) return absl::OkStatus();
  const absl::Status fits = FitDevice(*std::move(device), options, std::move(mapped)).status();
  return kind == BackendKind::kCuda && !fits.ok() ? Named(fits) : absl::OkStatus();
}

}  // namespace engram
