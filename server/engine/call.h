// A call as the engine sees it: token counts, plain pointers, and three functions that lead back to whoever submitted
// it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/kernels.h"

namespace engram {

// Where the work is cut between server and worker: what the reply holds.
enum class Form {
  kHighway,  // the updated highway, [T, hc, dim]
  kKv,       // [T, dim * (hc + 1)] bf16
};

struct CallLayer {
  int layer = 0;                  // index into EngramModel::layers()
  const void* highway = nullptr;  // [T, hc, dim] of highway_type, unaligned; null unless the form is kHighway
  void* out = nullptr;            // the whole of what the form says, unaligned; may be `highway`
};

// The submitter keeps every pointer good until `done` is called.
struct Call {
  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  std::vector<CallLayer> layers;         // >= 1, each layer once
  std::vector<int64_t> sequence_tokens;  // tokens of each sequence, >= 1 each
  int64_t tokens = 0;                    // their sum, T
  std::vector<uint8_t> token_mask;       // [T], 0 = masked; empty: all live
  absl::Time deadline = absl::InfiniteFuture();

  // The commit point: called once, on the engine thread, in the order of Submit(), when the call leaves the queue for
  // its first batch. Returns for each sequence its window, concatenated: the N-1 compressed ids before it, then its
  // own.
  absl::AnyInvocable<absl::StatusOr<std::vector<int32_t>>()> commit;
  // True once nobody wants the answer any more. Any thread.
  absl::AnyInvocable<bool() const> cancelled;
  // Called exactly once, on the engine thread (or in Submit() after a stop): the call is over, and with OK every `out`
  // is written. Must not block.
  absl::AnyInvocable<void(absl::Status)> done;
};

}  // namespace engram
