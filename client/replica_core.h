// What a ReplicaSet is made of: the table of replicas under one lock, a thread that asks those that are due, and one
// that looks names up. Shared by the set, its leases, and every callback under way.
//
// No gRPC function is called under the lock. replica_core.cc has the table, replica_asking.cc and replica_names.cc the
// rest.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "client/model_query.h"
#include "client/replica_set.h"

namespace engram::client {

// Under the lock of its Core but for what is const.
struct Replica {
  Replica(Address at, std::string found_by, const Ejection& ejection, absl::Time now)
      : address(std::move(at)), target(std::move(found_by)), health(ejection, now) {}

  // What the server is told it was called by: the caller's name for it, which a unix socket has not.
  std::string authority() const { return target == address.uri ? "" : target; }

  const Address address;
  const std::string target;
  ReplicaHealth health;

  std::vector<std::shared_ptr<grpc::Channel>> channels;  // taken in turn; none until it serves
  int64_t message_bytes = 0;                             // that the channels let pass
  size_t next_channel = 0;
  int generation = 0;  // of the channels: what older ones report is of the past

  int64_t tokens = 0;
  int calls = 0;
  uint64_t last_chosen = 0;

  bool asking = false;
  std::shared_ptr<grpc::ClientContext> query;                         // the last question, to cancel it
  absl::Time asked = absl::InfinitePast();                            // when the last answer came
  std::vector<std::function<void(const std::string& name)>> waiting;  // for the answer

  std::string numerics_id;    // of the last answer, whatever came of it
  uint64_t server_epoch = 0;  // likewise
  // Of the start that was judged good last; none where what answered since is another model or of other numerics.
  absl::optional<uint64_t> good_epoch;
  absl::Status last_error;
};

class ReplicaSet::Core : public std::enable_shared_from_this<ReplicaSet::Core> {
 public:
  // Digests are raw, or empty.
  Core(const ReplicaOptions& options, std::string hash_digest, std::string config_digest, Resolver resolver);

  // Once, before anything else. Returns when a replica has answered or none will by connect_timeout.
  absl::Status Start();
  // Once, after which nothing of the set runs any more.
  void Stop();

  // Set by Start, and constant then.
  const ModelInfo& model() const { return *model_; }

  int64_t max_message_bytes() const;
  int64_t max_call_tokens() const;
  absl::StatusOr<Lease> Choose(const Wish& wish);
  bool AskNow(const std::vector<std::string>& avoid, std::function<void(const std::string& name)> then);
  bool KnowsEpoch(absl::string_view replica, uint64_t server_epoch);
  std::vector<ReplicaStatus> Replicas() const;
  double Random();
  Completions& completions() { return *completions_; }

  uint64_t Begin(std::function<void()> cancel);  // 0: ending
  void End(uint64_t work);

  // Of a Lease.
  void Report(Replica& replica, int generation, const absl::Status& status, bool unreachable, bool draining);
  void Return(Replica& replica, int64_t tokens);

 private:
  struct Target {
    std::string name;
    bool literal = false;                                             // needs no DNS
    absl::optional<absl::StatusOr<std::vector<Address>>> found = {};  // the last look-up that found any, else the last
  };

  void AskWhenDue();   // the thread
  void LookUpNames();  // the thread
  void LookUp(size_t target);
  // Makes replicas_ those of targets_. Returns what must be destroyed without the lock.
  std::vector<std::shared_ptr<Replica>> FollowAddresses() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // `replica` is marked as asking.
  void Ask(const std::shared_ptr<Replica>& replica, absl::Time deadline);
  void Answer(const std::shared_ptr<Replica>& replica, ModelAnswer answer);
  Finding Judge(const Replica& replica, ModelAnswer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time AskDeadline() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Of the replica in `avoid`: 0 where it is not there, else its place, from 1. The later it stands, the less welcome.
  static size_t RankOf(const std::string& name, const std::vector<std::string>& avoid);

  bool Hopeless() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WhyNone() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Describe(const Replica& replica) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ReplicaOptions options_;
  const std::string hash_digest_;
  const std::string config_digest_;
  const Resolver resolver_;
  absl::Time connect_deadline_;

  mutable absl::Mutex mutex_;
  absl::CondVar changed_;  // anything below
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Target> targets_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Replica>> replicas_ ABSL_GUARDED_BY(mutex_);
  absl::optional<ModelInfo> model_;  // written once under mutex_, before Start returns
  int64_t max_message_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t max_call_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t chosen_ ABSL_GUARDED_BY(mutex_) = 0;
  bool look_up_now_ ABSL_GUARDED_BY(mutex_) = false;
  int questions_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_work_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::function<void()>> works_ ABSL_GUARDED_BY(mutex_);
  bool looking_up_ ABSL_GUARDED_BY(mutex_) = false;  // that thread runs
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);

  absl::optional<Completions> completions_;  // until Stop
  std::thread asker_;
};

}  // namespace engram::client
