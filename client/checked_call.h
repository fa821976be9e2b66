// Any of the three calls, checked against the model and in one shape: what is planned, sent, read and landed.
//
// Borrows the caller's spans. Refusals read as the server's (refusal.h); what no server can see (a history of other
// n-grams or behind two runs, an `out` of another size) is INVALID_ARGUMENT without a reason. Changes no history.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model_info.h"
#include "client/step_calls.h"

namespace engram::client {

// Tokens of one call of the library, however many messages that is. With it and the bounds of ModelInfo no product of
// sizes passes 2^63.
inline constexpr int64_t kMaxCallTokens = int64_t{1} << 24;

enum class Method { kApply, kPrepare, kLookup };

const char* MethodPath(Method method);  // "/engram.v1.EngramService/Apply"

// A payload of a layer's reply and where it goes.
struct Landing {
  int field = 0;            // its number in LayerOutput
  int64_t token_bytes = 0;  // in the reply, and in `out`
  char* out = nullptr;      // [T * token_bytes]; null: read where it lies (CheckedLayer::updated)
};

struct CheckedLayer {
  int32_t layer_id = 0;
  const char* highway = nullptr;  // null: none is sent
  std::vector<Landing> landings;
  char* updated = nullptr;  // where the updated highway goes that no payload holds: kAuto by UPDATE, or in a region
};

struct CheckedSequence {
  std::string session;
  std::string home;  // the replica that has the session; set by who knows it
  int64_t start_pos = 0;
  absl::Span<const int32_t> token_ids;
  absl::Span<const uint8_t> token_mask;
  std::vector<int32_t> lookback;  // N-1; empty: the session's server knows
  std::optional<uint64_t> step;
  std::string fork_from;
  SequenceHistory* history = nullptr;
  int64_t at = 0;        // of its first token, in the call's tokens; a slice of a prepared one may begin before 0
  int64_t tokens = 0;    // token_ids.size(), or those of row ids
  absl::Status refused;  // partial_ok: not sent

  // Only its server can answer, and only in order.
  bool by_session() const { return !session.empty() && lookback.empty(); }
};

struct CheckedCall {
  Method method = Method::kApply;
  Form form = Form::kHighway;  // a wire form; of a Prepare none
  HighwayDtype dtype = HighwayDtype::kF32;
  Priority priority = Priority::kAuto;
  OnFailure on_failure = OnFailure::kAbort;
  bool partial_ok = false;
  bool return_values = false;
  absl::Duration timeout;

  std::vector<CheckedSequence> sequences;  // of row ids: one that stands for them
  std::vector<CheckedLayer> layers;
  int64_t tokens = 0;

  const int32_t* row_ids = nullptr;  // [tokens, layers, cols]
  std::optional<Range> slice;
  Prepared prepared;
  int64_t prepared_first = 0;  // of the prepared tokens, where this call's begin

  const SharedRegion* region = nullptr;  // highways and `updated` lie there

  bool reads_highway() const { return !layers.empty() && layers.front().highway != nullptr; }
};

absl::StatusOr<CheckedCall> CheckApply(const ModelInfo& model, const ApplyCall& call);
absl::StatusOr<CheckedCall> CheckPrepare(const ModelInfo& model, const PrepareCall& call);
absl::StatusOr<CheckedCall> CheckLookup(const ModelInfo& model, const LookupCall& call);

}  // namespace engram::client
