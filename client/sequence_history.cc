#include "client/sequence_history.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/refusal.h"

namespace engram::client {

namespace {

absl::Status StartsBeforeZero(int64_t start_pos, absl::string_view path) {
  return Refuse(Reason::kPositionGap, absl::StrCat(path, "start_pos"), absl::StrCat(start_pos), ">= 0",
                absl::StrCat("position ", start_pos, " lies before the sequence's start, 0"));
}

}  // namespace

SequenceHistory::SequenceHistory(int max_ngram) : max_ngram_(max_ngram) {}

absl::StatusOr<SequenceHistory> SequenceHistory::Seeded(int max_ngram, int64_t start_pos,
                                                        absl::Span<const int32_t> lookback) {
  const int64_t needed = max_ngram - 1;
  if (static_cast<int64_t>(lookback.size()) != needed) {
    return Refuse(Reason::kLookbackLength, "lookback", absl::StrCat(lookback.size()), absl::StrCat(needed),
                  absl::StrCat("look-back has ", lookback.size(), " ids, expected N-1 = ", needed));
  }
  if (start_pos < 0) return StartsBeforeZero(start_pos, "");
  for (int64_t i = 0; i < needed; ++i) {
    const int32_t id = lookback[i];
    const bool before = start_pos - 1 - i < 0;
    if (id < kDeadToken || (before && id != kDeadToken)) {
      return Refuse(Reason::kTokenOutOfRange, absl::StrCat("lookback[", i, "]"), absl::StrCat(id),
                    before ? "-1" : "a token id, or -1",
                    absl::StrCat("token id ", id,
                                 before ? " stands before the sequence's start: give -1 there" : " is below -1"));
    }
  }
  SequenceHistory history(max_ngram);
  const int64_t known = std::min(start_pos, needed);
  history.base_ = start_pos - known;
  history.ids_.assign(lookback.rend() - known, lookback.rend());
  return history;
}

absl::Status SequenceHistory::CheckStart(int64_t start_pos, absl::string_view path) const {
  if (start_pos < 0) return StartsBeforeZero(start_pos, path);
  const int64_t first = base_ > 0 ? base_ + max_ngram_ - 1 : 0;
  if (start_pos < first || start_pos > length()) {
    return Refuse(Reason::kPositionGap, absl::StrCat(path, "start_pos"), absl::StrCat(start_pos),
                  absl::StrCat("[", first, ", ", length(), "]"),
                  absl::StrCat("position ", start_pos, " needs the ", max_ngram_ - 1,
                               " ids before it, but the history knows positions [", base_, ", ", length(), ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> SequenceHistory::Lookback(int64_t start_pos) const {
  if (absl::Status status = CheckStart(start_pos, ""); !status.ok()) return status;
  std::vector<int32_t> lookback(max_ngram_ - 1, kDeadToken);
  for (int64_t i = 0; i < max_ngram_ - 1 && start_pos - 1 - i >= base_; ++i) {
    lookback[i] = ids_[start_pos - 1 - i - base_];
  }
  return lookback;
}

absl::Status SequenceHistory::CheckWrite(int64_t start_pos, absl::Span<const int32_t> token_ids,
                                         absl::Span<const uint8_t> token_mask, absl::string_view path) const {
  if (absl::Status status = CheckStart(start_pos, path); !status.ok()) return status;
  if (token_ids.empty()) {
    return Refuse(Reason::kEmptyCall, absl::StrCat(path, "token_ids"), "0", ">= 1",
                  "a sequence needs at least one token");
  }
  if (!token_mask.empty() && token_mask.size() != token_ids.size()) {
    return Refuse(Reason::kTokenMaskLength, absl::StrCat(path, "token_mask"), absl::StrCat(token_mask.size()),
                  absl::StrCat(token_ids.size()),
                  absl::StrCat("token_mask has ", token_mask.size(), " bytes for ", token_ids.size(), " tokens"));
  }
  for (size_t i = 0; i < token_ids.size(); ++i) {
    // A placeholder id (-1, -2) must not pass for a dead position: masking is said with the mask.
    if (token_ids[i] < 0) {
      return Refuse(Reason::kTokenOutOfRange, absl::StrCat(path, "token_ids[", i, "]"), absl::StrCat(token_ids[i]),
                    ">= 0", absl::StrCat("token id ", token_ids[i], " is below 0"));
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceHistory::Write(int64_t start_pos, absl::Span<const int32_t> token_ids,
                                    absl::Span<const uint8_t> token_mask) {
  if (absl::Status status = CheckWrite(start_pos, token_ids, token_mask); !status.ok()) return status;
  ids_.resize(start_pos - base_);
  ids_.insert(ids_.end(), token_ids.begin(), token_ids.end());
  for (size_t i = 0; i < token_mask.size(); ++i) {
    if (token_mask[i] == 0) ids_[start_pos - base_ + i] = kDeadToken;
  }
  return absl::OkStatus();
}

}  // namespace engram::client
