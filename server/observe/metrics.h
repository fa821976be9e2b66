// What the server counts, as Prometheus sees it (names: docs/operations.md). No session, token or address ever labels a
// series. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/observe/process_usage.h"

namespace prometheus {
class Registry;
}

namespace engram {

enum class Stage { kDecode, kQueue, kHash, kGather, kProject, kGate, kEncode, kH2d, kD2h };

class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // A call ended: `method` and `code` are gRPC's own names ("Apply", "OK").
  void CallEnded(absl::string_view method, absl::string_view code, absl::Duration took, int64_t request_bytes,
                 int64_t reply_bytes);
  void CallStarted();
  void Refused(absl::string_view reason);

  void StageTook(Stage stage, absl::Duration took);
  void BatchRan(int64_t tokens);
  void TokensDone(int64_t layer_id, absl::string_view form, int64_t tokens);
  void RowsGathered(int64_t rows);
  // Positions whose id takes no part in the hash: masked, or unmapped by token_map.
  void DeadTokens(int64_t tokens);

  void SetQueueTokens(int64_t tokens);
  void SetSessions(int64_t sessions, int64_t bytes, int64_t evicted_idle, int64_t evicted_memory);
  void ProbeRan(bool passed);
  void SetStaging(int64_t in_use_bytes, int64_t idle_bytes);
  void SetTickets(int64_t tickets, int64_t bytes);
  void SetRegions(int64_t regions, int64_t bytes);
  // `content_digest`: "" where it is not known.
  void SetModel(absl::string_view hash_digest, absl::string_view config_digest, absl::string_view content_digest,
                absl::string_view backend, absl::string_view isa, absl::string_view numerics_id);
  void SetProcess(const ProcessUsage& usage);
  // What is taken of a device's memory, by what for; a device's failed steps.
  void SetGpuMemory(absl::string_view kind, int64_t bytes);
  void CudaFailed();
  void SetTableBytes(int64_t layer_id, absl::string_view residency, int64_t bytes);

  // What is scraped.
  std::shared_ptr<prometheus::Registry> registry() const;

 private:
  struct Series;
  std::unique_ptr<Series> series_;
};

}  // namespace engram
