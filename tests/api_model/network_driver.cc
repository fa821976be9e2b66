#include "tests/api_model/network_driver.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>

#include "google/rpc/error_details.pb.h"

namespace engram {
namespace {

std::string ReasonOf(const google::rpc::Status& status) {
  google::rpc::ErrorInfo info;
  for (const google::protobuf::Any& any : status.details()) any.UnpackTo(&info);
  return info.reason().empty() ? "no reason: " + status.ShortDebugString() : info.reason();
}

template <typename Sequences>
void TakeStatuses(const Sequences& sequences, Reply& reply) {
  for (const v1::SequenceStatus& status : sequences) {
    reply.statuses.push_back(status.has_refused() ? ReasonOf(status.refused()) : "");
  }
}

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

template <typename Request, typename Response>
bool Ask(v1::EngramService::Stub& stub,
         grpc::Status (v1::EngramService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
         const Request& request, Response& response, Reply& reply) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  SetDeadline(context);
  const grpc::Status status = (stub.*method)(&context, request, &response);
  if (status.ok()) return true;
  reply.reason = e2e::ReasonOf(status);
  if (reply.reason.empty()) reply.reason = "no reason: " + status.error_message();
  return false;
}

}  // namespace

NetworkDriver::~NetworkDriver() {
  for (const auto& [id, stream] : streams_) {
    stream->context.TryCancel();
    stream->calls->Finish();
  }
}

NetworkDriver::OpenStream& NetworkDriver::StreamOf(uint64_t stream) {
  std::unique_ptr<OpenStream>& open = streams_[stream];
  if (open == nullptr) {
    open = std::make_unique<OpenStream>();
    SetDeadline(open->context);
    open->context.set_wait_for_ready(true);
    open->calls = rpc_.stub().Stream(&open->context);
  }
  return *open;
}

Reply NetworkDriver::Unary(const v1::StreamRequest& request) {
  using Stub = v1::EngramService::Stub;
  Reply reply;
  const auto take = [&reply](const auto& response) {
    reply.layers.assign(response.layers().begin(), response.layers().end());
  };
  if (request.has_apply()) {
    v1::ApplyResponse response;
    if (!Ask(rpc_.stub(), &Stub::Apply, request.apply(), response, reply)) return reply;
    take(response);
    TakeStatuses(response.sequences(), reply);
  } else if (request.has_lookup()) {
    v1::LookupResponse response;
    if (!Ask(rpc_.stub(), &Stub::Lookup, request.lookup(), response, reply)) return reply;
    take(response);
    TakeStatuses(response.sequences(), reply);
  } else if (request.has_prepare()) {
    v1::PrepareResponse response;
    if (!Ask(rpc_.stub(), &Stub::Prepare, request.prepare(), response, reply)) return reply;
    take(response);
    reply.ticket = response.ticket();
  } else if (request.has_release()) {
    v1::ReleaseResponse response;
    if (Ask(rpc_.stub(), &Stub::Release, request.release(), response, reply)) reply.released = response.released();
  } else {
    v1::CloseSessionsResponse response;
    if (Ask(rpc_.stub(), &Stub::CloseSessions, request.close_sessions(), response, reply)) {
      reply.closed = response.closed();
    }
  }
  return reply;
}

std::vector<Reply> NetworkDriver::Run(const std::vector<Planned>& calls) {
  if (calls.front().stream == 0) {
    std::vector<Reply> replies;
    for (const Planned& call : calls) replies.push_back(Unary(call.request));
    return replies;
  }
  OpenStream& stream = StreamOf(calls.front().stream);
  const uint64_t first = next_id_;
  for (const Planned& call : calls) {
    v1::StreamRequest request = call.request;
    request.set_request_id(next_id_++);
    if (!stream.calls->Write(request)) ADD_FAILURE() << "the stream takes no more";
  }
  std::vector<Reply> replies(calls.size());
  v1::StreamResponse message;
  for (size_t open = calls.size(); open > 0;) {
    if (!stream.calls->Read(&message)) {
      ADD_FAILURE() << "the stream ended with " << open << " requests unanswered";
      return {};
    }
    const uint64_t index = message.request_id() - first;
    if (index >= replies.size()) {
      ADD_FAILURE() << "an answer to request " << message.request_id() << ", which is not open";
      return {};
    }
    Reply& reply = replies[index];
    switch (message.reply_case()) {
      case v1::StreamResponse::kLayer:
        if (!reply.layers.empty()) {
          EXPECT_LT(reply.layers.back().layer_id(), message.layer().layer_id());
        }
        reply.layers.push_back(message.layer());
        break;
      case v1::StreamResponse::kPrepare:
        reply.layers.assign(message.prepare().layers().begin(), message.prepare().layers().end());
        reply.ticket = message.prepare().ticket();
        break;
      case v1::StreamResponse::kRelease:
        reply.released = message.release().released();
        break;
      case v1::StreamResponse::kCloseSessions:
        reply.closed = message.close_sessions().closed();
        break;
      case v1::StreamResponse::kError:
        reply.reason = ReasonOf(message.error());
        break;
      case v1::StreamResponse::REPLY_NOT_SET:
        ADD_FAILURE() << "an empty reply";
    }
    TakeStatuses(message.sequences(), reply);
    open -= message.last() ? 1 : 0;
  }
  return replies;
}

void NetworkDriver::EndStream(uint64_t stream, const std::string& ticket) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  found->second->calls->WritesDone();
  v1::StreamResponse message;
  if (found->second->calls->Read(&message)) ADD_FAILURE() << "an answer to nothing: " << message.request_id();
  const grpc::Status status = found->second->calls->Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  streams_.erase(found);
  // The server ends a stream's tickets when gRPC is done with it, a moment after the client is.
  if (ticket.empty()) return;
  v1::StreamRequest probe;
  probe.mutable_lookup()->set_ticket(ticket);
  probe.mutable_lookup()->add_layer_ids(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (Unary(probe).reason != ReasonName(Reason::kTicketExpired)) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "a ticket outlives its stream";
  }
}

}  // namespace engram
