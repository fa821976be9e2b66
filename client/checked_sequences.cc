#include "client/checked_sequences.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/error_details.h"
#include "client/refusal.h"

namespace engram::client {
namespace {

absl::Status CheckPosition(const ModelInfo& model, const SequenceRun& run, const std::string& path) {
  const auto length = static_cast<int64_t>(run.token_ids.size());
  const int64_t limit = model.limits.position_limit;
  if (length == 0) {
    return Refuse(Reason::kEmptyCall, absl::StrCat(path, "token_ids"), "0", ">= 1",
                  "a sequence needs at least one token");
  }
  if (run.start_pos < 0) {
    return Refuse(Reason::kPositionGap, absl::StrCat(path, "start_pos"), absl::StrCat(run.start_pos), ">= 0",
                  absl::StrCat("position ", run.start_pos, " lies before the sequence's start, 0"));
  }
  if (run.start_pos > limit - length) {
    return Refuse(Reason::kPositionLimit, absl::StrCat(path, "start_pos"), absl::StrCat(run.start_pos),
                  absl::StrCat("<= ", limit - length),
                  absl::StrCat(length, " tokens from position ", run.start_pos, " pass the position limit of ", limit));
  }
  if (!run.token_mask.empty() && run.token_mask.size() != run.token_ids.size()) {
    return Refuse(Reason::kTokenMaskLength, absl::StrCat(path, "token_mask"), absl::StrCat(run.token_mask.size()),
                  absl::StrCat(length),
                  absl::StrCat("token_mask has ", run.token_mask.size(), " bytes for ", length, " tokens"));
  }
  return absl::OkStatus();
}

absl::Status CheckSessionName(const ModelInfo& model, const std::string& name, const std::string& field) {
  const int64_t most = model.limits.max_session_bytes;
  if (static_cast<int64_t>(name.size()) <= most) return absl::OkStatus();
  return Refuse(Reason::kSessionLength, field, absl::StrCat(name.size()), absl::StrCat("<= ", most),
                absl::StrCat("a session's name has at most ", most, " bytes, this one has ", name.size()));
}

absl::Status CheckFork(const ModelInfo& model, const SequenceRun& run, const std::string& path) {
  if (run.fork_from.empty()) return absl::OkStatus();
  if (run.session.empty()) {
    return Refuse(Reason::kSessionLength, absl::StrCat(path, "session"), "0",
                  absl::StrCat("1 to ", model.limits.max_session_bytes),
                  "a stateless sequence cannot fork: name the session that the copy becomes");
  }
  if (run.history != nullptr || !run.lookback.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, "fork_from: given besides a history or a look-back; a fork takes the parent's"));
  }
  return CheckSessionName(model, run.fork_from, absl::StrCat(path, "fork_from.session"));
}

// What goes into the look-back: the history's, the caller's, the start of a stateless sequence; or nothing, where the
// session's server knows.
absl::Status CheckLookback(const ModelInfo& model, const SequenceRun& run, const std::string& path,
                           std::vector<int32_t>* lookback) {
  if (run.history == nullptr) {
    const auto given = static_cast<int64_t>(run.lookback.size());
    const bool needed = run.session.empty() && run.start_pos > 0;
    if ((given > 0 || needed) && given != model.lookback_length()) {
      return Refuse(
          Reason::kLookbackLength, absl::StrCat(path, "lookback_token_ids"), absl::StrCat(given),
          absl::StrCat(model.lookback_length()),
          absl::StrCat(needed ? "a stateless sequence that does not start at 0 has " : "look-back has ", "exactly ",
                       model.lookback_length(), " ids, newest first (-1 = masked or before the start), got ", given));
    }
    lookback->assign(run.lookback.begin(), run.lookback.end());
    if (given == 0 && run.session.empty()) lookback->assign(model.lookback_length(), kDeadToken);
    return absl::OkStatus();
  }
  if (!run.lookback.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, "lookback: given besides a history, which makes the look-back"));
  }
  if (run.history->max_ngram() != model.max_ngram) {
    return absl::InvalidArgumentError(absl::StrCat(path, "history: made for ", run.history->max_ngram(),
                                                   "-grams, the model has ", model.max_ngram, "-grams"));
  }
  absl::Status status = run.history->CheckWrite(run.start_pos, run.token_ids, run.token_mask, path);
  if (!status.ok()) return status;
  absl::StatusOr<std::vector<int32_t>> known = run.history->Lookback(run.start_pos);
  if (!known.ok()) return known.status();
  *lookback = *std::move(known);
  return absl::OkStatus();
}

absl::Status CheckSequence(const ModelInfo& model, const SequenceRun& run, const std::string& path,
                           std::vector<int32_t>* lookback) {
  if (absl::Status status = CheckPosition(model, run, path); !status.ok()) return status;
  if (absl::Status status = CheckSessionName(model, run.session, absl::StrCat(path, "session")); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckFork(model, run, path); !status.ok()) return status;
  return CheckLookback(model, run, path, lookback);
}

// Two runs over one history would each be checked against a state that the other changes; two parts of a call over one
// session could reach the server in any order.
absl::Status CheckEachOnce(absl::Span<const SequenceRun> runs) {
  std::vector<const SequenceHistory*> histories;
  std::vector<std::pair<absl::string_view, size_t>> sessions;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].history != nullptr) histories.push_back(runs[i].history);
    if (!runs[i].session.empty()) sessions.emplace_back(runs[i].session, i);
  }
  std::sort(histories.begin(), histories.end());
  if (std::adjacent_find(histories.begin(), histories.end()) != histories.end()) {
    return absl::InvalidArgumentError("two sequences of the call share one history: a history stands behind one run");
  }
  std::sort(sessions.begin(), sessions.end());
  const auto twice = std::adjacent_find(sessions.begin(), sessions.end(),
                                        [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice == sessions.end()) return absl::OkStatus();
  return Refuse(Reason::kDuplicateSession, absl::StrCat("sequences[", std::next(twice)->second, "].session"),
                absl::StrCat(twice->first.size(), " bytes"), "each session once",
                "this session stands in the call more than once");
}

}  // namespace

absl::Status CheckSequences(const ModelInfo& model, absl::Span<const SequenceRun> runs, CheckedCall* call) {
  if (runs.empty()) return Refuse(Reason::kEmptyCall, "sequences", "0", ">= 1", "a call needs at least one sequence");
  for (size_t i = 0; i < runs.size(); ++i) {
    const SequenceRun& run = runs[i];
    CheckedSequence sequence;
    absl::Status status = CheckSequence(model, run, absl::StrCat("sequences[", i, "]."), &sequence.lookback);
    if (!status.ok() && (!call->partial_ok || ErrorReason(status).empty())) return status;
    sequence.session = run.session;
    sequence.start_pos = run.start_pos;
    sequence.token_ids = run.token_ids;
    sequence.token_mask = run.token_mask;
    sequence.step = run.step;
    sequence.fork_from = run.fork_from;
    sequence.history = run.history;
    sequence.at = call->tokens;
    sequence.tokens = static_cast<int64_t>(run.token_ids.size());
    sequence.refused = std::move(status);
    call->tokens += sequence.tokens;
    if (call->tokens > kMaxCallTokens) {
      return Refuse(Reason::kTooManyTokens, "sequences", absl::StrCat(call->tokens),
                    absl::StrCat("<= ", kMaxCallTokens),
                    absl::StrCat("a call may have ", kMaxCallTokens, " tokens, this one has more"));
    }
    call->sequences.push_back(std::move(sequence));
  }
  return CheckEachOnce(runs);
}

absl::Status TakePrepared(const Prepared& prepared, const std::optional<Range>& slice, CheckedCall* call) {
  if (prepared.state() == nullptr) {
    return Refuse(Reason::kEmptyCall, "prepared", "0", ">= 1", "nothing is prepared: no tokens");
  }
  const Range range = slice.value_or(Range{0, prepared.tokens()});
  if (range.begin < 0 || range.begin >= range.end || range.end > prepared.tokens()) {
    const std::string text = absl::StrCat("[", range.begin, ", ", range.end, ")");
    return Refuse(Reason::kSlice, "token_slice", text, absl::StrCat("within [0, ", prepared.tokens(), ")"),
                  absl::StrCat(text, " is no part of [0, ", prepared.tokens(), ")"));
  }
  call->prepared = prepared;
  call->prepared_first = range.begin;
  call->tokens = range.end - range.begin;
  int64_t first = 0;
  for (const PreparedSequence& kept : prepared.state()->sequences) {
    CheckedSequence sequence;
    sequence.start_pos = kept.start_pos;
    sequence.token_ids = kept.token_ids;
    sequence.token_mask = kept.token_mask;
    sequence.lookback = kept.lookback;
    sequence.at = first - range.begin;
    sequence.tokens = static_cast<int64_t>(kept.token_ids.size());
    first += sequence.tokens;
    call->sequences.push_back(std::move(sequence));
  }
  return absl::OkStatus();
}

}  // namespace engram::client
