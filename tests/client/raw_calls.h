// Raw calls as a test makes them: Apply of one token, answered or not before the test goes on.
#pragma once

#include <functional>
#include <string>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/raw_call.h"
#include "client/replica_set.h"
#include "engram/v1/engram.pb.h"
#include "grpcpp/support/slice.h"

namespace engram::client {

inline RawCall ApplyOneToken(absl::Duration timeout = absl::Seconds(20)) {
  v1::ApplyRequest request;
  request.add_sequences()->add_token_ids(5);
  v1::LayerInput* layer = request.add_layers();
  layer->set_layer_id(1);
  layer->set_highway(std::string(32, 'i'));
  const grpc::Slice slice(request.SerializeAsString());
  RawCall call;
  call.method = "/engram.v1.EngramService/Apply";
  call.request = grpc::ByteBuffer(&slice, 1);
  call.deadline = absl::Now() + timeout;
  call.weight_tokens = 1;
  return call;
}

inline RawReply Await(ReplicaSet& replicas, RawCall call, const RetryOptions& options = {}) {
  absl::Notification done;
  RawReply reply;
  StartRawCall(replicas, options, std::move(call), [&](RawReply r) {
    reply = std::move(r);
    done.Notify();
  });
  done.WaitForNotification();
  return reply;
}

// Empty where `reply` is no ApplyResponse of one layer.
inline std::string HighwayOf(const RawReply& reply) {
  std::vector<grpc::Slice> slices;
  if (!reply.body.Dump(&slices).ok()) return "";
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  v1::ApplyResponse response;
  return response.ParseFromString(bytes) && response.layers_size() == 1 ? response.layers(0).highway() : "";
}

// Whether `condition` came true within 20 s.
inline bool Eventually(const std::function<bool()>& condition) {
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

inline ReplicaStatus StatusOf(const ReplicaSet& replicas, const std::string& name) {
  for (const ReplicaStatus& status : replicas.Replicas()) {
    if (status.name == name) return status;
  }
  return {};
}

inline bool Serves(const ReplicaSet& replicas, const std::string& name) {
  return StatusOf(replicas, name).state == ReplicaState::kServing;
}

}  // namespace engram::client
