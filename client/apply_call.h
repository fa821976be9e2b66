// One engine step as the caller holds it, and its translation to and from the wire.
//
// T is the number of tokens of the call: those of its sequences, in order. Tensors are row-major and little endian, so
// on the hosts this builds for they are the caller's own arrays.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/model_info.h"
#include "client/sequence_history.h"
#include "engram/v1/engram.pb.h"

namespace engram::client {

// Consecutive tokens of one sequence. The spans and the history are borrowed until the call returns.
struct SequenceRun {
  // The normal mode: look-back comes from here, and when the call succeeds the tokens are written here. One history
  // stands behind at most one run of a call.
  SequenceHistory* history = nullptr;

  int64_t start_pos = 0;
  absl::Span<const int32_t> token_ids = {};   // [T of this run], >= 1
  absl::Span<const uint8_t> token_mask = {};  // same length, 0 = masked; empty: all live

  // The server keeps this sequence's history under it as well; empty: stateless.
  std::string session = {};

  // Without a history: exactly N-1 ids newest first, or empty to rely on the session. With one: empty.
  absl::Span<const int32_t> lookback = {};
};

// A layer of the call. Both spans are borrowed until the call returns.
struct LayerRun {
  int32_t layer_id = 0;
  // Form::kHighway: [T, hc, dim] in the call's dtype. Form::kKv: empty.
  absl::Span<const char> highway = {};
  // Form::kHighway: as large as `highway`, and may be the very same memory. Form::kKv: [T, dim * (hc + 1)] bf16.
  // Written only when the whole call succeeds.
  absl::Span<char> out = {};
};

struct ApplyCall {
  std::vector<SequenceRun> sequences;
  std::vector<LayerRun> layers;
  Form form = Form::kHighway;
  HighwayDtype dtype = HighwayDtype::kF32;
  // From the moment the call is made; DEADLINE_EXCEEDED after it.
  absl::Duration timeout = absl::Seconds(30);
};

// Bytes of `out` of every layer of a call of `tokens` tokens. Cannot overflow: tokens <= 2^31, and ModelInfo is
// bounded.
int64_t OutputBytes(const ModelInfo& model, Form form, HighwayDtype dtype, int64_t tokens);

// What EncodeApply checks of a call's size, for who wants to know before taking memory for it: TOO_MANY_TOKENS, and
// MESSAGE_BYTES of `layers` layers. `tokens` has passed the first before the second is asked.
absl::Status CheckTokens(const ModelInfo& model, int64_t tokens);
absl::Status CheckTensors(const ModelInfo& model, int64_t max_message_bytes, Form form, HighwayDtype dtype,
                          int64_t tokens, int64_t layers);

// The request, with model_key = the model's config_digest, so that a server restarted with another model refuses the
// call instead of answering from the wrong tables. Checks every length against the model and `max_message_bytes` first
// and refuses as the server would (refusal.h). What no server can see (a history of other n-grams or behind two runs,
// an `out` of another size) is INVALID_ARGUMENT without a reason. Changes no history.
absl::StatusOr<v1::ApplyRequest> EncodeApply(const ModelInfo& model, int64_t max_message_bytes, const ApplyCall& call);

// Copies the reply into the call's `out` spans, all or nothing: a reply with other layers or sizes than asked for is
// INTERNAL and nothing is written.
absl::Status DecodeApply(const ModelInfo& model, const v1::ApplyResponse& response, const ApplyCall& call);

}  // namespace engram::client
