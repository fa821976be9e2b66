// One Stream RPC: requests in, one reply message per (request, layer) out, pipelined.
//
// Memory is bounded per stream: once the payloads of requests read and replies not yet sent pass a limit, nothing more
// is read until the client takes replies. A client that vanishes frees everything: its calls are not computed, its
// tickets go.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "engram/v1/engram.grpc.pb.h"
#include "server/transport/step_runner.h"

namespace engram {

class StreamCall;

// The streams of a service. Thread-safe; outlives them.
class StreamSet {
 public:
  // Deletes itself once gRPC is done with it.
  StreamCall* Open(const Core& core, grpc::CallbackServerContext& context);
  // Ends each stream as soon as its requests are answered; new ones end at once.
  void Close();
  // Requests of all streams whose last reply is not yet queued.
  int64_t in_flight() const { return in_flight_; }

 private:
  friend class StreamCall;
  void Remove(StreamCall* stream);

  absl::Mutex mutex_;
  absl::flat_hash_set<StreamCall*> streams_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::atomic<int64_t> in_flight_{0};
};

class StreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  StreamCall(const Core& core, grpc::CallbackServerContext& context, uint64_t id, StreamSet& set);

  // Ends the stream with DRAINING as soon as nothing is under way.
  void CloseWhenIdle();

 private:
  // A request from its arrival until its last reply is sent.
  struct Request {
    v1::StreamRequest message;  // without tensors
    StepReply reply;
    Permit permit;
    int64_t bytes = 0;  // held of the stream's limit
    size_t layers_left = 0;
    absl::Time started;
    const char* method = "";
  };
  struct Outgoing {
    grpc::ByteBuffer message;
    bool last = false;  // of its request
    std::shared_ptr<Request> request;
  };

  ~StreamCall() override = default;
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Handle(const std::shared_ptr<Request>& request, const ArrivedMessage& arrived);
  void HandleStep(const std::shared_ptr<Request>& request, absl::StatusOr<StepCall> step,
                  const ArrivedMessage& arrived);
  void LayerDone(const std::shared_ptr<Request>& request, size_t index);
  // A Prepare is done, or a step failed.
  void StepDone(const std::shared_ptr<Request>& request, const absl::Status& status);
  void Fail(const std::shared_ptr<Request>& request, const absl::Status& status);
  // `tensors`: the reply's fields that hold some.
  void Send(const std::shared_ptr<Request>& request, v1::StreamResponse small, ReplyWriter tensors = {});
  void EndReads(absl::Status why);
  absl::Time DeadlineOf(const v1::StreamRequest& message) const;

  void ReadOrPause() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool TakeFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Core& core_;
  grpc::CallbackServerContext& context_;
  const uint64_t id_;
  StreamSet& set_;
  const int64_t limit_bytes_;
  std::atomic<bool> cancelled_{false};

  grpc::ByteBuffer incoming_;  // gRPC's while a read is under way
  absl::Mutex mutex_;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);  // the front is gRPC's while a write is under way
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);  // of a message that is none: the stream ends with it
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status finish_status_;                    // written once, with finished_
  int64_t requests_ ABSL_GUARDED_BY(mutex_) = 0;  // whose last reply is not yet queued
  int64_t held_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Shared with the unary methods.
int32_t ReleaseTickets(const Core& core, const v1::ReleaseRequest& request);

}  // namespace engram
