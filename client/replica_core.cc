#include "client/replica_core.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/error_details.h"
#include "client/refusal.h"
#include "grpcpp/client_context.h"

namespace engram::client {
namespace {

// A question ends at its deadline, its callback a little later; Start waits that long for the reason.
constexpr absl::Duration kGrace = absl::Milliseconds(500);

// How long the end waits for a look-up of DNS.
constexpr absl::Duration kLookUpPatience = absl::Seconds(1);

}  // namespace

size_t ReplicaSet::Core::RankOf(const std::string& name, const std::vector<std::string>& avoid) {
  const auto found = std::find(avoid.rbegin(), avoid.rend(), name);
  return static_cast<size_t>(avoid.rend() - found);
}

ReplicaSet::Core::Core(const ReplicaOptions& options, std::string hash_digest, std::string config_digest,
                       Resolver resolver)
    : options_(options),
      hash_digest_(std::move(hash_digest)),
      config_digest_(std::move(config_digest)),
      resolver_(std::move(resolver)),
      connect_deadline_(absl::Now() + options.connect_timeout),
      random_(std::random_device()()),
      completions_(absl::in_place) {
  for (const std::string& target : options.targets) targets_.push_back({.name = target, .literal = !NeedsDns(target)});
}

absl::Status ReplicaSet::Core::Start() {
  bool names = false;
  for (size_t i = 0; i < options_.targets.size(); ++i) {
    if (NeedsDns(options_.targets[i])) {
      names = true;
    } else {
      LookUp(i);
    }
  }
  asker_ = std::thread([this] { AskWhenDue(); });
  if (names) {
    {
      absl::MutexLock lock(&mutex_);
      looking_up_ = true;
    }
    // Detached, since nothing interrupts the system's resolver.
    std::thread([core = shared_from_this()] { core->LookUpNames(); }).detach();
  }

  absl::MutexLock lock(&mutex_);
  while (!model_.has_value() && !Hopeless()) {
    const absl::Time until = questions_ > 0 ? connect_deadline_ + kGrace : connect_deadline_;
    if (absl::Now() >= until) break;
    changed_.WaitWithDeadline(&mutex_, until);
  }
  return model_.has_value() ? absl::OkStatus() : WhyNone();
}

void ReplicaSet::Core::Stop() {
  std::vector<std::function<void()>> cancels;
  std::vector<std::shared_ptr<grpc::ClientContext>> queries;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (auto& work : works_) cancels.push_back(std::move(work.second));
    for (const auto& replica : replicas_) {
      if (replica->query != nullptr) queries.push_back(replica->query);
    }
    changed_.SignalAll();
  }
  for (const auto& cancel : cancels) cancel();
  for (const auto& query : queries) query->TryCancel();
  if (asker_.joinable()) asker_.join();

  {
    absl::MutexLock lock(&mutex_);
    while (!works_.empty() || questions_ > 0) changed_.Wait(&mutex_);
  }
  completions_.reset();  // joins threads that may still want the lock

  std::vector<std::shared_ptr<Replica>> replicas;
  absl::MutexLock lock(&mutex_);
  const absl::Time patience = absl::Now() + kLookUpPatience;
  while (looking_up_ && absl::Now() < patience) changed_.WaitWithDeadline(&mutex_, patience);
  replicas = std::move(replicas_);
  replicas_.clear();
}

int64_t ReplicaSet::Core::max_message_bytes() const {
  absl::MutexLock lock(&mutex_);
  return max_message_bytes_;
}

int64_t ReplicaSet::Core::max_call_tokens() const {
  absl::MutexLock lock(&mutex_);
  return max_call_tokens_;
}

absl::StatusOr<Lease> ReplicaSet::Core::Choose(const Wish& wish) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return absl::CancelledError("the client is ending");
  std::shared_ptr<Replica> best;
  std::tuple<size_t, bool, int64_t, uint64_t> least;
  bool known = false;
  for (const auto& replica : replicas_) {
    if (!wish.only.empty() && replica->address.name != wish.only) continue;
    known = true;
    if (!replica->health.gets_calls()) continue;
    const size_t rank = RankOf(replica->address.name, wish.avoid);
    if (wish.never_avoided && rank > 0) continue;
    const std::tuple<size_t, bool, int64_t, uint64_t> order = {rank, replica->health.state() == ReplicaState::kDraining,
                                                               replica->tokens, replica->last_chosen};
    if (best == nullptr || order < least) {
      best = replica;
      least = order;
    }
  }
  if (best == nullptr) {
    if (wish.only.empty() && !wish.never_avoided && !look_up_now_) {
      look_up_now_ = true;
      changed_.SignalAll();
    }
    if (!wish.only.empty() && !known) {
      return absl::UnavailableError(absl::StrCat("replica ", wish.only, " is gone: no target names it now"));
    }
    std::vector<std::string> reasons;
    for (const auto& replica : replicas_) {
      if (wish.only.empty() || replica->address.name == wish.only) reasons.push_back(Describe(*replica));
    }
    return absl::UnavailableError(absl::StrCat("no replica serves: ", absl::StrJoin(reasons, "; ")));
  }
  best->tokens += wish.weight_tokens;
  ++best->calls;
  best->last_chosen = ++chosen_;
  Lease lease;
  lease.core_ = shared_from_this();
  lease.replica_ = best;
  lease.channel_ = best->channels[best->next_channel++ % best->channels.size()];
  lease.tokens_ = wish.weight_tokens;
  lease.generation_ = best->generation;
  lease.server_epoch_ = *best->good_epoch;  // one that gets calls has been judged
  return lease;
}

bool ReplicaSet::Core::KnowsEpoch(absl::string_view replica, uint64_t server_epoch) {
  absl::MutexLock lock(&mutex_);
  for (const auto& known : replicas_) {
    if (known->address.name != replica) continue;
    if (known->good_epoch == server_epoch) return true;
    known->health.Doubt(absl::Now());
    changed_.SignalAll();
  }
  return false;
}

std::vector<ReplicaStatus> ReplicaSet::Core::Replicas() const {
  absl::MutexLock lock(&mutex_);
  std::vector<ReplicaStatus> all;
  for (const auto& replica : replicas_) {
    all.push_back({.name = replica->address.name,
                   .target = replica->target,
                   .state = replica->health.state(),
                   .ask_at = replica->health.ask_at(),
                   .tokens_in_flight = replica->tokens,
                   .calls_in_flight = replica->calls,
                   .numerics_id = replica->numerics_id,
                   .server_epoch = replica->server_epoch,
                   .last_error = replica->last_error});
  }
  return all;
}

double ReplicaSet::Core::Random() {
  absl::MutexLock lock(&mutex_);
  return std::uniform_real_distribution<double>(0, 1)(random_);
}

uint64_t ReplicaSet::Core::Begin(std::function<void()> cancel) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return 0;
  works_.emplace(++last_work_, std::move(cancel));
  return last_work_;
}

void ReplicaSet::Core::End(uint64_t work) {
  std::function<void()> cancel;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = works_.find(work);
  cancel = std::move(found->second);
  works_.erase(found);
  changed_.SignalAll();
}

void ReplicaSet::Core::Report(Replica& replica, int generation, const absl::Status& status, bool unreachable,
                              bool draining) {
  absl::MutexLock lock(&mutex_);
  if (generation != replica.generation || !replica.health.gets_calls()) return;
  const absl::Time now = absl::Now();
  const std::string reason = ErrorReason(status);
  if (reason == "DRAINING") {
    replica.health.RefusedDraining(now);
  } else if (reason == ReasonName(Reason::kDigestMismatch)) {
    replica.health.Doubt(now);
  } else if (absl::IsUnavailable(status)) {
    replica.health.Failed(unreachable, now);
  } else if (status.ok() || !reason.empty()) {
    replica.health.Answered(draining, now);
  }
  if (!replica.health.gets_calls()) {
    replica.last_error = status;
    look_up_now_ = true;
  }
  if (replica.health.ask_at() != absl::InfiniteFuture()) changed_.SignalAll();
}

void ReplicaSet::Core::Return(Replica& replica, int64_t tokens) {
  absl::MutexLock lock(&mutex_);
  replica.tokens -= tokens;
  --replica.calls;
  if (replica.calls > 0 || replica.asking || replica.health.state() != ReplicaState::kGone) return;
  // The lease that ends keeps it alive until the lock is gone.
  replicas_.erase(
      std::remove_if(replicas_.begin(), replicas_.end(), [&](const auto& r) { return r.get() == &replica; }),
      replicas_.end());
}

bool ReplicaSet::Core::Hopeless() const {
  for (const Target& target : targets_) {
    if (!target.found.has_value() || !target.found->ok()) return false;
  }
  return std::all_of(replicas_.begin(), replicas_.end(),
                     [](const auto& replica) { return replica->health.state() == ReplicaState::kOtherModel; });
}

absl::Status ReplicaSet::Core::WhyNone() const {
  std::vector<absl::Status> reasons;
  for (const auto& replica : replicas_) {
    if (!replica->last_error.ok()) {
      reasons.push_back(replica->last_error);
      continue;
    }
    reasons.push_back(absl::UnavailableError(absl::StrCat(replica->address.name, ": not reached")));
  }
  for (const Target& target : targets_) {
    if (!target.found.has_value()) {
      reasons.push_back(absl::UnavailableError(absl::StrCat(target.name, ": DNS has not answered yet")));
    } else if (!target.found->ok()) {
      reasons.push_back(target.found->status());
    }
  }
  std::vector<std::string> texts;
  bool same = true;
  for (const absl::Status& reason : reasons) {
    texts.push_back(std::string(reason.message()));
    same = same && reason.code() == reasons.front().code() && ErrorReason(reason) == ErrorReason(reasons.front());
  }
  if (!same) return absl::UnavailableError(absl::StrJoin(texts, "; "));
  absl::Status status(reasons.front().code(), absl::StrJoin(texts, "; "));
  reasons.front().ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { status.SetPayload(url, payload); });
  return status;
}

std::string ReplicaSet::Core::Describe(const Replica& replica) const {
  std::string text = absl::StrCat(replica.address.name, " is ", ReplicaStateName(replica.health.state()));
  if (!replica.last_error.ok()) absl::StrAppend(&text, " (", replica.last_error.message(), ")");
  return text;
}

}  // namespace engram::client
