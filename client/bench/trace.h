// A load written down: JSON lines, a step each (docs/bench.md has the format).
//
// The file is hostile until checked: an error names its line, key, value and the bound.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/bench/step.h"
#include "client/bench/step_source.h"
#include "client/bench/token_source.h"
#include "client/model_info.h"

namespace engram::bench {

struct TraceSequence {
  std::string session;  // names the sequence, 1..64 bytes; once a step
  int64_t start_pos = 0;
  int64_t tokens = 0;
  int64_t ngram_pool = 0;
};

struct TraceStep {
  int64_t at = 0;                    // nanoseconds from the trace's beginning, never less than the step before
  std::optional<client::Form> form;  // none: the run's
  std::vector<TraceSequence> sequences;
  size_t line = 0;  // of the file, from 1

  int64_t tokens() const;
};

// At least one step. `name` stands in errors.
absl::StatusOr<std::vector<TraceStep>> ParseTrace(const std::string& name, absl::string_view text);
absl::StatusOr<std::vector<TraceStep>> ReadTrace(const std::string& path);

// A step as its line, without the end.
std::string TraceLine(const TraceStep& step);

// What a server cannot take of it: INVALID_ARGUMENT names the line.
absl::Status CheckTrace(const std::string& name, const std::vector<TraceStep>& steps, client::Form form,
                        client::HighwayDtype dtype, int64_t layers, const client::ModelInfo& model);

// The steps of a trace in its order, over and over, by whichever slot asks next. Sequences are stateless, with
// look-back, so that they may be served in any order; a name has the same tokens every time.
class TraceSource final : public StepSource {
 public:
  TraceSource(const client::ModelInfo& model, const std::vector<TraceStep>& steps, client::Form form, uint64_t seed,
              int64_t highway_starts);

  void Next(size_t slot, Step* step) override;
  void Restart(size_t) override {}  // the server keeps nothing of them

 private:
  const std::vector<TraceStep>& steps_;
  const client::Form form_;
  const uint64_t seed_;
  const int64_t vocab_;
  const int lookback_;
  const int64_t highway_starts_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace engram::bench
