// The servers a client may use: who they are (DNS), whether they serve the model, which has the least to do.
//
// The first that answers GetModel, and has the digests given if any, fixes the model. Another one gets calls after it
// has answered with the same config_digest, and numerics_id unless allow_numerics_change; one that fails or restarts is
// asked again before it gets calls (replica_health.h). All servers are equal but for the tokens this client has in
// flight there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/completions.h"
#include "client/model_info.h"
#include "client/replica_health.h"
#include "client/resolve.h"
#include "grpcpp/channel.h"

namespace engram::client {

struct ReplicaOptions {
  // "host:port": every address that the name has is a replica; "unix:/path". Reached directly: proxies named in the
  // environment are not used.
  std::vector<std::string> targets = {};

  int channels_per_replica = 2;  // connections, 1..64

  // Until the first server answered GetModel; servers still starting are waited for.
  absl::Duration connect_timeout = absl::Seconds(10);

  // Between two look-ups of a name; sooner, at most once a second, when a replica was ejected.
  absl::Duration resolve_interval = absl::Seconds(30);

  // The hash_digest computed from the caller's own tokenizer and config, as 64 hex digits or 32 raw bytes: a server
  // with another one is another model. Empty: not checked.
  std::string hash_digest = {};

  // The config_digest (docs/formats.md) of the one model wanted, in the same form. Empty: that of the first server that
  // answers, so where targets serve different models it is chance which one counts.
  std::string config_digest = {};

  // The client's own ceiling for the tensors of one message. It bounds what a faulty server can make it allocate.
  int64_t max_message_bytes = int64_t{256} << 20;

  // Replicas of another numerics_id get calls too: a sequence's bits may change from one call to the next.
  bool allow_numerics_change = false;

  Ejection ejection = {};
};

// For people: a moment's state of one replica.
struct ReplicaStatus {
  std::string name;    // Address::name
  std::string target;  // which of ReplicaOptions::targets it came from
  ReplicaState state = ReplicaState::kNew;
  absl::Time ask_at;  // when it is asked GetModel again; InfiniteFuture: no need
  int64_t tokens_in_flight = 0;
  int calls_in_flight = 0;
  std::string numerics_id;    // empty until it answered
  uint64_t server_epoch = 0;  // 0 until it answered
  absl::Status last_error;    // why it is not serving; OK where it is
};

class Lease;
struct Replica;

// Thread-safe. The destructor cancels what is in flight and waits until every callback has returned, so it must not run
// in one. A look-up of DNS cannot be interrupted: one that takes longer than a second ends on its own, unheeded.
class ReplicaSet {
 public:
  using Resolver = std::function<absl::StatusOr<std::vector<Address>>(const std::string& target)>;

  // Blocks until one server has answered, or connect_timeout has passed, or every server has answered that it is
  // another model. INVALID_ARGUMENT for options; else the error names every target and why not: DIGEST_MISMATCH where
  // all have another digest than the one given, DEADLINE_EXCEEDED where all are connected and silent, mostly
  // UNAVAILABLE. `resolver` is asked for targets that DNS must answer, on a thread of the set, and may block.
  static absl::StatusOr<std::unique_ptr<ReplicaSet>> Connect(const ReplicaOptions& options,
                                                             Resolver resolver = ResolveTarget);

  ReplicaSet(const ReplicaSet&) = delete;
  ReplicaSet& operator=(const ReplicaSet&) = delete;
  ~ReplicaSet();

  // Of the first replica that answered; never changes.
  const ModelInfo& model() const;

  // Of the tensors of one message, and the tokens of one call: the smallest of the client's limit and those of all
  // replicas that have served so far. Never grow.
  int64_t max_message_bytes() const;
  int64_t max_call_tokens() const;

  struct Wish {
    int64_t weight_tokens = 0;  // what the call adds to its replica's load until the lease ends
    std::string only = {};      // this replica or none; empty: any
    // By name, the least unwelcome first: another one where there is one, else the first of these that serves.
    std::vector<std::string> avoid = {};
    bool never_avoided = false;  // rather none than one of `avoid`
  };

  // The replica with the fewest tokens in flight, ties in turn; one that drains only where no other serves.
  // UNAVAILABLE, naming every replica and why not, when there is none.
  absl::StatusOr<Lease> Choose(const Wish& wish);

  // No replica serves: asks the one that is due first, not one of `avoid` where there is another, and then calls `then`
  // with its name (on a thread of the set, or inline when it has just been asked): Choose may succeed now. False, and
  // `then` is not called, where there is none to ask or the set is ending.
  bool AskNow(const std::vector<std::string>& avoid, std::function<void(const std::string& name)> then);

  // A reply came with this server_epoch, which is not its Lease's. Whether it is that of the start that was asked last
  // and found good; a reply of another one may have another numerics_id's bits, and then the replica restarted
  // unnoticed and gets no calls until it is asked again.
  bool KnowsEpoch(absl::string_view replica, uint64_t server_epoch);

  // In the order of targets and addresses.
  std::vector<ReplicaStatus> Replicas() const;

  // Uniform in [0, 1).
  double Random();

  // For operations of those that hold a Work.
  Completions& completions();

  class Core;  // outlives the set while a call or a lease needs it

  // A call under way. The set's destructor calls `cancel` (once, at any time until this is gone) and waits for this.
  class Work {
   public:
    Work() = default;
    Work(Work&& other) noexcept;
    Work& operator=(Work&& other) = delete;
    ~Work();
    explicit operator bool() const { return core_ != nullptr; }

   private:
    friend class ReplicaSet;
    std::shared_ptr<Core> core_;
    uint64_t id_ = 0;
  };

  // False when the set is ending.
  Work Begin(std::function<void()> cancel);

 private:
  explicit ReplicaSet(std::shared_ptr<Core> core);
  const std::shared_ptr<Core> core_;
};

// A replica chosen for one call. Its tokens count until this is gone; may outlive the set. Move-only, not thread-safe.
class Lease {
 public:
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease();

  const std::string& replica() const;  // its name
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  uint64_t server_epoch() const { return server_epoch_; }  // of the start that was asked and found good

  // How the call ended, at most once; a call that was cancelled has shown nothing and is not reported.
  // `draining`: the reply had the trailer engram-draining.
  void Report(const absl::Status& status, bool draining);

 private:
  friend class ReplicaSet::Core;
  Lease() = default;

  std::shared_ptr<ReplicaSet::Core> core_;  // null: moved from
  std::shared_ptr<Replica> replica_;
  std::shared_ptr<grpc::Channel> channel_;
  int64_t tokens_ = 0;
  int generation_ = 0;  // of the replica's connections
  uint64_t server_epoch_ = 0;
};

}  // namespace engram::client
