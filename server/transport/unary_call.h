// What every unary RPC has in common, said once: its clock, its metrics, its log line, its status on the wire.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/admission/budget.h"
#include "server/observe/metrics.h"

namespace engram {

// What all calls of a service share.
struct CallState {
  std::atomic<bool> draining{false};  // replies say so in a trailer
  std::atomic<int64_t> in_flight{0};  // calls gRPC is not yet done with
};

// Deletes itself once gRPC is done with it. End() is called exactly once, by any thread.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // `method`: as metrics name it. `metrics` and `state` outlive every call.
  UnaryCall(const char* method, grpc::CallbackServerContext& context, int64_t request_bytes, Metrics& metrics,
            CallState& state);

  absl::Time started() const { return started_; }
  absl::Time deadline() const { return deadline_; }
  // True once the client no longer waits. Any thread, until End().
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

  // The call's share of the budget: its tokens are given back at End(), its bytes when the reply is sent or given up.
  void Hold(Permit permit) { permit_ = std::move(permit); }

  // Sends the reply as it stands (if OK) or the status.
  void End(const absl::Status& status, int64_t reply_bytes = 0);

 private:
  ~UnaryCall() override;
  void OnCancel() override { cancelled_.store(true, std::memory_order_relaxed); }
  void OnDone() override { delete this; }

  const char* const method_;
  grpc::CallbackServerContext& context_;
  const int64_t request_bytes_;
  Metrics& metrics_;
  CallState& state_;
  const absl::Time started_;
  const absl::Time deadline_;
  std::atomic<bool> cancelled_{false};
  Permit permit_;
};

}  // namespace engram
