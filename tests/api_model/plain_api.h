// The step API in the plainest terms: histories as maps, tickets as a list, tokens computed one by one.
//
// Both drivers, in process and over the network, hold their answers against this. Independent of the server's decoding,
// batching, ticket store and encoding; the histories' rules are those of tests/session/plain_sessions.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engram/v1/engram.pb.h"
#include "server/refusal/refusal.h"
#include "tests/api_model/plain_compute.h"
#include "tests/api_model/plain_tickets.h"
#include "tests/session/plain_sessions.h"

namespace engram {

// A request with what is known to be wrong with it: at most one thing that can be told without history.
struct Planned {
  struct Fault {
    Reason reason;
    int sequence = -1;  // the call's own, else of this sequence
  };
  v1::StreamRequest request;
  uint64_t stream = 0;  // that carries it; 0: unary
  std::optional<Fault> fault;
};

// An answer without what no two servers share (epochs, texts).
struct Reply {
  std::string reason;                   // empty: served
  std::vector<v1::LayerOutput> layers;  // ascending by layer_id
  std::vector<std::string> statuses;    // of a partial call: one per sequence, empty where served
  std::string ticket;
  int32_t released = 0;
  int32_t closed = 0;
};

struct ExpectedReply {
  Reply reply;
  PlainTicket* used = nullptr;  // by ticket: TICKET_EXPIRED is right too where it dies in the same burst
  PlainTicket* made = nullptr;
  int32_t release_slack = 0;  // so many more may have been released: they die in the same burst
};

struct PlainApiOptions {
  int64_t session_window = 24;
  absl::Duration session_ttl = absl::Hours(24);
  int64_t prepare_memory_bytes = int64_t{1} << 30;
  absl::Duration ticket_ttl = absl::Hours(24);
};

// Not thread-safe.
class PlainApi {
 public:
  PlainApi(PlainCompute& compute, PlainApiOptions options);

  // What the call does and answers, at its turn.
  ExpectedReply Run(const Planned& planned, absl::Time now);
  // The memory bound has taken the least recently used sessions, so many.
  void Squeeze(int64_t sessions);

  static std::string KeyOf(const std::string& session) { return SessionTable::KeyOf("anonymous", session); }

  PlainCompute& compute() { return compute_; }
  const PlainModel& sessions() const { return sessions_; }
  PlainTickets& tickets() { return tickets_; }

 private:
  // A call by sequences, its history written.
  struct Committed {
    std::vector<PlainToken> tokens;  // of the served sequences
    std::vector<size_t> places;      // of each, among all tokens of the call
  };

  using Sequences = google::protobuf::RepeatedPtrField<v1::Sequence>;
  SequenceClaim ClaimOf(const v1::Sequence& sequence) const;
  std::optional<Committed> Commit(const Sequences& sequences, const Planned& planned, bool partial_ok, absl::Time now,
                                  Reply& reply);
  // Null, with the reason given, where there is no such ticket.
  PlainTicket* TicketFor(const std::string& name, absl::Time now, ExpectedReply& expected);

  void Apply(const v1::ApplyRequest& request, const Planned& planned, absl::Time now, ExpectedReply& expected);
  void Lookup(const v1::LookupRequest& request, const Planned& planned, absl::Time now, ExpectedReply& expected);
  void Prepare(const v1::PrepareRequest& request, const Planned& planned, absl::Time now, ExpectedReply& expected);
  void Release(const v1::ReleaseRequest& request, absl::Time now, ExpectedReply& expected);
  void Close(const v1::CloseSessionsRequest& request, ExpectedReply& expected);
  int LayerIndex(int32_t layer_id) const;

  PlainCompute& compute_;
  PlainModel sessions_;
  PlainTickets tickets_;
};

// The order in which layers are compared, whatever order a reply has them in.
void SortLayers(Reply& reply);

}  // namespace engram
