#include "client/engram_client.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/error_details.h"
#include "client/one_connection.h"
#include "client/refusal.h"
#include "client/step_flight.h"
#include "engram/v1/engram.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace engram::client {
namespace {

// A server allows one ping in 5 minutes without data and closes the connection over more (too_many_pings). 6 minutes
// stays under it with any server's defaults, and pings go out only while a call is in flight.
constexpr int kKeepaliveTimeMs = 6 * 60 * 1000;
constexpr int kKeepaliveTimeoutMs = 20 * 1000;

// gRPC waits 1 s before its second attempt and up to 2 min between later ones. A server that restarts is back sooner.
constexpr int kFirstReconnectMs = 100;
constexpr int kMaxReconnectMs = 5000;

// An error lists up to 64 offenders of about 200 bytes, then base64 adds a third: 17 KiB, above gRPC's default of 8.
constexpr int kMaxMetadataBytes = 64 << 10;

absl::Status CheckTarget(const std::string& target) {
  bool good = false;
  if (absl::StartsWith(target, "unix:")) {
    good = target.size() > 5;
  } else {
    const size_t colon = target.rfind(':');
    int port = 0;
    good = colon != std::string::npos && colon > 0 && absl::SimpleAtoi(target.substr(colon + 1), &port) && port > 0 &&
           port <= 65535;
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("target is \"", target, "\", expected host:port or unix:/path"));
}

// 32 raw bytes of what was given; empty stays empty.
absl::StatusOr<std::string> RawDigest(const std::string& digest) {
  if (digest.empty() || digest.size() == 32) return digest;
  const bool hex = digest.size() == 64 && std::all_of(digest.begin(), digest.end(), absl::ascii_isxdigit);
  if (hex) return absl::HexStringToBytes(digest);
  return absl::InvalidArgumentError(
      absl::StrCat("hash_digest has ", digest.size(), " characters, expected 64 hex digits or 32 raw bytes"));
}

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& target, int64_t message_bytes) {
  grpc::ChannelArguments arguments;
  const int limit = static_cast<int>(message_bytes + kMaxEnvelopeBytes);  // < 2^31: ModelInfo's bound
  arguments.SetMaxReceiveMessageSize(limit);
  arguments.SetMaxSendMessageSize(limit);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

// GetModel until `deadline`. Waits for a server that is still starting; when there is none in time, says why.
absl::StatusOr<ModelInfo> FetchModel(const std::string& target, absl::Time deadline, absl::Duration timeout) {
  // GetModel's reply is small: nothing larger is believed before the model's own limits are known.
  const std::shared_ptr<grpc::Channel> channel = OpenChannel(target, 0);
  const std::unique_ptr<v1::EngramService::Stub> stub = v1::EngramService::NewStub(channel);
  v1::GetModelResponse response;
  const auto ask = [&](bool wait_for_ready, absl::Time until) {
    grpc::ClientContext context;
    context.set_wait_for_ready(wait_for_ready);
    context.set_deadline(absl::ToChronoTime(until));
    return stub->GetModel(&context, v1::GetModelRequest(), &response);
  };
  grpc::Status status = ask(true, deadline);
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    if (channel->GetState(false) == GRPC_CHANNEL_READY) {
      return absl::DeadlineExceededError(
          absl::StrCat(target, ": connected, but GetModel was not answered within ", absl::FormatDuration(timeout)));
    }
    // A call that does not wait fails with the reason of the last attempt to connect ("Connection refused").
    const grpc::Status reason = ask(false, absl::Now() + absl::Milliseconds(200));
    if (!reason.ok()) {
      return absl::UnavailableError(
          absl::StrCat(target, ": not reached within ", absl::FormatDuration(timeout), ": ", reason.error_message()));
    }
    status = reason;
  }
  if (!status.ok()) {
    const absl::Status error = StatusFromGrpc(status);
    return absl::Status(error.code(), absl::StrCat(target, ": GetModel: ", error.message()));
  }
  absl::StatusOr<ModelInfo> model = DecodeModelInfo(response);
  if (!model.ok()) return absl::Status(model.status().code(), absl::StrCat(target, ": ", model.status().message()));
  return model;
}

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

}  // namespace

Client::Client(ModelInfo model, const PlanLimits& limits, std::unique_ptr<OneConnection> connection)
    : model_(std::move(model)),
      limits_(limits),
      sender_([connection = connection.get()](RawCall raw, absl::AnyInvocable<void(RawReply)> done) {
        connection->Send(std::move(raw), std::move(done));
      }),
      connection_(std::move(connection)) {}

Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  if (absl::Status status = CheckTarget(options.target); !status.ok()) return status;
  if (options.max_message_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes is ", options.max_message_bytes, ", expected at least 1"));
  }
  if (options.stripe_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("stripe_bytes is ", options.stripe_bytes, ", expected at least 0"));
  }
  absl::StatusOr<std::string> hash_digest = RawDigest(options.hash_digest);
  if (!hash_digest.ok()) return hash_digest.status();

  const absl::Time deadline = absl::Now() + options.connect_timeout;
  absl::StatusOr<ModelInfo> model = FetchModel(options.target, deadline, options.connect_timeout);
  if (!model.ok()) return model.status();
  if (!hash_digest->empty() && *hash_digest != model->hash_digest) {
    const std::string served = absl::BytesToHexString(model->hash_digest);
    const std::string expected = absl::BytesToHexString(*hash_digest);
    return Refuse(Reason::kDigestMismatch, "hash_digest", served, expected,
                  absl::StrCat(options.target, " has hash_digest ", served, ", expected ", expected,
                               ": it serves another model, or the token map differs"));
  }
  // The limits of a channel are fixed when it is made, so the one that asked for them cannot be kept.
  const int64_t max_message_bytes = std::min(model->limits.max_message_bytes, options.max_message_bytes);
  const std::shared_ptr<grpc::Channel> channel = OpenChannel(options.target, max_message_bytes);
  if (!channel->WaitForConnected(absl::ToChronoTime(deadline))) {
    return absl::UnavailableError(absl::StrCat(options.target, ": answered GetModel, but a second connection was not ",
                                               "made within ", absl::FormatDuration(options.connect_timeout)));
  }
  const PlanLimits limits{max_message_bytes, options.stripe_bytes};
  return std::unique_ptr<Client>(
      new Client(*std::move(model), limits, std::make_unique<OneConnection>(channel, options.target)));
}

absl::StatusOr<std::shared_ptr<StepFlight>> Client::Board(absl::StatusOr<CheckedCall> checked) {
  if (!checked.ok()) return checked.status();
  for (CheckedSequence& sequence : checked->sequences) {
    if (!sequence.by_session() || !sequence.home.empty()) continue;
    // A session that begins at 0 may begin anywhere; a fork only where its parent is.
    if (!sequence.fork_from.empty()) {
      sequence.home = homes_.Find(sequence.fork_from);
    } else if (sequence.start_pos > 0) {
      sequence.home = homes_.Find(sequence.session);
    }
  }
  absl::StatusOr<CallPlan> plan = PlanCall(model_, limits_, *checked);
  if (!plan.ok()) return plan.status();
  return std::make_shared<StepFlight>(model_, sender_, &homes_, *std::move(checked), *std::move(plan));
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
  return Fly(CheckApply(model_, call), report).status();
}

absl::StatusOr<Prepared> Client::Prepare(const PrepareCall& call, CallReport* report) {
  absl::StatusOr<std::shared_ptr<StepFlight>> flight = Fly(CheckPrepare(model_, call), report);
  if (!flight.ok()) return flight.status();
  return (*flight)->TakePrepared();
}

absl::Status Client::Lookup(const LookupCall& call, CallReport* report) {
  return Fly(CheckLookup(model_, call), report).status();
}

void Client::ApplyAsync(const ApplyCall& call, absl::AnyInvocable<void(absl::Status, CallReport)> done) {
  FlyAsync(CheckApply(model_, call), [done = std::move(done)](const auto& flight, CallReport report) mutable {
    done(flight.status(), std::move(report));
  });
}

void Client::PrepareAsync(const PrepareCall& call,
                          absl::AnyInvocable<void(absl::StatusOr<engram::client::Prepared>, CallReport)> done) {
  FlyAsync(CheckPrepare(model_, call), [done = std::move(done)](const auto& flight, CallReport report) mutable {
    if (!flight.ok()) return done(flight.status(), std::move(report));
    done((*flight)->TakePrepared(), std::move(report));
  });
}

void Client::LookupAsync(const LookupCall& call, absl::AnyInvocable<void(absl::Status, CallReport)> done) {
  FlyAsync(CheckLookup(model_, call), [done = std::move(done)](const auto& flight, CallReport report) mutable {
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

template <typename Request, typename Response>
absl::StatusOr<Response> Client::Call(const char* method, const Request& request, const std::string& replica,
                                      absl::Duration timeout) {
  RawCall raw;
  raw.method = method;
  raw.request = BytesOf(request);
  raw.deadline = absl::Now() + timeout;
  raw.replica = replica;
  struct Answer {
    absl::Notification there;
    RawReply reply;
  };
  auto answer = std::make_shared<Answer>();
  sender_(std::move(raw), [answer](RawReply reply) {
    answer->reply = std::move(reply);
    answer->there.Notify();
  });
  answer->there.WaitForNotification();
  if (!answer->reply.status.ok()) return answer->reply.status;
  return MessageOf<Response>(std::move(answer->reply.body), method);
}

absl::StatusOr<int64_t> Client::Release(const engram::client::Prepared& prepared, absl::Duration timeout) {
  std::map<std::string, v1::ReleaseRequest> requests;
  if (prepared.state() != nullptr) {
    for (const PreparedPart& part : prepared.state()->parts) requests[part.replica].add_tickets(part.ticket);
  }
  int64_t released = 0;
  for (const auto& [replica, request] : requests) {
    absl::StatusOr<v1::ReleaseResponse> response =
        Call<v1::ReleaseRequest, v1::ReleaseResponse>("/engram.v1.EngramService/Release", request, replica, timeout);
    if (!response.ok()) return response.status();
    released += response->released();
  }
  return released;
}

absl::StatusOr<int64_t> Client::CloseSessions(absl::Span<const std::string> sessions, absl::Duration timeout) {
  std::map<std::string, v1::CloseSessionsRequest> requests;
  for (const std::string& session : sessions) {
    requests[homes_.Find(session)].add_sessions(session);
    homes_.Forget(session);
  }
  int64_t closed = 0;
  for (const auto& [replica, request] : requests) {
    absl::StatusOr<v1::CloseSessionsResponse> response = Call<v1::CloseSessionsRequest, v1::CloseSessionsResponse>(
        "/engram.v1.EngramService/CloseSessions", request, replica, timeout);
    if (!response.ok()) return response.status();
    closed += response->closed();
  }
  return closed;
}

}  // namespace engram::client
