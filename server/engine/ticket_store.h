// Prepared results, kept until they are used, released, outlived or rolled back.
//
// A ticket is 24 bytes: the server's epoch, a number, and a random word that makes it unguessable. It belongs to one
// principal. It lives until its TTL, its release, the end of the stream that made it, a rollback below its positions or
// the end of its session; a gone ticket is TICKET_EXPIRED, never stale bits.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/engine/prepared.h"

namespace engram {

struct TicketOptions {
  uint64_t epoch = 0;
  int64_t memory_bytes = int64_t{1} << 30;
  absl::Duration ttl = absl::Seconds(10);
  std::function<absl::Time()> clock = [] { return absl::Now(); };
};

// Positions that a prepared result depends on: those of a session below `end`.
struct TicketSpan {
  std::string session_key;
  int64_t end = 0;
};

struct TicketStats {
  int64_t tickets = 0;
  int64_t bytes = 0;
};

// Thread-safe.
class TicketStore {
 public:
  explicit TicketStore(TicketOptions options);

  // Makes room for a result of `bytes` that is about to be computed, and its ticket, which answers nothing until
  // Fill(). Where memory is short, tickets that were applied in full go first, the oldest first; then PREPARE_FULL.
  // `stream`: the stream that makes it, 0 for none.
  absl::StatusOr<std::string> Reserve(absl::string_view principal, int64_t bytes, uint64_t stream);
  // What the result depends on, once its own call's histories are written.
  void Bind(const std::string& ticket, std::vector<TicketSpan> spans);
  // The result is there. Nothing happens to a ticket that is gone meanwhile.
  void Fill(const std::string& ticket, std::shared_ptr<const Prepared> prepared);

  // The result; TICKET_EXPIRED for anything that is not a good ticket of this principal.
  absl::StatusOr<std::shared_ptr<const Prepared>> Get(absl::string_view principal, absl::string_view ticket) const;

  // Tokens [first, first + tokens) of a layer were applied by this ticket: once every token of every layer was, however
  // often, it is among the first to go when memory is short. The tokens are within the prepared ones.
  void Applied(absl::string_view ticket, int layer, int64_t first, int64_t tokens);

  // True where the ticket was good.
  bool Release(absl::string_view principal, absl::string_view ticket);
  void EndStream(uint64_t stream);

  // Positions from `from` on of a session are no longer what they were: tickets that depend on them go.
  void RollBack(const std::string& session_key, int64_t from);

  TicketStats stats();

 private:
  struct Entry {
    std::string ticket, principal;
    std::shared_ptr<const Prepared> prepared;
    std::vector<TicketSpan> spans;
    uint64_t stream = 0;
    int64_t bytes = 0;
    absl::Time born;
    absl::flat_hash_map<int, std::vector<bool>> applied;  // by layer, for each token
    bool fully_applied = false;
  };
  using Entries = std::list<Entry>;  // oldest first

  void Expire() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Entries::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const TicketOptions options_;
  mutable std::mutex mutex_;  // as in SessionTable
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Entries::iterator> by_ticket_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, absl::flat_hash_set<std::string>> by_session_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, absl::flat_hash_set<std::string>> by_stream_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace engram
