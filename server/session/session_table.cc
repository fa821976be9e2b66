#include "server/session/session_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

// What a session costs besides its ids: the list node, the map slot, the key twice, malloc's own words.
constexpr int64_t kSessionOverheadBytes = 256;

std::string KeyOf(absl::string_view principal, absl::string_view session) {
  // The length keeps ("ab", "c") and ("a", "bc") apart.
  return absl::StrCat(principal.size(), ":", principal, session);
}

// The first position that a sequence at start_pos must know something about.
int64_t FirstNeeded(int64_t start_pos, int max_ngram) { return std::max<int64_t>(0, start_pos - (max_ngram - 1)); }

}  // namespace

void SessionTable::History::Reset(int64_t base) {
  base_ = base;
  skipped_ = 0;
  ids_.clear();
}

void SessionTable::History::Truncate(int64_t length) { ids_.resize(static_cast<size_t>(skipped_ + length - base_)); }

void SessionTable::History::Append(absl::Span<const int32_t> ids, int64_t window, int64_t first_kept) {
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  const int64_t surplus = std::min(size() - window, first_kept - base_);
  if (surplus <= 0) return;
  base_ += surplus;
  skipped_ += surplus;
  if (skipped_ * 4 > static_cast<int64_t>(ids_.size())) {
    ids_.erase(ids_.begin(), ids_.begin() + skipped_);
    skipped_ = 0;
    // A long prefill's capacity is not kept for a session that will only decode.
    if (static_cast<int64_t>(ids_.capacity()) > 2 * window) ids_.shrink_to_fit();
  }
}

SessionTable::SessionTable(SessionOptions options) : options_(std::move(options)) {}

SessionStats SessionTable::stats() const {
  absl::MutexLock lock(&mutex_);
  SessionStats stats = stats_;
  stats.sessions = static_cast<int64_t>(sessions_.size());
  stats.bytes = bytes_;
  return stats;
}

void SessionTable::Check(const SequenceClaim& claim, size_t index, const Session* session, Refusals& refusals) const {
  if (!claim.lookback.empty() || claim.start_pos == 0) return;
  const std::string field = absl::StrCat("sequences[", index, "].start_pos");
  const int before = options_.max_ngram - 1;
  if (claim.session.empty()) {
    refusals.Add({Reason::kLookbackLength, absl::StrCat("sequences[", index, "].lookback_token_ids"), "0",
                  absl::StrCat(before),
                  absl::StrCat("a stateless sequence at start_pos ", claim.start_pos, " needs ", before,
                               " look-back ids, got 0")});
    return;
  }
  if (session == nullptr) {
    refusals.Add({Reason::kSessionLost, field, absl::StrCat(claim.start_pos), "0",
                  absl::StrCat("this session is not known here and starts at position ", claim.start_pos,
                               ": send lookback_token_ids, or start at 0")});
    return;
  }
  const History& history = session->history;
  // A history that begins at 0 has nothing before it to know.
  const int64_t lowest = history.base() == 0 ? 0 : history.base() + before;
  if (claim.start_pos >= lowest && claim.start_pos <= history.length()) return;
  refusals.Add({Reason::kPositionGap, field, absl::StrCat(claim.start_pos),
                absl::StrCat("[", lowest, ", ", history.length(), "]"),
                absl::StrCat("session knows positions [", history.base(), ", ", history.length(), "); position ",
                             claim.start_pos, " needs the ", before, " before it: send lookback_token_ids")});
}

absl::StatusOr<std::vector<int32_t>> SessionTable::Commit(absl::string_view principal,
                                                          absl::Span<const SequenceClaim> claims) {
  const int before = options_.max_ngram - 1;
  const absl::Time now = options_.clock();
  absl::MutexLock lock(&mutex_);
  Evict(now, 0);

  Refusals refusals;
  std::vector<std::string> keys(claims.size());
  std::vector<int32_t> windows;
  size_t window_ids = 0;
  for (const SequenceClaim& claim : claims) window_ids += static_cast<size_t>(before) + claim.ids.size();
  windows.reserve(window_ids);
  for (size_t i = 0; i < claims.size(); ++i) {
    const SequenceClaim& claim = claims[i];
    const Session* session = nullptr;
    if (!claim.session.empty()) {
      keys[i] = KeyOf(principal, claim.session);
      const auto found = sessions_.find(keys[i]);
      if (found != sessions_.end()) session = &*found->second;
    }
    Check(claim, i, session, refusals);
    if (!refusals.empty()) continue;  // no windows of a refused call, but its other offenders
    if (!claim.lookback.empty()) {
      windows.insert(windows.end(), claim.lookback.begin(), claim.lookback.end());
    } else {
      for (int64_t pos = claim.start_pos - before; pos < claim.start_pos; ++pos) {
        windows.push_back(pos < 0 ? kernels::kDead : session->history.at(pos));
      }
    }
    windows.insert(windows.end(), claim.ids.begin(), claim.ids.end());
  }
  if (!refusals.empty()) return refusals.ToStatus();

  size_t written = 0;
  for (size_t i = 0; i < claims.size(); ++i) {
    if (claims[i].session.empty()) continue;
    Write(keys[i], claims[i], now);
    ++written;
  }
  Evict(now, written);
  return windows;
}

void SessionTable::Write(const std::string& key, const SequenceClaim& claim, absl::Time now) {
  auto [slot, born] = sessions_.try_emplace(key);
  if (born) {
    lru_.push_front(Session{key, {}, now, 0});
    slot->second = lru_.begin();
  } else {
    lru_.splice(lru_.begin(), lru_, slot->second);
  }
  Session& session = lru_.front();
  History& history = session.history;
  const int64_t first = FirstNeeded(claim.start_pos, options_.max_ngram);
  if (!claim.lookback.empty()) {
    // Look-back overrides what is stored. Where it says the same, what is older than it stays known.
    const absl::Span<const int32_t> told =
        absl::MakeConstSpan(claim.lookback).last(static_cast<size_t>(claim.start_pos - first));
    bool same = !born && history.base() <= first && history.length() >= claim.start_pos;
    for (size_t i = 0; same && i < told.size(); ++i) same = history.at(first + static_cast<int64_t>(i)) == told[i];
    if (!same) {
      history.Reset(first);
      history.Append(told, options_.window, first);
    }
  } else if (claim.start_pos == 0) {
    history.Reset(0);
  }
  history.Truncate(claim.start_pos);
  history.Append(claim.ids, options_.window, first);  // from `first` on: the call may have to be repeated

  session.last_used = now;
  const int64_t bytes = kSessionOverheadBytes + 2 * static_cast<int64_t>(key.size()) + history.bytes();
  bytes_ += bytes - session.bytes;
  session.bytes = bytes;
}

// `keep`: sessions at the front that the call at hand has just written.
void SessionTable::Evict(absl::Time now, size_t keep) {
  while (lru_.size() > keep && now - lru_.back().last_used > options_.ttl) {
    Forget(std::prev(lru_.end()));
    ++stats_.evicted_idle;
  }
  while (lru_.size() > keep && bytes_ > options_.memory_bytes) {
    Forget(std::prev(lru_.end()));
    ++stats_.evicted_memory;
  }
}

void SessionTable::Forget(Lru::iterator session) {
  bytes_ -= session->bytes;
  sessions_.erase(session->key);
  lru_.erase(session);
}

}  // namespace engram
