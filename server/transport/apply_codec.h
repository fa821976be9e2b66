// ApplyRequest to what the core works on, and the core's results to ApplyResponse.
//
// Every length and value from the wire is checked here, once; what comes out is what session/ and engine/ may trust.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engram/v1/engram.pb.h"
#include "server/engine/call.h"
#include "server/model/engram_model.h"
#include "server/session/session_table.h"

namespace engram {

struct CallLimits {
  int64_t max_call_tokens = 65536;
  int64_t max_message_bytes = int64_t{64} << 20;  // of payload, a request or a reply
  int64_t position_limit = int64_t{1} << 20;
  int64_t session_window = 8192;
  int32_t max_session_bytes = 64;
};

struct ApplyCall {
  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  std::vector<SequenceClaim> claims;
  std::vector<uint8_t> token_mask;  // [T]; empty: all live
  int64_t tokens = 0;               // T
  std::vector<int> layers;          // indices into the model's layers, in the request's order
  int64_t request_bytes = 0;        // of payload
  int64_t reply_bytes = 0;          // of payload
};

// Refusals: every reason of docs/api.md that can be told without history; all offenders are listed.
absl::StatusOr<ApplyCall> DecodeApply(const v1::ApplyRequest& request, const EngramModel& model,
                                      const CallLimits& limits);

// Sizes the reply's payloads and returns, in the order of call.layers, where the engine reads and writes. The pointers
// lead into `request` and `response`, which must live until the call is done.
std::vector<CallLayer> LayOutReply(const ApplyCall& call, const EngramModel& model, const v1::ApplyRequest& request,
                                   v1::ApplyResponse& response);

}  // namespace engram
