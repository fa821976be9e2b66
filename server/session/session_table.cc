#include "server/session/session_table.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"

namespace engram {
namespace {

// What a session costs besides its ids and its name: its list node (the session and two links), its map slot (a view,
// an iterator and a control byte, at the 7/16 fill that follows a doubling: 25 * 16 / 7 = 57) and malloc's header of
// node and ring, 8 bytes each and rounded up to 16.
template <typename Session>
constexpr int64_t kSessionOverheadBytes = static_cast<int64_t>(sizeof(Session)) + 16 + 57 + 32;

// A name that does not fit into the string itself.
int64_t NameBytes(const std::string& key) {
  constexpr size_t kInPlace = 15;
  return key.capacity() > kInPlace ? static_cast<int64_t>(key.capacity()) + 16 : 0;
}

// The first position that a sequence at start_pos must know something about.
int64_t FirstNeeded(int64_t start_pos, int max_ngram) { return std::max<int64_t>(0, start_pos - (max_ngram - 1)); }

// What the hash sees of a kept id.
int32_t InWindow(int32_t id) { return id == kMasked ? kernels::kDead : id; }

// Whether a look-back entry, which cannot tell masked from unmapped, says the same as a kept id.
bool Agrees(int32_t told, int32_t kept) { return InWindow(told) == InWindow(kept); }

}  // namespace

SessionTable::SessionTable(SessionOptions options) : options_(std::move(options)) {}

std::string SessionTable::KeyOf(absl::string_view principal, absl::string_view session) {
  // The length keeps ("ab", "c") and ("a", "bc") apart.
  return absl::StrCat(principal.size(), ":", principal, session);
}

SessionStats SessionTable::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  SessionStats stats = stats_;
  stats.sessions = static_cast<int64_t>(sessions_.size());
  stats.bytes = bytes_;
  return stats;
}

absl::StatusOr<CommitResult> SessionTable::Commit(absl::string_view principal, absl::Span<const SequenceClaim> claims,
                                                  bool partial_ok) {
  const std::lock_guard<std::mutex> lock(mutex_);
  now_ = std::max(now_, options_.clock());

  CommitResult result;
  Refusals refusals;
  std::vector<Plan> plans;
  plans.reserve(claims.size());
  const auto before = static_cast<size_t>(options_.max_ngram - 1);
  size_t window_ids = 0;
  for (const SequenceClaim& claim : claims) window_ids += before + claim.ids.size();
  result.windows.reserve(window_ids);
  for (size_t i = 0; i < claims.size(); ++i) {
    Plan& plan = plans.emplace_back(MakePlan(principal, claims[i]));
    std::optional<Offender> offender = Check(claims[i], claims[i].index.value_or(i), plan);
    if (!offender.has_value()) {
      AppendWindow(claims[i], plan, result.windows);
      continue;
    }
    plan.served = false;
    result.windows.insert(result.windows.end(), before + claims[i].ids.size(), kernels::kDead);
    if (partial_ok) {
      result.refused.resize(claims.size());
      result.refused[i] = Refuse(*std::move(offender));
    } else {
      refusals.Add(*std::move(offender));
    }
  }
  if (!refusals.empty()) return refusals.ToStatus();

  // Expired sessions are end() in every plan, so none of them is of use to this call.
  while (!lru_.empty() && Expired(lru_.back())) {
    result.forgotten.push_back(Forget(std::prev(lru_.end())));
    ++stats_.evicted_idle;
  }
  // All that forks copy is copied, and the parents are touched, before anything is written.
  for (size_t i = 0; i < claims.size(); ++i) {
    Plan& plan = plans[i];
    if (!plan.served || !plan.forks) continue;
    if (claims[i].start_pos > 0) plan.past = plan.parent->history.Prefix(claims[i].start_pos);
    Touch(plan.parent);
  }
  size_t written = 0;
  for (size_t i = 0; i < claims.size(); ++i) {
    if (!plans[i].served || plans[i].key.empty()) continue;
    Write(claims[i], plans[i], result);
    ++written;
  }
  // The sessions just written lead the list and stay.
  while (lru_.size() > written && bytes_ > options_.memory_bytes) {
    result.forgotten.push_back(Forget(std::prev(lru_.end())));
    ++stats_.evicted_memory;
  }
  return result;
}

std::vector<std::string> SessionTable::Close(absl::string_view principal, absl::Span<const std::string> sessions) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::string> closed;
  for (const std::string& session : sessions) {
    ++stats_.visits;
    const auto found = sessions_.find(KeyOf(principal, session));
    if (found != sessions_.end()) closed.push_back(Forget(found->second));
  }
  return closed;
}

SessionTable::Plan SessionTable::MakePlan(absl::string_view principal, const SequenceClaim& claim) {
  Plan plan;
  plan.own = plan.parent = lru_.end();
  if (claim.session.empty()) return plan;
  plan.key = KeyOf(principal, claim.session);
  plan.own = Find(plan.key);
  plan.forks = !claim.fork_from.empty() && claim.lookback.empty();
  if (plan.forks) plan.parent = Find(KeyOf(principal, claim.fork_from));
  return plan;
}

std::optional<Offender> SessionTable::Check(const SequenceClaim& claim, size_t index, const Plan& plan) const {
  const std::string path = absl::StrCat("sequences[", index, "]");
  const int before = options_.max_ngram - 1;
  const bool known = plan.own != lru_.end();
  if (known && claim.step.has_value() && plan.own->step.has_value() && *claim.step < *plan.own->step) {
    return Offender{Reason::kStaleStep, absl::StrCat(path, ".step"), absl::StrCat(*claim.step),
                    absl::StrCat(">= ", *plan.own->step),
                    absl::StrCat("this session has been written at step ", *plan.own->step, ", this call is of step ",
                                 *claim.step, ": it comes too late")};
  }
  if (plan.forks && plan.parent == lru_.end()) {
    return Offender{Reason::kSessionLost, absl::StrCat(path, ".fork_from"),
                    absl::StrCat(claim.fork_from.size(), " bytes"), "a known session",
                    "the session to fork from is not known here: send lookback_token_ids instead"};
  }
  if (!claim.lookback.empty() || claim.start_pos == 0) return std::nullopt;
  if (claim.session.empty()) {
    return Offender{Reason::kLookbackLength, absl::StrCat(path, ".lookback_token_ids"), "0", absl::StrCat(before),
                    absl::StrCat("a stateless sequence at start_pos ", claim.start_pos, " needs ", before,
                                 " look-back ids, got 0")};
  }
  const std::string field = absl::StrCat(path, ".start_pos");
  if (!plan.forks && !known) {
    return Offender{Reason::kSessionLost, field, absl::StrCat(claim.start_pos), "0",
                    absl::StrCat("this session is not known here and starts at position ", claim.start_pos,
                                 ": send lookback_token_ids, or start at 0")};
  }
  const History& history = plan.forks ? plan.parent->history : plan.own->history;
  // A history that begins at 0 has nothing before it to know.
  const int64_t lowest = history.base() == 0 ? 0 : history.base() + before;
  if (claim.start_pos >= lowest && claim.start_pos <= history.length()) return std::nullopt;
  return Offender{Reason::kPositionGap, field, absl::StrCat(claim.start_pos),
                  absl::StrCat("[", lowest, ", ", history.length(), "]"),
                  absl::StrCat(plan.forks ? "the session to fork from" : "session", " knows positions [",
                               history.base(), ", ", history.length(), "); position ", claim.start_pos, " needs the ",
                               before, " before it: send lookback_token_ids")};
}

void SessionTable::AppendWindow(const SequenceClaim& claim, const Plan& plan, std::vector<int32_t>& windows) const {
  if (!claim.lookback.empty()) {
    for (const int32_t id : claim.lookback) windows.push_back(InWindow(id));
  } else {
    for (int64_t pos = claim.start_pos - (options_.max_ngram - 1); pos < claim.start_pos; ++pos) {
      windows.push_back(pos < 0 ? kernels::kDead : InWindow((plan.forks ? plan.parent : plan.own)->history.at(pos)));
    }
  }
  for (const int32_t id : claim.ids) windows.push_back(InWindow(id));
}

void SessionTable::Write(const SequenceClaim& claim, Plan& plan, CommitResult& result) {
  const bool born = plan.own == lru_.end();
  if (born) {
    lru_.push_front(Session{std::move(plan.key), History(), std::nullopt, now_, 0});
    plan.own = lru_.begin();
    sessions_.emplace(plan.own->key, plan.own);
  }
  Touch(plan.own);
  Session& session = *plan.own;
  const std::optional<int64_t> from = WriteHistory(claim, plan, born);
  if (from.has_value()) result.rollbacks.push_back({session.key, *from});
  if (claim.step.has_value()) session.step = claim.step;

  const int64_t bytes = kSessionOverheadBytes<Session> + NameBytes(session.key) + session.history.bytes();
  bytes_ += bytes - session.bytes;
  session.bytes = bytes;
}

// Returns the first position that is rolled back.
std::optional<int64_t> SessionTable::WriteHistory(const SequenceClaim& claim, Plan& plan, bool born) const {
  History& history = plan.own->history;
  const int64_t first = FirstNeeded(claim.start_pos, options_.max_ngram);
  const bool starts = !claim.lookback.empty() || claim.start_pos == 0;
  if (!plan.forks) {
    // Look-back overrides what is stored. Where it says the same, what is older than it stays known.
    absl::Span<const int32_t> told;
    if (!claim.lookback.empty()) {
      told = absl::MakeConstSpan(claim.lookback).last(static_cast<size_t>(claim.start_pos - first));
    }
    bool keeps = !born;
    if (starts) keeps = keeps && history.base() <= first && history.length() >= claim.start_pos;
    for (size_t i = 0; keeps && i < told.size(); ++i) {
      keeps = Agrees(told[i], history.at(first + static_cast<int64_t>(i)));
    }
    if (keeps) {
      const std::optional<int64_t> from = history.FirstChange(claim.start_pos, claim.ids);
      history.Truncate(claim.start_pos);
      history.Append(claim.ids, WindowOf(claim));
      return from;
    }
    std::vector<int32_t> past(told.begin(), told.end());
    for (size_t i = 0; i < past.size(); ++i) {
      const int64_t pos = first + static_cast<int64_t>(i);
      const bool has = pos >= history.base() && pos < history.length();
      if (has && Agrees(past[i], history.at(pos))) past[i] = history.at(pos);  // masked stays masked
    }
    plan.past = History(first);
    plan.past.Append(past, options_.window);
  }
  const std::optional<int64_t> from = born ? std::nullopt : history.FirstChange(plan.past, claim.ids);
  history = std::move(plan.past);
  history.Append(claim.ids, WindowOf(claim));
  return from;
}

// What is kept after a call: the window, and at least what a repetition of the call needs.
int64_t SessionTable::WindowOf(const SequenceClaim& claim) const {
  return std::max(options_.window, static_cast<int64_t>(claim.ids.size()) + options_.max_ngram - 1);
}

// The session of that key unless it has expired; end() then.
SessionTable::Lru::iterator SessionTable::Find(const std::string& key) {
  ++stats_.visits;
  const auto found = sessions_.find(key);
  return found == sessions_.end() || Expired(*found->second) ? lru_.end() : found->second;
}

void SessionTable::Touch(Lru::iterator session) {
  ++stats_.visits;
  lru_.splice(lru_.begin(), lru_, session);
  session->last_used = now_;
}

std::string SessionTable::Forget(Lru::iterator session) {
  ++stats_.visits;
  bytes_ -= session->bytes;
  sessions_.erase(session->key);
  std::string key = std::move(session->key);
  lru_.erase(session);
  return key;
}

bool SessionTable::Expired(const Session& session) const { return now_ - session.last_used > options_.ttl; }

}  // namespace engram
