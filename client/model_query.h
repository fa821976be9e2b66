// Asks one server what it serves.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/completions.h"
#include "client/model_info.h"
#include "client/resolve.h"

namespace grpc {
class ClientContext;
}

namespace engram::client {

struct ModelAnswer {
  // OK: checked by DecodeModelInfo. Every error names the server. UNAVAILABLE and DEADLINE_EXCEEDED: nobody answered,
  // and why; anything else is an answer that will not change by asking again.
  absl::StatusOr<ModelInfo> model = absl::UnknownError("");
  bool draining = false;  // with the trailer engram-draining
};

// Sends GetModel over a connection of its own, so that neither the limits nor the reconnection pauses of other channels
// matter; closes it when answered. Never blocks; calls `done` once, on a thread of `completions`, at `deadline` at the
// latest. What is returned cancels the question (TryCancel), also after its end.
std::shared_ptr<grpc::ClientContext> QueryModel(Completions& completions, const Address& address,
                                                const std::string& authority, absl::Time deadline,
                                                std::function<void(ModelAnswer)> done);

// Whether a server turned new calls away politely: the trailer engram-draining of a reply.
bool AnnouncesDrain(const grpc::ClientContext& context);

}  // namespace engram::client
