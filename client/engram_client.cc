#include "client/engram_client.h"

#include <map>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/pause.h"
#include "client/raw_call.h"
#include "client/step_flight.h"
#include "engram/v1/engram.grpc.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace engram::client {
namespace {

// A message of our own, not a call's.
grpc::ByteBuffer BytesOf(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

template <typename Response>
absl::StatusOr<Response> MessageOf(grpc::ByteBuffer body, const char* method) {
  grpc::ProtoBufferReader reader(&body);
  Response response;
  if (!response.ParseFromZeroCopyStream(&reader)) {
    return absl::InternalError(absl::StrCat("the server's reply to ", method, " cannot be read"));
  }
  return response;
}

// `count`, or `failed` with the count in its message: what the servers that did not fail have done stays done.
absl::StatusOr<int64_t> CountOr(const absl::Status& failed, int64_t count, const char* what) {
  if (failed.ok()) return count;
  absl::Status status(failed.code(), absl::StrCat(failed.message(), " (", count, " ", what, " all the same)"));
  failed.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { status.SetPayload(url, payload); });
  return status;
}

}  // namespace

Client::Client(std::unique_ptr<ReplicaSet> replicas, const ClientOptions& options)
    : stripe_bytes_(options.stripe_bytes),
      carrier_{[set = replicas.get(), retry = options.retry](RawCall call, absl::AnyInvocable<void(RawReply)> done) {
                 StartRawCall(*set, retry, std::move(call), std::move(done));
               },
               [set = replicas.get()](const std::string& replica, uint64_t server_epoch) {
                 return set->KnowsEpoch(replica, server_epoch);
               },
               [set = replicas.get()](absl::Time until, absl::AnyInvocable<void(bool due)> then) {
                 StartPause(*set, until, std::move(then));
               }},
      replicas_(std::move(replicas)) {}

Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  if (options.stripe_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("stripe_bytes is ", options.stripe_bytes, ", expected at least 0"));
  }
  if (options.retry.attempts < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("retry.attempts is ", options.retry.attempts, ", expected at least 1"));
  }
  absl::StatusOr<std::unique_ptr<ReplicaSet>> replicas = ReplicaSet::Connect(options.replicas);
  if (!replicas.ok()) return replicas.status();
  return std::unique_ptr<Client>(new Client(*std::move(replicas), options));
}

absl::StatusOr<std::shared_ptr<StepFlight>> Client::Board(absl::StatusOr<CheckedCall> checked) {
  if (!checked.ok()) return checked.status();
  for (CheckedSequence& sequence : checked->sequences) {
    if (!sequence.by_session() || !sequence.home.empty() || checked->region != nullptr) continue;
    // A session that begins at 0 may begin anywhere; a fork only where its parent is.
    if (!sequence.fork_from.empty()) {
      sequence.home = homes_.Find(sequence.fork_from);
    } else if (sequence.start_pos > 0) {
      sequence.home = homes_.Find(sequence.session);
    }
  }
  const PlanLimits limits{.max_message_bytes = replicas_->max_message_bytes(),
                          .max_call_tokens = replicas_->max_call_tokens(),
                          .stripe_bytes = stripe_bytes_};
  absl::StatusOr<CallPlan> plan = PlanCall(model(), limits, *checked);
  if (!plan.ok()) return plan.status();
  return std::make_shared<StepFlight>(model(), carrier_, &homes_, *std::move(checked), *std::move(plan));
}

absl::StatusOr<std::shared_ptr<StepFlight>> Client::Fly(absl::StatusOr<CheckedCall> checked, CallReport* report) {
  if (report != nullptr) *report = {};
  absl::StatusOr<std::shared_ptr<StepFlight>> flight = Board(std::move(checked));
  if (!flight.ok()) return flight.status();
  // Shared: the last answer may still be in Notify() when this thread goes on.
  auto over = std::make_shared<absl::Notification>();
  (*flight)->Start([over] { over->Notify(); });
  over->WaitForNotification();
  // On this thread: gRPC's are not kept from their work by the copies.
  if (absl::Status status = (*flight)->Finish(report); !status.ok()) return status;
  return flight;
}

void Client::FlyAsync(absl::StatusOr<CheckedCall> checked,
                      absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<StepFlight>>, CallReport)> done) {
  absl::StatusOr<std::shared_ptr<StepFlight>> flight = Board(std::move(checked));
  if (!flight.ok()) return done(flight.status(), CallReport());
  std::shared_ptr<StepFlight> started = *flight;
  started->Start([flight = *std::move(flight), done = std::move(done)]() mutable {
    CallReport report;
    absl::Status status = flight->Finish(&report);
    if (!status.ok()) return done(std::move(status), std::move(report));
    done(std::move(flight), std::move(report));
  });
}

absl::Status Client::Apply(const ApplyCall& call, CallReport* report) {
  return Fly(CheckApply(model(), call), report).status();
}

absl::StatusOr<Prepared> Client::Prepare(const PrepareCall& call, CallReport* report) {
  absl::StatusOr<std::shared_ptr<StepFlight>> flight = Fly(CheckPrepare(model(), call), report);
  if (!flight.ok()) return flight.status();
  return (*flight)->TakePrepared();
}

absl::Status Client::Lookup(const LookupCall& call, CallReport* report) {
  return Fly(CheckLookup(model(), call), report).status();
}

void Client::ApplyAsync(const ApplyCall& call, absl::AnyInvocable<void(absl::Status, CallReport)> done) {
  FlyAsync(CheckApply(model(), call), [done = std::move(done)](const auto& flight, CallReport report) mutable {
    done(flight.status(), std::move(report));
  });
}

void Client::PrepareAsync(const PrepareCall& call,
                          absl::AnyInvocable<void(absl::StatusOr<engram::client::Prepared>, CallReport)> done) {
  FlyAsync(CheckPrepare(model(), call), [done = std::move(done)](const auto& flight, CallReport report) mutable {
    if (!flight.ok()) return done(flight.status(), std::move(report));
    done((*flight)->TakePrepared(), std::move(report));
  });
}

void Client::LookupAsync(const LookupCall& call, absl::AnyInvocable<void(absl::Status, CallReport)> done) {
  FlyAsync(CheckLookup(model(), call), [done = std::move(done)](const auto& flight, CallReport report) mutable {
    done(flight.status(), std::move(report));
  });
}

std::future<absl::Status> Client::ApplyFuture(const ApplyCall& call) {
  std::promise<absl::Status> promise;
  std::future<absl::Status> future = promise.get_future();
  ApplyAsync(call, [promise = std::move(promise)](absl::Status status, const CallReport&) mutable {
    promise.set_value(std::move(status));
  });
  return future;
}

std::future<absl::StatusOr<Prepared>> Client::PrepareFuture(const PrepareCall& call) {
  std::promise<absl::StatusOr<Prepared>> promise;
  std::future<absl::StatusOr<Prepared>> future = promise.get_future();
  PrepareAsync(call, [promise = std::move(promise)](absl::StatusOr<Prepared> prepared, const CallReport&) mutable {
    promise.set_value(std::move(prepared));
  });
  return future;
}

std::future<absl::Status> Client::LookupFuture(const LookupCall& call) {
  std::promise<absl::Status> promise;
  std::future<absl::Status> future = promise.get_future();
  LookupAsync(call, [promise = std::move(promise)](absl::Status status, const CallReport&) mutable {
    promise.set_value(std::move(status));
  });
  return future;
}

template <typename Response, typename Request>
std::vector<absl::StatusOr<Response>> Client::CallEach(const char* method,
                                                       const std::map<std::string, Request>& requests,
                                                       absl::Duration timeout, std::string* answered) {
  struct Answers {
    explicit Answers(size_t count) : replies(count), missing(static_cast<int>(count)) {}
    std::vector<RawReply> replies;
    absl::BlockingCounter missing;
  };
  // Shared: the last answer may still be in DecrementCount() when this thread goes on.
  auto answers = std::make_shared<Answers>(requests.size());
  const absl::Time deadline = absl::Now() + timeout;
  size_t sent = 0;
  for (const auto& [replica, request] : requests) {
    RawCall raw;
    raw.method = method;
    raw.request = BytesOf(request);
    raw.deadline = deadline;
    raw.replica = replica;
    carrier_.send(std::move(raw), [answers, index = sent++](RawReply reply) {
      answers->replies[index] = std::move(reply);
      answers->missing.DecrementCount();
    });
  }
  answers->missing.Wait();
  std::vector<absl::StatusOr<Response>> responses;
  for (RawReply& reply : answers->replies) {
    if (answered != nullptr) *answered = reply.replica;
    if (reply.status.ok()) {
      responses.push_back(MessageOf<Response>(std::move(reply.body), method));
    } else {
      responses.emplace_back(std::move(reply.status));
    }
  }
  return responses;
}

absl::StatusOr<int64_t> Client::Release(const engram::client::Prepared& prepared, absl::Duration timeout) {
  std::map<std::string, v1::ReleaseRequest> requests;
  if (prepared.state() != nullptr) {
    for (const PreparedPart& part : prepared.state()->parts) requests[part.replica].add_tickets(part.ticket);
  }
  absl::Status failed;
  int64_t released = 0;
  for (const auto& response : CallEach<v1::ReleaseResponse>("/engram.v1.EngramService/Release", requests, timeout)) {
    failed.Update(response.status());
    if (response.ok()) released += response->released();
  }
  return CountOr(failed, released, "tickets were given back");
}

absl::StatusOr<std::unique_ptr<SharedRegion>> Client::OpenRegion(const RegionOptions& options) {
  std::map<std::string, v1::OpenRegionRequest> requests;
  requests[options.replica].set_bytes(options.bytes);
  requests[options.replica].set_on_device(options.on_device);
  std::string replica;
  const auto responses =
      CallEach<v1::OpenRegionResponse>("/engram.v1.EngramService/OpenRegion", requests, options.timeout, &replica);
  const absl::StatusOr<v1::OpenRegionResponse>& response = responses.front();
  if (!response.ok()) return response.status();
  // Calls with the region will ask for this server by name; one not asked for its model yet gets none.
  if (!carrier_.knows_epoch(replica, response->server_epoch())) {
    return absl::UnavailableError(absl::StrCat(replica, " has restarted: its numerics_id is not known; try again"));
  }
  RegionClaim claim;
  claim.token = response->token();
  claim.id = response->region();
  claim.socket = options.socket.empty() ? response->socket() : options.socket;
  claim.bytes = response->bytes();
  claim.replica = replica;
  claim.on_device = options.on_device;
  claim.device_uuid = response->device_uuid();
  return SharedRegion::Fetch(claim, options.timeout);
}

absl::StatusOr<int64_t> Client::CloseSessions(absl::Span<const std::string> sessions, absl::Duration timeout) {
  std::map<std::string, v1::CloseSessionsRequest> requests;
  for (const std::string& session : sessions) requests[homes_.Find(session)].add_sessions(session);
  absl::Status failed;
  int64_t closed = 0;
  const auto responses =
      CallEach<v1::CloseSessionsResponse>("/engram.v1.EngramService/CloseSessions", requests, timeout);
  auto response = responses.begin();
  for (const auto& [replica, request] : requests) {
    failed.Update(response->status());
    if (response->ok()) {
      closed += (*response)->closed();
      for (const std::string& session : request.sessions()) homes_.Forget(session);
    }
    ++response;
  }
  return CountOr(failed, closed, "sessions were closed");
}

}  // namespace engram::client
