// The other way to have an engram: its table in the worker's own process, read by the server's own code without a
// server. What `engram-bench worker --baseline local` measures beside the wire, under the same schedule and clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/bench/worker/step_fetch.h"
#include "client/engram_client.h"
#include "client/model_info.h"

namespace engram {
class EngramModel;
}

namespace engram::bench {

struct LocalOptions {
  client::Form form = client::Form::kRowsNative;
  client::HighwayDtype dtype = client::HighwayDtype::kBf16;
  int64_t max_step_tokens = 0;
  int threads = 1;                  // that compute, of this worker
  client::Client* plain = nullptr;  // whom Verify asks; null: there will be no Verify
};

class LocalTable {
 public:
  // Loads `path` with tables in "ram" or "mmap", and tells its progress on stderr. FAILED_PRECONDITION where it is not
  // the model that `served` describes; else EngramModel's errors.
  static absl::StatusOr<LocalTable> Load(const std::string& path, const std::string& residency,
                                         const client::ModelInfo& served);

  // One worker's: a thread of its own gathers, projects and gates at the worker's word. Ranks are one process here:
  // what one has, all have. Verify compares rows or kv with the server's. May outlive this.
  absl::StatusOr<std::unique_ptr<StepFetch>> MakeFetch(const LocalOptions& options) const;

 private:
  explicit LocalTable(std::shared_ptr<const EngramModel> model) : model_(std::move(model)) {}

  std::shared_ptr<const EngramModel> model_;
};

}  // namespace engram::bench
