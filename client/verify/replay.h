// Replays a fixture through a client, one case at a time or all together, and checks every reply.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/engram_client.h"
#include "client/verify/fixture.h"
#include "client/verify/reply_checks.h"

namespace engram::client {

// How a sequence's history reaches the server.
enum class ReplayMode {
  // Stateless, with look-back from a client-side history: the library's normal mode.
  kLookback,
  // A session per case, no look-back but where the fixture gives one: positions and rollbacks are the server's
  // business.
  kSession,
  // As kLookback, the first calls of all cases in one message, then the second ones: sequences must not mix.
  kTogether,
};

struct ReplayReport {
  // In the order they are seen: kv, then highway in f32, f32 on a bf16-rounded input, bf16, masked tokens.
  StageResult kv{"kv"};
  StageResult f32{"highway f32"};
  StageResult f32_rounded{"highway f32, bf16 values"};
  StageResult bf16{"highway bf16"};
  StageResult masked{"masked bytes"};

  // (token, copy, layer) gates of stage f32: judged by the fixture's own gate, and by bounds because the key differs.
  int64_t exact_gates = 0;
  int64_t bounded_gates = 0;
  // The widest such bounds, and those of the stages with rounded input.
  double widest_key_bound = 0;
  double widest_rounding_bound = 0;

  int64_t calls = 0;  // messages answered

  bool passed() const;
};

// OK when `model` has the geometry, layers and types of the fixture; otherwise names the first difference
// and the files to serve instead.
absl::Status CheckSameModel(const ModelInfo& model, const Fixture& fixture);

// Every call in order, each in KV form and in HIGHWAY form with three highways. Stops at the first error; a miss is no
// error. The highway of a masked token is replaced by signed zeros and denormals, whose bits a copy keeps and
// arithmetic does not. `session_prefix` must be new to the server.
absl::Status Replay(Client& client, const Fixture& fixture, ReplayMode mode, const std::string& session_prefix,
                    absl::Duration timeout, ReplayReport* report);

}  // namespace engram::client
