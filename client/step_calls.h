// The calls of one engine step as the caller holds them: Apply, Prepare, Lookup.
//
// T is the number of tokens of the call: those of its sequences, in order, whatever parts it travels in. Tensors are
// row-major and little endian, so on the hosts this builds for they are the caller's own arrays. All spans, histories
// and Prepared are borrowed until the call is over; the call itself is not. Result spans are written only when the
// whole call succeeds (with partial_ok: only where their sequence was served).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/model_info.h"
#include "client/prepared.h"
#include "client/sequence_history.h"
#include "client/shared_region.h"

namespace engram::client {

// Who goes first at the boundary between two batches. kAuto: DECODE where no sequence has more than 16 tokens.
enum class Priority { kAuto, kDecode, kPrefill };

// What becomes of a call that no server answers in the end. Refusals of the call itself are always returned.
enum class OnFailure {
  kAbort,  // the error
  kRetry,  // begin again until the deadline, while the failure is one that passes (UNAVAILABLE, QUEUE_FULL)
  kSkip,   // go on without the engram: highway copied, gates and value 0, and the report says where
};

// [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// Consecutive tokens of one sequence.
struct SequenceRun {
  // The normal mode: look-back comes from here, and when the call succeeds the tokens are written here. One history
  // stands behind at most one run of a call.
  SequenceHistory* history = nullptr;

  int64_t start_pos = 0;
  absl::Span<const int32_t> token_ids = {};   // [T of this run], >= 1
  absl::Span<const uint8_t> token_mask = {};  // same length, 0 = masked; empty: all live

  // The server keeps this sequence's history under it as well; empty: stateless. A call that is cut sends the parts of
  // such a sequence one after the other.
  std::string session = {};

  // Without a history: exactly N-1 ids newest first, or empty to rely on the session. With one: empty.
  absl::Span<const int32_t> lookback = {};

  // Of the caller's own counting: below the session's last it is STALE_STEP.
  std::optional<uint64_t> step = {};

  // The session begins as a copy of this one's history up to start_pos. Needs `session`, no history and no look-back.
  std::string fork_from = {};
};

// A layer of an Apply. What a form does not name stays empty.
struct LayerRun {
  int32_t layer_id = 0;
  // [T, hc, dim] in the call's dtype; none for kKv.
  absl::Span<const char> highway = {};
  // kHighway, kAuto: as large as `highway`, and may be the very same memory. kKv: [T, dim * (hc + 1)] bf16.
  absl::Span<char> out = {};
  absl::Span<float> gates = {};     // kUpdate, kGate: [T, hc]
  absl::Span<uint16_t> value = {};  // kUpdate: [T, dim] bf16
};

struct ApplyCall {
  std::vector<SequenceRun> sequences;
  std::vector<LayerRun> layers;
  // kHighway, kKv, kUpdate, kGate, or kAuto: HIGHWAY's result, by whichever form is cheaper on the way here.
  Form form = Form::kHighway;
  HighwayDtype dtype = HighwayDtype::kF32;
  // From the moment the call is made; DEADLINE_EXCEEDED after it.
  absl::Duration timeout = absl::Seconds(30);
  Priority priority = Priority::kAuto;
  OnFailure on_failure = OnFailure::kAbort;
  // Serve the sequences that can be served: CallReport::sequences tells of the others.
  bool partial_ok = false;
  // Instead of sequences: T is its tokens, or those of `token_slice` alone. No history is written.
  const Prepared* prepared = nullptr;
  std::optional<Range> token_slice = {};
  // Every `highway`, and `out` of kHighway and kAuto, lies in it: only offsets travel, to the region's server. An `out`
  // is its highway itself or overlaps nothing else of the call. Not for kKv, not with kSkip. It is written as the
  // server computes: after a failure nothing is known of it (shared_region.h).
  const SharedRegion* region = nullptr;
};

struct PrepareCall {
  std::vector<SequenceRun> sequences;
  std::vector<int32_t> layer_ids;
  // None, or one per layer: [T, dim] bf16, so that kGate is enough later.
  std::vector<absl::Span<uint16_t>> values;
  absl::Duration timeout = absl::Seconds(30);
  Priority priority = Priority::kAuto;
  OnFailure on_failure = OnFailure::kAbort;  // not kSkip
};

struct LookupLayer {
  int32_t layer_id = 0;
  // kRowsNative: [T, cols, row_bytes of the layer]; kRowsBf16: [T, cols, head_dim] bf16; kKv: [T, dim * (hc + 1)] bf16;
  // or of `slice` alone.
  absl::Span<char> out = {};
};

struct LookupCall {
  // Exactly one of these three. row_ids is [T, layers, cols], -1 = a row of zeros.
  std::vector<SequenceRun> sequences;
  absl::Span<const int32_t> row_ids = {};
  const Prepared* prepared = nullptr;

  std::vector<LookupLayer> layers;
  Form form = Form::kRowsNative;    // or kRowsBf16, kKv
  std::optional<Range> slice = {};  // of columns for rows, of outputs [0, dim * (hc + 1)) for kv
  absl::Duration timeout = absl::Seconds(30);
  Priority priority = Priority::kAuto;
  OnFailure on_failure = OnFailure::kAbort;  // not kSkip: a row cannot say "nothing"
  bool partial_ok = false;
};

// How a call went; also of one that failed.
struct CallReport {
  struct Skip {
    std::vector<int32_t> layer_ids;
    Range tokens;  // within the call's T
    absl::Status why;
  };

  std::vector<Skip> skipped;            // kSkip: what was done without the engram
  std::vector<absl::Status> sequences;  // partial_ok: one per sequence, OK = served
  int parts = 0;                        // messages the call was cut into
  int attempts = 0;                     // RPCs made for them
  std::string replica;                  // that answered the last part
  uint64_t server_epoch = 0;            // of that answer; 0: none came
};

}  // namespace engram::client
