// The part that decides whose history this is: compressed-id histories of sequences, by (principal, session).
//
// A session knows positions [base, length). To hash position p the N-1 ids before it must be known (or lie before
// position 0); a call that asks for less-known ground is refused, never padded. Writing at start_pos replaces what
// stood there and truncates what lay behind it, so a speculative rollback, a prefix hit and a retry are all the same
// act.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace engram {

class Refusals;

struct SessionOptions {
  int max_ngram = 4;                        // N
  int64_t window = 8192;                    // positions kept per session, >= N - 1
  int64_t memory_bytes = int64_t{1} << 30;  // of all sessions; least recently used go first
  absl::Duration ttl = absl::Seconds(600);  // idle sessions go after it
  std::function<absl::Time()> clock = [] { return absl::Now(); };
};

// One sequence of a call: what it appends, and what it says of the past. Ids are compressed, kernels::kDead where
// masked or unmapped.
struct SequenceClaim {
  std::string session;            // empty: stateless
  int64_t start_pos = 0;          // >= 0
  std::vector<int32_t> ids;       // [T], T >= 1
  std::vector<int32_t> lookback;  // [N-1], oldest first; empty: not given
};

struct SessionStats {
  int64_t sessions = 0;
  int64_t bytes = 0;
  int64_t evicted_idle = 0;    // by the TTL, since the start
  int64_t evicted_memory = 0;  // by the memory bound, since the start
};

// Thread-safe.
class SessionTable {
 public:
  explicit SessionTable(SessionOptions options);

  // The commit point of a call: checks every claim against its history and, if none is refused, writes them all; a
  // refusal changes nothing and lists every offender. No session may stand in `claims` twice.
  //
  // Returns the windows of all claims, concatenated: for each, the N-1 ids before start_pos (kDead before position 0)
  // and then its own, oldest first. Refusals: SESSION_LOST, POSITION_GAP, LOOKBACK_LENGTH (a stateless sequence that
  // starts beyond 0 without look-back).
  absl::StatusOr<std::vector<int32_t>> Commit(absl::string_view principal, absl::Span<const SequenceClaim> claims);

  SessionStats stats() const;

 private:
  // The ids of positions [base, base + size). Dropping the oldest is amortised: they are skipped first and moved out of
  // the vector once they make up a quarter of it.
  class History {
   public:
    int64_t base() const { return base_; }
    int64_t length() const { return base_ + size(); }
    int64_t size() const { return static_cast<int64_t>(ids_.size()) - skipped_; }
    int32_t at(int64_t pos) const { return ids_[static_cast<size_t>(skipped_ + pos - base_)]; }
    int64_t bytes() const { return static_cast<int64_t>(ids_.capacity() * sizeof(int32_t)); }

    void Reset(int64_t base);
    void Truncate(int64_t length);
    // Keeps the last `window` positions, and more where `first_kept` lies before them.
    void Append(absl::Span<const int32_t> ids, int64_t window, int64_t first_kept);

   private:
    int64_t base_ = 0;
    int64_t skipped_ = 0;
    std::vector<int32_t> ids_;
  };

  struct Session {
    std::string key;
    History history;
    absl::Time last_used;
    int64_t bytes = 0;  // as counted in bytes_
  };
  using Lru = std::list<Session>;  // most recently used first

  void Check(const SequenceClaim& claim, size_t index, const Session* session, Refusals& refusals) const;
  void Write(const std::string& key, const SequenceClaim& claim, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Evict(absl::Time now, size_t keep) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Lru::iterator session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const SessionOptions options_;
  mutable absl::Mutex mutex_;
  Lru lru_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Lru::iterator> sessions_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  SessionStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace engram
