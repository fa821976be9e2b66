// Traces made up: the two that ship, and longer or denser ones of the same kinds.
#pragma once

#include <cstdint>
#include <vector>

#include "client/bench/command.h"
#include "client/bench/trace.h"

namespace engram::bench {

struct TraceShape {
  int64_t steps = 120;
  int64_t batch = 8;  // sequences that decode at a time
  double step_ms = 25;
  uint64_t seed = 1;
};

// A decode worker: each step one token for every sequence of the batch, sometimes up to 3 accepted drafts more;
// sequences end after 20 to 200 steps and others take their places.
std::vector<TraceStep> DecodeTrace(const TraceShape& shape);

// A worker busy with prompts: most steps hold a chunk of up to 256 tokens of one, beside the tokens of half a batch
// that decodes. Prompts are made of phrases that repeat, Zipf-like.
std::vector<TraceStep> PrefillTrace(const TraceShape& shape);

// engram-bench make-trace decode|prefill --out FILE
Command AddMakeTraceCommand(CLI::App& app);

}  // namespace engram::bench
