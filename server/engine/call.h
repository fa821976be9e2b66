// A call as the engine sees it: token counts, plain pointers, and functions that lead back to whoever submitted it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/kernels.h"
#include "server/engine/prepared.h"

namespace engram {

// Where the work is cut between server and worker: what is written to a layer's outputs.
enum class Form {
  kHighway,     // out: the updated highway, [T, hc, dim]
  kKv,          // out: [T, dim * (hc + 1)] bf16, or of an output slice
  kRowsNative,  // out: the file's row bytes, [T, columns, 84], or of a column slice
  kRowsBf16,    // out: [T, columns * 256] bf16, or of a column slice
  kUpdate,      // gates [T, hc] f32 and value [T, dim] bf16
  kGate,        // gates
  kPrepare,     // kv, whole, and the row ids, for a ticket
};

// Does the form need kv, or rows alone?
constexpr bool NeedsKv(Form form) { return form != Form::kRowsNative && form != Form::kRowsBf16; }
// Does the form read a highway?
constexpr bool ReadsHighway(Form form) {
  return form == Form::kHighway || form == Form::kUpdate || form == Form::kGate;
}

enum class Priority { kDecode, kPrefill };

// Outputs of one layer, each for all tokens of the call in their order (those of refused sequences too: their places
// are not written). Unaligned, except `gates` and `value`.
struct CallLayer {
  int layer = 0;                   // index into EngramModel::layers()
  const void* highway = nullptr;   // [T, hc, dim] of highway_type; null unless the form reads it
  void* out = nullptr;             // may be `highway`
  float* gates = nullptr;          // [T, hc]
  kernels::Bf16* value = nullptr;  // [T, dim]
};

struct CallSequence {
  int64_t tokens = 0;
  bool refused = false;  // by a partial_ok call: nothing of it is computed
};

// The range of columns or outputs asked for; all of them unless set.
struct OutputSlice {
  int64_t begin = 0;
  int64_t end = 0;
  bool whole() const { return end == 0; }
};

// The submitter keeps every pointer good until `done` is called.
struct Call {
  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  Priority priority = Priority::kDecode;
  std::vector<CallLayer> layers;        // each layer once; empty: the call is its commit and nothing else
  std::vector<CallSequence> sequences;  // a call by ticket or row ids is one sequence
  int64_t tokens = 0;                   // their sum, T; 0 only without layers or where every sequence is refused
  std::vector<uint8_t> token_mask;      // [T], 0 = masked; empty: all live
  OutputSlice slice;
  absl::Time deadline = absl::InfiniteFuture();
  bool kv_ready = false;   // what `prepared` will be has kv of all its layers
  bool uncounted = false;  // the server's own, not a client's: no metric of tokens or stages tells of it
  // Names of the sessions it touches. A call never overtakes one that came before it and touches the same.
  std::vector<std::string> session_keys;

  // Where the tokens' rows come from: one of the three.
  std::vector<int32_t> windows;              // per sequence the N-1 compressed ids before it, then its own
  std::vector<int64_t> row_ids;              // [T][layers of the call][columns], -1 = a row of zeros
  std::shared_ptr<const Prepared> prepared;  // tokens [prepared_first, prepared_first + T) of it
  int64_t prepared_first = 0;
  std::shared_ptr<Prepared> preparing;  // kPrepare: what is being made

  // The commit point: called once, where the batch is started, in the order of arrival (of calls that touch a common
  // session), when the call leaves the queue for its first batch. Fills in windows or prepared where they depend on
  // state, and `refused` of sequences.
  absl::AnyInvocable<absl::Status(Call&)> commit;
  // True once nobody wants the answer any more. Any thread.
  absl::AnyInvocable<bool() const> cancelled;
  // Layer layers[index] is written for all tokens of the call. On the backend's thread (Backend::Start), ascending
  // layers, before `done`; may be empty. Must not block.
  absl::AnyInvocable<void(const Call&, size_t index)> layer_done;
  // Called exactly once, on the engine thread or in Submit(): the call is over, nothing reads or writes its memory any
  // more, and with OK every output is written.
  // Must not block.
  absl::AnyInvocable<void(Call&, absl::Status)> done;
};

}  // namespace engram
