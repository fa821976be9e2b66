// The part that decides whose history this is: compressed-id histories of sequences, by (principal, session).
//
// A session knows positions [base, length). To hash position p the N-1 ids before it must be known (or lie before
// position 0); a call that asks for less-known ground is refused, never padded. Writing at start_pos replaces what
// stood there and truncates what lay behind it, so a speculative rollback, a prefix hit and a retry are all the same
// act.
//
// A session is born by a call with start_pos 0, with look-back or with fork_from, and ends by Close, by the TTL or by
// the memory bound. One that has outlived the TTL is unknown at once; the next call that is served clears it away.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/refusal/refusal.h"
#include "server/session/history.h"

namespace engram {

// In a claim's ids: masked by the caller. A history keeps it apart from a live token that the map has no id for
// (kernels::kDead); in a window both are kernels::kDead.
inline constexpr int32_t kMasked = -2;

struct SessionOptions {
  int max_ngram = 4;                        // N
  int64_t window = 8192;                    // positions kept per session, >= N - 1
  int64_t memory_bytes = int64_t{1} << 30;  // of all sessions; least recently used go first
  absl::Duration ttl = absl::Seconds(600);  // idle sessions go after it
  // Only differences matter. Steady: setting the machine's clock must forget nobody.
  std::function<absl::Time()> clock = [] {
    return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  };
};

// One sequence of a call: what it appends, and what it says of the past. Ids are compressed, kMasked where masked,
// kernels::kDead where unmapped.
struct SequenceClaim {
  std::string session;              // empty: stateless
  int64_t start_pos = 0;            // >= 0
  std::vector<int32_t> ids;         // [T], T >= 1
  std::vector<int32_t> lookback{};  // [N-1], oldest first; empty: not given. kDead agrees with masked and with unmapped
  std::optional<uint64_t> step{};   // of the client's own counting
  std::string fork_from{};          // the parent's session; empty: none. Not heeded with look-back or without a session
  std::optional<size_t> index{};    // in the call, as refusals name it; not given: its place among the claims
};

// Positions >= `from` of a session are no longer what they were before the call.
struct Rollback {
  std::string key;
  int64_t from = 0;
};

struct CommitResult {
  // Of all claims, concatenated: for each, the N-1 ids before start_pos (kernels::kDead before position 0) and then its
  // own, oldest first. A refused claim's are all kernels::kDead.
  std::vector<int32_t> windows;
  // Empty where every claim is served; else one per claim, OK = served.
  std::vector<absl::Status> refused;
  // At most one per session, only of sessions that were known before and still are.
  std::vector<Rollback> rollbacks;
  // Keys of sessions that the TTL or the memory bound took. One of them may stand in the call: then it was gone before
  // the call was written, and is born anew.
  std::vector<std::string> forgotten;
};

struct SessionStats {
  int64_t sessions = 0;
  int64_t bytes = 0;           // kept ids and what each session costs besides
  int64_t evicted_idle = 0;    // by the TTL, since the start
  int64_t evicted_memory = 0;  // by the memory bound, since the start
  int64_t visits = 0;          // sessions looked up, moved or removed, since the start: what calls cost
};

// Thread-safe.
class SessionTable {
 public:
  explicit SessionTable(SessionOptions options);

  // Names a session of a principal, everywhere outside this table too; no two pairs share a key.
  static std::string KeyOf(absl::string_view principal, absl::string_view session);

  // The commit point of a call: checks every claim against the histories as they are before the call and writes those
  // that pass. Unless `partial_ok`, one refusal refuses the call, lists every offender and changes nothing at all; with
  // it, a refused claim changes nothing and the others are served. No session may stand in `claims` twice.
  //
  // Costs the tokens written, the ids that forks copy, and the sessions named or evicted; never those merely held.
  //
  // Steps: a session remembers the highest it was given, whatever else the call says of it: also a restart at 0,
  // look-back and a fork into it are refused below that. A fork does not inherit its parent's.
  // Forks: the child becomes the parent's history up to start_pos, as it was before the call, whoever else writes the
  // parent; a fork counts as a use of the parent. A session forked from itself is merely continued at start_pos.
  // Rollbacks: ids that are written again as they were, masks too, are none. A session that begins elsewhere than
  // before (a restart after its first positions were dropped, look-back that contradicts it or reaches below its base)
  // is rolled back to the lower of both bases: there is nothing left to compare with.
  //
  // Refusals: STALE_STEP, SESSION_LOST (of sequences[i].start_pos, or of fork_from), POSITION_GAP, LOOKBACK_LENGTH (a
  // stateless sequence that starts beyond 0 without look-back).
  absl::StatusOr<CommitResult> Commit(absl::string_view principal, absl::Span<const SequenceClaim> claims,
                                      bool partial_ok);

  // Forgets these sessions of the principal now; the keys of those that were here.
  std::vector<std::string> Close(absl::string_view principal, absl::Span<const std::string> sessions);

  SessionStats stats() const;

 private:
  struct Session {
    std::string key;
    History history;
    std::optional<uint64_t> step;
    absl::Time last_used;
    int64_t bytes = 0;  // as counted in bytes_
  };
  using Lru = std::list<Session>;  // most recently used first

  // A claim and what it stands on.
  struct Plan {
    std::string key;       // empty: stateless
    bool forks = false;    // fork_from is to be heeded
    Lru::iterator own;     // end() where unknown
    Lru::iterator parent;  // of a fork; end() where unknown
    History past;          // of a fork: what it copies
    bool served = true;
  };

  Plan MakePlan(absl::string_view principal, const SequenceClaim& claim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t WindowOf(const SequenceClaim& claim) const;
  std::optional<Offender> Check(const SequenceClaim& claim, size_t index, const Plan& plan) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AppendWindow(const SequenceClaim& claim, const Plan& plan, std::vector<int32_t>& windows) const;
  void Write(const SequenceClaim& claim, Plan& plan, CommitResult& result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<int64_t> WriteHistory(const SequenceClaim& claim, Plan& plan, bool born) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Lru::iterator Find(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Touch(Lru::iterator session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Forget(Lru::iterator session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Expired(const Session& session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const SessionOptions options_;
  // Not absl::Mutex: ThreadSanitizer sees nothing of the one in an uninstrumented library.
  mutable std::mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // of the last call; never runs back
  Lru lru_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<absl::string_view, Lru::iterator> sessions_ ABSL_GUARDED_BY(mutex_);  // keys live in lru_
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  SessionStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace engram
