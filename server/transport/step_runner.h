// A checked StepCall on its way through the core: permit, commit (histories and tickets), engine, reply.
//
// Shared by the unary methods and the stream, which differ only in how a reply goes out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/admission/budget.h"
#include "server/engine/engine.h"
#include "server/engine/staging.h"
#include "server/engine/ticket_store.h"
#include "server/model/engram_model.h"
#include "server/observe/metrics.h"
#include "server/regions/region_store.h"
#include "server/session/session_table.h"
#include "server/transport/arrived_message.h"
#include "server/transport/describe_model.h"
#include "server/transport/step_call.h"
#include "server/transport/step_reply.h"

namespace engram {

// What calls are made of; all of it outlives the listeners.
struct Core {
  std::shared_ptr<const EngramModel> model;
  StepShape shape;
  CallLimits limits;
  ServerIdentity identity;
  Budget& budget;
  SessionTable& sessions;
  TicketStore& tickets;
  Engine& engine;
  StagingPool& staging;
  Metrics& metrics;
  RegionStore* regions = nullptr;  // null: no memory is shared
  std::string region_socket = {};  // the path where regions are claimed
  std::string device_uuid = {};    // of the GPU whose memory is shared

  // Everyone, as long as no listener asks for credentials.
  std::string principal = "anonymous";

  ListLimits list_limits() const {
    return {.layers = static_cast<int64_t>(model->layers().size()), .others = limits.max_call_tokens};
  }
  DecodeContext decode_context() const { return {*model, shape, limits, tickets, principal, regions}; }
};

struct StepHooks {
  absl::Time deadline = absl::InfiniteFuture();
  uint64_t stream = 0;  // that the call came in by, 0: none
  absl::AnyInvocable<bool() const> cancelled;
  // results[index] is final. May be empty. Any thread, before done.
  absl::AnyInvocable<void(size_t index)> layer_done;
  // Called exactly once, any thread; with OK every result is final.
  absl::AnyInvocable<void(absl::Status)> done;
};

// Takes memory for the highways of an admitted call and copies them there, once. Errors: OutOfMemory().
absl::Status StageHighways(const Core& core, const ArrivedMessage& message, StepReply& reply);

// Submits the call. `reply` is filled in as the call goes on and must live until `done`.
void RunStep(const Core& core, StepReply& reply, StepHooks hooks);

// Forgets sessions and their tickets, in the order of arrival of the calls that touch them; `done` gets how many there
// were.
void RunCloseSessions(const Core& core, std::vector<std::string> sessions, absl::Time deadline,
                      absl::AnyInvocable<void(absl::Status, int32_t closed)> done);

}  // namespace engram
