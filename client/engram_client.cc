#include "client/engram_client.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/error_details.h"
#include "client/refusal.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

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

// The server's error, or gRPC's own, which says neither whom it was asking nor how long it waited.
absl::Status ApplyError(const grpc::Status& status, const std::string& target, absl::Duration timeout) {
  absl::Status error = StatusFromGrpc(status);
  if (!ErrorReason(error).empty()) return error;
  if (absl::IsDeadlineExceeded(error)) {
    return absl::DeadlineExceededError(
        absl::StrCat("no answer from ", target, " within ", absl::FormatDuration(timeout)));
  }
  if (absl::IsUnavailable(error)) return absl::UnavailableError(absl::StrCat(target, ": ", error.message()));
  return error;
}

}  // namespace

Client::Client(std::string target, ModelInfo model, int64_t max_message_bytes,
               std::unique_ptr<v1::EngramService::Stub> stub)
    : target_(std::move(target)),
      model_(std::move(model)),
      max_message_bytes_(max_message_bytes),
      stub_(std::move(stub)) {}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  if (absl::Status status = CheckTarget(options.target); !status.ok()) return status;
  if (options.max_message_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes is ", options.max_message_bytes, ", expected at least 1"));
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
  return std::unique_ptr<Client>(
      new Client(options.target, *std::move(model), max_message_bytes, v1::EngramService::NewStub(channel)));
}

absl::Status Client::Apply(const ApplyCall& call) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + call.timeout));
  absl::StatusOr<v1::ApplyRequest> request = EncodeApply(model_, max_message_bytes_, call);
  if (!request.ok()) return request.status();

  v1::ApplyResponse response;
  if (grpc::Status status = stub_->Apply(&context, *request, &response); !status.ok()) {
    return ApplyError(status, target_, call.timeout);
  }
  if (absl::Status status = DecodeApply(model_, response, call); !status.ok()) return status;
  for (const SequenceRun& run : call.sequences) {
    if (run.history == nullptr) continue;
    // Cannot fail: EncodeApply checked the same write.
    if (absl::Status status = run.history->Write(run.start_pos, run.token_ids, run.token_mask); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace engram::client
