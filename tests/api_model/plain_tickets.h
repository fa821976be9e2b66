// What prepared results promise, in the plainest terms: a list, oldest first, and what ends an entry.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "tests/api_model/plain_compute.h"

namespace engram {

struct PlainTicket {
  std::string name;  // as the server calls it; empty until it has answered
  std::vector<PlainToken> tokens;
  std::set<int> layers;                 // prepared
  std::map<std::string, int64_t> ends;  // by session key: it depends on the positions below
  uint64_t stream = 0;
  int64_t bytes = 0;
  absl::Time born;
  std::set<std::pair<int, size_t>> applied;  // (layer, token)
  bool alive = true;
  int64_t died = -1;  // in this burst

  bool fully_applied() const {
    for (const int layer : layers) {
      for (size_t t = 0; t < tokens.size(); ++t) {
        if (!applied.contains({layer, t})) return false;
      }
    }
    return true;
  }
};

class PlainTickets {
 public:
  PlainTickets(int64_t memory_bytes, absl::Duration ttl) : memory_bytes_(memory_bytes), ttl_(ttl) {}

  int64_t memory_bytes() const { return memory_bytes_; }

  // Calls from now on are of that burst: what dies in it may be seen alive or dead by all of it.
  void BeginBurst(int64_t burst) { burst_ = burst; }
  bool DiedInThisBurst(const PlainTicket& ticket) const { return ticket.died == burst_; }

  void Expire(absl::Time now) {
    End([&](const PlainTicket& ticket) { return now - ticket.born > ttl_; });
  }

  // False: PREPARE_FULL. Those fully applied went in any case.
  bool MakeRoom(int64_t bytes) {
    for (PlainTicket& ticket : tickets_) {
      if (bytes <= memory_bytes_ - held()) return true;
      if (ticket.alive && ticket.fully_applied()) {
        Kill(ticket);
        ++squeezed_;
      }
    }
    return bytes <= memory_bytes_ - held();
  }

  PlainTicket& Add(PlainTicket ticket) { return tickets_.emplace_back(std::move(ticket)); }

  void RollBack(const std::string& key, int64_t from) {
    End([&](const PlainTicket& ticket) {
      const auto end = ticket.ends.find(key);
      return end != ticket.ends.end() && end->second > from;
    });
  }
  void EndStream(uint64_t stream) {
    End([&](const PlainTicket& ticket) { return stream != 0 && ticket.stream == stream; });
  }

  // Null where it never was.
  PlainTicket* Find(const std::string& name) {
    for (PlainTicket& ticket : tickets_) {
      if (!name.empty() && ticket.name == name) return &ticket;
    }
    return nullptr;
  }
  void Kill(PlainTicket& ticket) {
    ticket.alive = false;
    ticket.died = burst_;
  }

  const std::deque<PlainTicket>& all() const { return tickets_; }
  int64_t alive() const {
    int64_t count = 0;
    for (const PlainTicket& ticket : tickets_) count += ticket.alive;
    return count;
  }
  int64_t held() const {
    int64_t sum = 0;
    for (const PlainTicket& ticket : tickets_) sum += ticket.alive ? ticket.bytes : 0;
    return sum;
  }
  int squeezed() const { return squeezed_; }

  // Lets go of what has been dead for a while; names stay unknown after that, which is TICKET_EXPIRED as well.
  void Forget() {
    while (tickets_.size() > 48 && !tickets_.front().alive && tickets_.front().died < burst_) tickets_.pop_front();
  }

 private:
  template <typename Ends>
  void End(const Ends& ends) {
    for (PlainTicket& ticket : tickets_) {
      if (ticket.alive && ends(ticket)) Kill(ticket);
    }
  }

  const int64_t memory_bytes_;
  const absl::Duration ttl_;
  int64_t burst_ = 0;
  int squeezed_ = 0;
  std::deque<PlainTicket> tickets_;  // pointers to entries stay good while others are added
};

}  // namespace engram
