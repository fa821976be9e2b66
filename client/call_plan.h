// A call cut into parts that each fit one message, by tokens first and by layers where one token of all layers is too
// large. Pure.
//
// Results do not depend on the cut (docs/numerics.md), only how many connections can work at a time does. Pieces of a
// sequence carry look-back made of the ids before them. Those that live in a session's server alone carry none, and
// whatever names a session goes out in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "client/checked_call.h"
#include "client/model_info.h"

namespace engram::client {

struct PlanLimits {
  int64_t max_message_bytes = 0;  // of tensors; the smaller of the server's and the client's own
  // The smallest of the servers'; a server's queue has no more. A call beyond it is cut to halves of that, and half of
  // it is under way at a time: the rest is for others.
  int64_t max_call_tokens = 0;
  // Parts that may go together are cut to about this many bytes of reply, so that several connections share the work;
  // 0: no more parts than needed.
  int64_t stripe_bytes = 0;
};

// Tokens [first, first + tokens) of one sequence of the call.
struct Piece {
  size_t sequence = 0;
  int64_t first = 0;
  int64_t tokens = 0;
};

struct Part {
  std::vector<Piece> pieces;  // at least one; on the wire in this order
  int64_t tokens = 0;
  int64_t bytes = 0;       // of tensors, request and reply
  size_t first_layer = 0;  // of the call's
  size_t layers = 0;
  std::optional<size_t> ticket;  // of the prepared parts: sent by it, not by ids, while it is good
  Range ticket_slice;            // of the ticket's tokens
};

struct CallPlan {
  std::vector<Part> parts;              // none: every sequence was refused here
  bool ordered = false;                 // one after the other
  int64_t tokens_together = 0;          // of parts under way at a time, where that are several
  Priority priority = Priority::kAuto;  // of the whole call, which a server could not see in a part
};

// MESSAGE_BYTES where one token of one layer passes a message, or a Lookup by a ticket of more tokens than fit one
// cannot go by ids; TOO_MANY_TOKENS where a Prepare passes the server's memory for prepared results.
absl::StatusOr<CallPlan> PlanCall(const ModelInfo& model, const PlanLimits& limits, const CheckedCall& call);

// The N-1 ids before the piece, newest first: what goes into Sequence.lookback_token_ids. Empty where only the
// session's server knows them all.
std::vector<int32_t> LookbackOf(const CheckedSequence& sequence, int64_t first, int lookback_length);

// Whether the part can be asked for by ids alone, without any session.
bool GoesByIds(const ModelInfo& model, const CheckedCall& call, const Part& part);

// Where the piece's tokens stand among the call's.
inline int64_t PlaceOf(const CheckedCall& call, const Piece& piece) {
  return call.sequences[piece.sequence].at + piece.first;
}

}  // namespace engram::client
