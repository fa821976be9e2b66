// The connections of the load, the threads at which its calls end, and one call over them as raw bytes.
//
// The same code carries the measured calls and those of the echo baseline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/model_info.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"

namespace engram::bench {

// A call under way; reused for the next one when it has ended. Owned by the caller, who keeps it until then.
struct RawCall {
  grpc::ByteBuffer reply;
  grpc::Status status;
  int64_t started = 0;  // NowNanos() when it was handed to gRPC
  // Called once per call on the thread that `lane` has; it may start the next one.
  std::function<void()> done;

 private:
  friend class Connections;
  std::optional<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader_;
};

// Of the steady clock.
int64_t NowNanos();

class Connections {
 public:
  // `channels` connections to each target, each its own; nothing is sent yet. Messages of up to `message_bytes` (and an
  // envelope) pass.
  Connections(const std::vector<std::string>& targets, int channels, int threads, int64_t message_bytes);
  // No call is under way.
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Calls of a lane go over one connection, and end on one thread: thread_of(lane). Lanes take connections and threads
  // in turn. Never blocks. Any thread, but one call per RawCall at a time.
  void Start(RawCall* call, size_t lane, const char* method, const grpc::ByteBuffer& message, absl::Duration timeout);

  // Runs `then` on the lane's thread after a pause.
  void After(absl::Duration pause, size_t lane, std::function<void()> then);

  int threads() const { return static_cast<int>(threads_.size()); }
  int thread_of(size_t lane) const { return static_cast<int>(lane % queues_.size()); }

 private:
  std::vector<std::unique_ptr<grpc::CompletionQueue>> queues_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  std::vector<std::thread> threads_;
};

// Waits for every target, at most `timeout` in all, and asks what it serves. All must serve one model: an error names
// the targets that do not, or the one that did not answer and why.
absl::StatusOr<client::ModelInfo> AskModel(const std::vector<std::string>& targets, absl::Duration timeout);

}  // namespace engram::bench
