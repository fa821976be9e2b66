// What the session table promises, in the plainest terms: maps from position to id. Slow, and not thread-safe.
#pragma once

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/kernels.h"
#include "server/refusal/refusal.h"
#include "server/session/session_table.h"

namespace engram {

// The ids a session knows, by position, consecutive.
using Known = std::map<int64_t, int32_t>;

struct PlainSession {
  Known known;
  std::optional<uint64_t> step;
  absl::Time used;
};

struct Expected {
  std::vector<std::optional<Reason>> refused;  // one per claim
  bool served = true;                          // the call
  std::vector<int32_t> windows;
  std::map<std::string, int64_t> rollbacks;
  std::vector<std::string> expired;  // in order
  std::set<std::string> written;
};

class PlainModel {
 public:
  // What a window shows of an id.
  static int32_t Seen(int32_t id) { return id < 0 ? kernels::kDead : id; }

  PlainModel(int n, int64_t window, absl::Duration ttl) : before_(n - 1), window_(window), ttl_(ttl) {}

  Expected Commit(const std::string& principal, const std::vector<SequenceClaim>& claims, bool partial_ok,
                  absl::Time now) {
    Expected expected;
    std::map<std::string, PlainSession> old = sessions_;  // as it was before this call, the expired left out
    std::erase_if(old, [&](const auto& entry) { return now - entry.second.used > ttl_; });
    for (const SequenceClaim& claim : claims) {
      expected.refused.push_back(Refusal(principal, claim, old));
      if (expected.refused.back().has_value() && !partial_ok) expected.served = false;
    }
    if (!expected.served) return expected;

    for (const std::string& key : std::list<std::string>(recency_)) {
      if (!old.contains(key)) {
        expected.expired.push_back(key);
        Forget(key);
      }
    }
    for (size_t i = 0; i < claims.size(); ++i) {
      const std::string parent = SessionTable::KeyOf(principal, claims[i].fork_from);
      if (!expected.refused[i].has_value() && !claims[i].fork_from.empty()) Use(parent, now);
    }
    for (size_t i = 0; i < claims.size(); ++i) {
      const SequenceClaim& claim = claims[i];
      if (expected.refused[i].has_value()) {
        expected.windows.insert(expected.windows.end(), static_cast<size_t>(before_) + claim.ids.size(),
                                kernels::kDead);
        continue;
      }
      const Known past = Past(principal, claim, old);
      for (int64_t pos = claim.start_pos - before_; pos < claim.start_pos; ++pos) {
        expected.windows.push_back(past.contains(pos) ? Seen(past.at(pos)) : kernels::kDead);
      }
      for (const int32_t id : claim.ids) expected.windows.push_back(Seen(id));
      if (claim.session.empty()) continue;
      const std::string key = SessionTable::KeyOf(principal, claim.session);
      expected.written.insert(key);
      Write(key, claim, past, expected);
      Use(key, now);
    }
    return expected;
  }

  void Forget(const std::string& key) {
    sessions_.erase(key);
    recency_.remove(key);
  }

  const PlainSession* Find(const std::string& key) const {
    const auto found = sessions_.find(key);
    return found == sessions_.end() ? nullptr : &found->second;
  }
  int64_t LengthOf(const std::string& key) const {
    const PlainSession* session = Find(key);
    return session == nullptr ? 0 : session->known.rbegin()->first + 1;
  }
  size_t size() const { return sessions_.size(); }
  const std::list<std::string>& recency() const { return recency_; }  // least recent first

 private:
  // All that the claim may look back on: what it tells, or what its parent or its own session knew up to start_pos.
  Known Past(const std::string& principal, const SequenceClaim& claim,
             const std::map<std::string, PlainSession>& old) const {
    Known past;
    if (claim.start_pos == 0) return past;
    if (!claim.lookback.empty()) {
      for (int64_t j = 1; j <= before_ && claim.start_pos - j >= 0; ++j) {
        past[claim.start_pos - j] = claim.lookback[static_cast<size_t>(before_ - j)];
      }
      return past;
    }
    const std::string& source = claim.fork_from.empty() ? claim.session : claim.fork_from;
    if (source.empty()) return past;
    past = old.at(SessionTable::KeyOf(principal, source)).known;
    past.erase(past.lower_bound(claim.start_pos), past.end());
    return past;
  }

  std::optional<Reason> Refusal(const std::string& principal, const SequenceClaim& claim,
                                const std::map<std::string, PlainSession>& old) const {
    const auto own = old.find(SessionTable::KeyOf(principal, claim.session));
    const bool known = !claim.session.empty() && own != old.end();
    if (known && claim.step.has_value() && own->second.step.has_value() && *claim.step < *own->second.step) {
      return Reason::kStaleStep;
    }
    const auto source = claim.fork_from.empty() ? own : old.find(SessionTable::KeyOf(principal, claim.fork_from));
    if (!claim.fork_from.empty() && source == old.end()) return Reason::kSessionLost;
    if (!claim.lookback.empty() || claim.start_pos == 0) return std::nullopt;
    if (claim.session.empty()) return Reason::kLookbackLength;
    if (source == old.end()) return Reason::kSessionLost;
    for (int64_t pos = std::max<int64_t>(0, claim.start_pos - before_); pos < claim.start_pos; ++pos) {
      if (!source->second.known.contains(pos)) return Reason::kPositionGap;
    }
    return std::nullopt;
  }

  void Write(const std::string& key, const SequenceClaim& claim, const Known& past, Expected& expected) {
    const bool born = !sessions_.contains(key);
    PlainSession& session = sessions_[key];
    const Known before = session.known;
    Known after = past;
    const bool told = claim.fork_from.empty() && (claim.start_pos == 0 || !claim.lookback.empty());
    if (told) {
      // Look-back that agrees leaves what is older; a dead entry of it leaves what is masked.
      bool agrees = claim.start_pos > 0 || before.contains(0);
      for (auto& [pos, id] : after) {
        const bool same = before.contains(pos) && Seen(before.at(pos)) == Seen(id);
        if (same) id = before.at(pos);
        agrees &= same;
      }
      if (agrees) after.insert(before.begin(), before.lower_bound(claim.start_pos));
    }
    for (size_t i = 0; i < claim.ids.size(); ++i) after[claim.start_pos + static_cast<int64_t>(i)] = claim.ids[i];

    if (!born) {
      std::set<int64_t> changed;
      for (const auto& [pos, id] : before) {
        if (!after.contains(pos) || after.at(pos) != id) changed.insert(pos);
      }
      for (const auto& [pos, id] : after) {
        if (pos < before.begin()->first) changed.insert(pos);
      }
      if (!changed.empty()) expected.rollbacks[key] = *changed.begin();
    }
    // The window, and at least what a repetition of this call needs.
    const int64_t kept = std::max(window_, static_cast<int64_t>(claim.ids.size()) + before_);
    while (static_cast<int64_t>(after.size()) > kept) after.erase(after.begin());
    session.known = after;
    if (claim.step.has_value()) session.step = claim.step;
  }

  void Use(const std::string& key, absl::Time now) {
    sessions_.at(key).used = now;
    recency_.remove(key);
    recency_.push_back(key);
  }

  const int64_t before_;
  const int64_t window_;
  const absl::Duration ttl_;
  std::map<std::string, PlainSession> sessions_;
  std::list<std::string> recency_;
};

}  // namespace engram
