#include "client/bench/worker/wire_fetch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/error_details.h"

namespace engram::bench {

std::unique_ptr<StepFetch> MakeWireFetch(client::Client& client, const WireFetchOptions& options) {
  switch (options.form) {
    case client::Form::kRowsNative:
    case client::Form::kRowsBf16:
    case client::Form::kKv:
      return MakeLookupFetch(client, options);
    default:
      return MakeApplyFetch(client, options);
  }
}

std::vector<client::Range> PartsOf(int64_t all, const WireFetchOptions& options) {
  const int64_t parts = options.fanout == Fanout::kBroadcast ? 1 : std::min<int64_t>(options.ranks, all);
  std::vector<client::Range> ranges;
  for (int64_t i = 0; i < parts; ++i) ranges.push_back({all * i / parts, all * (i + 1) / parts});
  return ranges;
}

std::vector<client::SequenceRun> RunsOf(const PlannedStep& step) {
  std::vector<client::SequenceRun> runs;
  runs.reserve(step.runs.size());
  for (const StepRun& run : step.runs) {
    runs.push_back({.start_pos = run.start_pos, .token_ids = run.token_ids, .lookback = run.lookback});
  }
  return runs;
}

int64_t BytesOfRuns(const PlannedStep& step) {
  // Of a run: the sequence's tag and length, start_pos, and tag and length of the two lists.
  constexpr int64_t kRunBytes = 3 + 4 + 2 * 3;
  int64_t bytes = 0;
  for (const StepRun& run : step.runs) {
    bytes += kRunBytes + 4 * static_cast<int64_t>(run.token_ids.size() + run.lookback.size());
  }
  return bytes;
}

void CountErrors(const std::vector<absl::Status>& failures, std::map<std::string, int64_t>& errors) {
  for (const absl::Status& status : failures) {
    const std::string reason = client::ErrorReason(status);
    ++errors[absl::StrCat(absl::StatusCodeToString(status.code()), reason.empty() ? "" : " ", reason)];
  }
}

absl::Status SameBytes(int32_t layer_id, absl::Span<const char> got, absl::Span<const char> expected) {
  const auto [at, unused] = std::mismatch(got.begin(), got.end(), expected.begin(), expected.end());
  if (at == got.end() && got.size() == expected.size()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("layer ", layer_id, ": from byte ", at - got.begin(), " of ", expected.size(),
                                          " on, the step's answer is not the one to a plain call"));
}

}  // namespace engram::bench
