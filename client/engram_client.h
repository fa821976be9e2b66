// The client of engram servers: one model, any number of replicas, any number of threads.
//
//   auto client = Client::Connect({.replicas = {.targets = {"engram:8001"}}});
//   if (!client.ok()) return client.status();
//   SequenceHistory history((*client)->model().max_ngram);
//   ApplyCall call;
//   call.sequences = {{.history = &history, .start_pos = 0, .token_ids = ids}};
//   // absl::Span<char> bytes: T * hc * dim * 4 of f32, updated in place
//   call.layers = {{.layer_id = 1, .highway = bytes, .out = bytes}};
//   absl::Status status = (*client)->Apply(call);
//
// A failed call changes nothing here: no output is written, no history moves; make it again. The server may have
// committed it all the same, and answers the repetition with the same bits. A call too large for a message is cut
// (call_plan.h) and still is one call to the caller.
// Errors keep the server's code and message; error_details.h reads the reason and the offenders, also of what is
// refused here before it is sent. A call that nobody answered is DEADLINE_EXCEEDED or UNAVAILABLE and names the target.
#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/call_plan.h"
#include "client/checked_call.h"
#include "client/model_info.h"
#include "client/replica_set.h"
#include "client/retry.h"
#include "client/sender.h"
#include "client/session_homes.h"
#include "client/shared_region.h"
#include "client/step_calls.h"

namespace engram::client {

class StepFlight;

struct ClientOptions {
  // Which servers, how to reach them, whose model is right.
  ReplicaOptions replicas = {};

  // What a call does about a server that fails.
  RetryOptions retry = {};

  // Calls with a larger reply are cut to about this size, so that several connections share the work (call_plan.h): one
  // connection moves about 1 GB/s. 0: only where they must be.
  int64_t stripe_bytes = int64_t{8} << 20;
};

// Thread-safe; a SequenceHistory is not, and belongs to one call at a time.
class Client {
 public:
  // Waits for the first server and its model (ReplicaSet::Connect has the errors).
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Ends what is in flight with CANCELLED and waits for it; not in a call's `done`.
  ~Client();

  // What the first server said; the model is the same at all of them.
  const ModelInfo& model() const { return replicas_->model(); }

  // Of the tensors of one request or reply: the smallest of the servers' limits and ClientOptions'.
  int64_t max_message_bytes() const { return replicas_->max_message_bytes(); }

  // The servers as they are now, for people.
  std::vector<ReplicaStatus> Replicas() const { return replicas_->Replicas(); }

  // One engine step, blocking until the reply or the deadline. Sizes are checked before anything is sent and before
  // anything is copied back. `report` may be null.
  absl::Status Apply(const ApplyCall& call, CallReport* report = nullptr);
  absl::StatusOr<Prepared> Prepare(const PrepareCall& call, CallReport* report = nullptr);
  absl::Status Lookup(const LookupCall& call, CallReport* report = nullptr);

  // The same without blocking. `done` is called once, on a thread of the client's that must not be blocked, or on this
  // one where the call is refused here. What the call borrows is borrowed until then, and so is the client.
  void ApplyAsync(const ApplyCall& call, absl::AnyInvocable<void(absl::Status, CallReport)> done);
  void PrepareAsync(const PrepareCall& call, absl::AnyInvocable<void(absl::StatusOr<Prepared>, CallReport)> done);
  void LookupAsync(const LookupCall& call, absl::AnyInvocable<void(absl::Status, CallReport)> done);
  std::future<absl::Status> ApplyFuture(const ApplyCall& call);
  std::future<absl::StatusOr<Prepared>> PrepareFuture(const PrepareCall& call);
  std::future<absl::Status> LookupFuture(const LookupCall& call);

  // Gives tickets back before their time; how many were still good. Every server that holds some is asked, all at once;
  // where one fails, the first error, which says how many were given back all the same.
  absl::StatusOr<int64_t> Release(const Prepared& prepared, absl::Duration timeout = absl::Seconds(30));

  // Forgets sessions, here and where they are; how many were known there. Errors as Release's: the sessions of a server
  // that failed stay known here, so that the same call asks it again.
  absl::StatusOr<int64_t> CloseSessions(absl::Span<const std::string> sessions,
                                        absl::Duration timeout = absl::Seconds(30));

  // Memory shared with one server on this host, blocking (docs/shared-memory.md). REGIONS_OFF where the server shares
  // none; REGION_FULL or RESOURCE_EXHAUSTED where it has none left; UNAVAILABLE where the memory cannot be fetched,
  // which names the socket's path: mostly another host, or a path that is another one here.
  absl::StatusOr<std::unique_ptr<SharedRegion>> OpenRegion(const RegionOptions& options);

 private:
  Client(std::unique_ptr<ReplicaSet> replicas, const ClientOptions& options);

  // One RPC per replica, together; the answers in the map's order. `answered`: the replica of the last of them.
  template <typename Response, typename Request>
  std::vector<absl::StatusOr<Response>> CallEach(const char* method, const std::map<std::string, Request>& requests,
                                                 absl::Duration timeout, std::string* answered = nullptr);
  absl::StatusOr<std::shared_ptr<StepFlight>> Board(absl::StatusOr<CheckedCall> checked);
  absl::StatusOr<std::shared_ptr<StepFlight>> Fly(absl::StatusOr<CheckedCall> checked, CallReport* report);
  void FlyAsync(absl::StatusOr<CheckedCall> checked,
                absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<StepFlight>>, CallReport)> done);

  const int64_t stripe_bytes_;
  const Carrier carrier_;
  SessionHomes homes_;
  const std::unique_ptr<ReplicaSet> replicas_;  // last: its end waits for calls, which use the rest
};

}  // namespace engram::client
