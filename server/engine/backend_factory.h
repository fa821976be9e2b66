// Which backend serves: the one place that knows them all.
//
// A GPU is looked for before the model is loaded, since where tables go depends on it, and its memory is planned before
// any of it is taken.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/backend.h"
#include "server/engine/cuda_memory_plan.h"
#include "server/engine/cuda_module.h"
#include "server/model/engram_model.h"

namespace engram {

enum class BackendKind { kAuto, kCpu, kCuda };

// Where tables stand, as --residency names it. kUnsaid: as the backend likes it best.
enum class TableHome { kUnsaid, kRam, kMmap, kDevice, kHost };

// "ram", "mmap", "device", "host".
std::string TableHomeName(TableHome home);

struct BackendOptions {
  BackendKind kind = BackendKind::kAuto;
  TableHome tables = TableHome::kUnsaid;  // one of the backend's own
  std::string cpu_isa = "best";
  int device = 0;
  std::string cuda_module;  // a path; "": beside the executable, or where the loader looks
  int threads = 1;
  int64_t max_batch_tokens = 1024;
  int64_t prepare_memory_bytes = int64_t{1} << 30;
  // As in CudaBackendOptions.
  std::function<void(const absl::Status&)> failed = [](const absl::Status&) {};
  std::function<void(const absl::Status&)> broken = [](const absl::Status&) {};
};

// Loads the model that is served, tables as told. Perhaps called twice.
using LoadModelFn = std::function<absl::StatusOr<std::shared_ptr<const EngramModel>>(Residency residency)>;

struct Serving {
  std::shared_ptr<const EngramModel> model;
  std::unique_ptr<Backend> backend;
  TableHome tables = TableHome::kRam;
  std::string isa;                           // "avx512", "sm_90"
  std::vector<CudaMemoryPlan::Item> memory;  // of a device; none for the CPU
};

// The backend with its model. kAuto goes on with the CPU where a GPU cannot serve, and logs why in one line; what else
// fails is one line for a person.
absl::StatusOr<Serving> MakeServing(const BackendOptions& options, const LoadModelFn& load);

// As far as that can be known without reading tables or taking memory.
absl::Status CheckServing(const BackendOptions& options, const LoadModelFn& load);

}  // namespace engram
