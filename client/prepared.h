// Results made ahead of the layers by Client::Prepare: a ticket per part, and the tokens once more, so that a call by
// it can be made again by ids when a ticket or its server is gone; where only a session knows the ids before them, it
// cannot.
//
// A cheap handle: copies share one immutable state, any thread. It outlives nothing on a server: tickets end with their
// TTL (ModelInfo::Limits::ticket_ttl_ms), Client::Release, or a rollback below their positions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace engram::client {

// What one server holds.
struct PreparedPart {
  std::string replica;  // as RawReply names it
  std::string ticket;
  int64_t first_token = 0;
  int64_t tokens = 0;
  uint64_t server_epoch = 0;
};

// A sequence as it was prepared, to make it again without a session: what was prepared stands in its session already,
// and to write it there once more would truncate what came after it.
struct PreparedSequence {
  int64_t start_pos = 0;
  std::vector<int32_t> token_ids = {};
  std::vector<uint8_t> token_mask = {};  // empty: all live
  std::vector<int32_t> lookback = {};    // N-1, newest first; empty: only the session's server knows
};

struct PreparedState {
  std::vector<PreparedSequence> sequences;
  std::vector<int32_t> layer_ids;
  std::vector<PreparedPart> parts;  // ascending, they cover [0, tokens)
  int64_t tokens = 0;
};

class Prepared {
 public:
  Prepared() = default;  // of nothing
  explicit Prepared(std::shared_ptr<const PreparedState> state) : state_(std::move(state)) {}

  int64_t tokens() const { return state_ == nullptr ? 0 : state_->tokens; }
  // Those that are ready; an Apply at another layer computes it.
  absl::Span<const int32_t> layer_ids() const {
    return state_ == nullptr ? absl::Span<const int32_t>() : state_->layer_ids;
  }

  // For the library: null where nothing is prepared.
  const std::shared_ptr<const PreparedState>& state() const { return state_; }

 private:
  std::shared_ptr<const PreparedState> state_;
};

}  // namespace engram::client
