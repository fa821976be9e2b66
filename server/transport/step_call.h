// What any of Apply, Prepare and Lookup asks of the core, checked: the wire's messages end here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engram/v1/engram.pb.h"
#include "server/engine/call.h"
#include "server/engine/step.h"
#include "server/engine/ticket_store.h"
#include "server/model/engram_model.h"
#include "server/session/session_table.h"
#include "server/transport/region_spans.h"

namespace engram {

struct CallLimits {
  int64_t max_call_tokens = 65536;
  int64_t max_message_bytes = int64_t{64} << 20;  // of payload, a request or a reply
  int64_t position_limit = int64_t{1} << 20;
  int64_t session_window = 8192;
  int32_t max_session_bytes = 64;
  int64_t prepare_memory_bytes = int64_t{1} << 30;
  int64_t ticket_ttl_ms = 10000;
};

struct StepCall {
  enum class Source { kSequences, kTicket, kRowIds };

  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  Priority priority = Priority::kDecode;
  Source source = Source::kSequences;
  std::vector<int> layers;  // indices into the model's layers, in the request's order
  int64_t tokens = 0;       // T, those of refused sequences counted
  std::vector<CallSequence> sequences;
  std::vector<uint8_t> token_mask;  // [T]; empty: all live
  OutputSlice slice;                // columns or outputs
  bool partial_ok = false;
  std::vector<absl::Status> statuses;  // partial_ok: one per sequence so far

  std::vector<SequenceClaim> claims;  // kSequences: of the sequences not refused, in order
  std::vector<size_t> claim_of;       // kSequences: for each claim, its sequence

  std::string ticket;  // kTicket
  int64_t prepared_first = 0;
  std::vector<int64_t> row_ids;  // kRowIds: [T][layers][columns]

  RegionHighways in_region;  // of an Apply with a region

  bool return_values = false;  // of a Prepare
  int64_t request_bytes = 0;   // of payload
  int64_t reply_bytes = 0;     // of payload
};

// What requests are checked against.
struct DecodeContext {
  const EngramModel& model;
  const StepShape& shape;
  const CallLimits& limits;
  const TicketStore& tickets;
  absl::string_view principal;
  const RegionStore* regions = nullptr;  // null: no memory is shared
};

// `highway_bytes`: of each of the request's layers, whose tensors stand elsewhere. Refusals: every reason of
// docs/api.md that can be told without history; all offenders are listed.
absl::StatusOr<StepCall> DecodeApply(const v1::ApplyRequest& request, const std::vector<int64_t>& highway_bytes,
                                     const DecodeContext& context);
absl::StatusOr<StepCall> DecodePrepare(const v1::PrepareRequest& request, const DecodeContext& context);
absl::StatusOr<StepCall> DecodeLookup(const v1::LookupRequest& request, const DecodeContext& context);

// Memory that a Prepare's result takes.
int64_t PreparedBytes(const StepCall& call, const StepShape& shape);

}  // namespace engram
