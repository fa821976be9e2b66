// One call of the load: its form and its tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/model_info.h"

namespace engram::bench {

struct StepSequence {
  std::string session;  // empty: stateless
  int64_t start_pos = 0;
  std::vector<int32_t> token_ids;
  // The N-1 ids before start_pos, newest first, -1 before the start. Sent where there is no session: else its server
  // knows.
  std::vector<int32_t> lookback;
};

struct Step {
  client::Form form = client::Form::kHighway;
  std::vector<StepSequence> sequences;
  // Where in the composer's pool the highway begins, in tokens: highways of different steps differ.
  int64_t highway_at = 0;

  int64_t tokens() const {
    int64_t sum = 0;
    for (const StepSequence& sequence : sequences) sum += static_cast<int64_t>(sequence.token_ids.size());
    return sum;
  }
};

}  // namespace engram::bench
