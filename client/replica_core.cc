#include "client/replica_core.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/channels.h"
#include "client/error_details.h"
#include "client/refusal.h"
#include "grpcpp/client_context.h"

namespace engram::client {
namespace {

// GetModel reads nothing but memory: a server that takes longer hangs.
constexpr absl::Duration kAskTimeout = absl::Seconds(5);

// Calls that find no server ask for one at most this often.
constexpr absl::Duration kAskGap = absl::Milliseconds(20);

// Between two look-ups of a name, whatever happens.
constexpr absl::Duration kLookUpGap = absl::Seconds(1);

// A question ends at its deadline, its callback a little later; Start waits that long for the reason.
constexpr absl::Duration kGrace = absl::Milliseconds(500);

constexpr absl::Duration kShortestQuestion = absl::Milliseconds(50);

// How long the end waits for a look-up of DNS.
constexpr absl::Duration kLookUpPatience = absl::Seconds(1);

// Of the replica in `avoid`: 0 where it is not there, else its place, from 1. The later it stands, the less welcome.
size_t RankOf(const std::string& name, const std::vector<std::string>& avoid) {
  const auto found = std::find(avoid.rbegin(), avoid.rend(), name);
  return static_cast<size_t>(avoid.rend() - found);
}

// Nobody answered, so that asking again may help.
bool NobodyAnswered(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsResourceExhausted(status);
}

}  // namespace

ReplicaSet::Core::Core(const ReplicaOptions& options, std::string hash_digest, Resolver resolver)
    : options_(options),
      hash_digest_(std::move(hash_digest)),
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
  return lease;
}

bool ReplicaSet::Core::AskNow(const std::vector<std::string>& avoid,
                              std::function<void(const std::string& name)> then) {
  std::shared_ptr<Replica> first;
  absl::Time deadline;
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return false;
    std::tuple<size_t, absl::Time> least;
    for (const auto& replica : replicas_) {
      if (replica->health.state() == ReplicaState::kGone) continue;
      const std::tuple<size_t, absl::Time> order = {RankOf(replica->address.name, avoid), replica->health.ask_at()};
      if (first == nullptr || order < least) {
        first = replica;
        least = order;
      }
    }
    if (first == nullptr) return false;
    if (first->asking) {
      first->waiting.push_back(std::move(then));
      return true;
    }
    if (!first->health.gets_calls() && absl::Now() >= first->asked + kAskGap) {
      first->asking = true;
      ++questions_;
      first->waiting.push_back(std::move(then));
      deadline = AskDeadline();
      then = nullptr;
    }
  }
  if (then != nullptr) {
    then(first->address.name);
  } else {
    Ask(first, deadline);
  }
  return true;
}

bool ReplicaSet::Core::KnowsEpoch(absl::string_view replica, uint64_t server_epoch) {
  absl::MutexLock lock(&mutex_);
  for (const auto& known : replicas_) {
    if (known->address.name != replica) continue;
    if (known->server_epoch == server_epoch) return true;
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

void ReplicaSet::Core::AskWhenDue() {
  mutex_.Lock();
  while (!stopping_) {
    const absl::Time now = absl::Now();
    absl::Time next = absl::InfiniteFuture();
    std::vector<std::shared_ptr<Replica>> due;
    for (const auto& replica : replicas_) {
      if (replica->asking) continue;
      const absl::Time at = replica->health.ask_at();
      // Too late for an answer before Start gives up: the last one says more than a question cut short.
      if (!model_.has_value() && std::max(at, now) > connect_deadline_ - kShortestQuestion) continue;
      if (at > now) {
        next = std::min(next, at);
        continue;
      }
      replica->asking = true;
      ++questions_;
      due.push_back(replica);
    }
    if (due.empty()) {
      changed_.WaitWithDeadline(&mutex_, next);
      continue;
    }
    const absl::Time deadline = AskDeadline();
    mutex_.Unlock();
    for (const auto& replica : due) Ask(replica, deadline);
    mutex_.Lock();
  }
  mutex_.Unlock();
}

void ReplicaSet::Core::LookUpNames() {
  while (true) {
    for (size_t i = 0; i < options_.targets.size(); ++i) {
      {
        absl::MutexLock lock(&mutex_);
        if (stopping_) break;
        if (targets_[i].literal) continue;
      }
      LookUp(i);
    }
    absl::MutexLock lock(&mutex_);
    look_up_now_ = false;
    const absl::Time start = absl::Now();
    while (!stopping_) {
      const absl::Duration pause = look_up_now_ ? kLookUpGap : options_.resolve_interval;
      if (absl::Now() >= start + pause) break;
      changed_.WaitWithDeadline(&mutex_, start + pause);
    }
    if (!stopping_) continue;
    looking_up_ = false;
    changed_.SignalAll();
    return;
  }
}

void ReplicaSet::Core::LookUp(size_t target) {
  const std::string& name = options_.targets[target];
  absl::StatusOr<std::vector<Address>> found = NeedsDns(name) ? resolver_(name) : ResolveTarget(name);
  if (found.ok() && found->empty()) found = absl::UnavailableError(absl::StrCat(name, ": no address"));

  std::vector<std::shared_ptr<Replica>> dropped;
  absl::MutexLock lock(&mutex_);
  if (stopping_) return;
  auto& known = targets_[target].found;
  // A name server that fails takes no replica away.
  if (!found.ok() && known.has_value() && known->ok()) return;
  known = std::move(found);
  dropped = FollowAddresses();
  changed_.SignalAll();
}

std::vector<std::shared_ptr<Replica>> ReplicaSet::Core::FollowAddresses() {
  const absl::Time now = absl::Now();
  std::vector<std::shared_ptr<Replica>> dropped = std::move(replicas_);
  replicas_.clear();
  const auto take = [&](const Address& address) {
    const auto found =
        std::find_if(dropped.begin(), dropped.end(), [&](const auto& r) { return r->address == address; });
    if (found == dropped.end()) return std::shared_ptr<Replica>();
    std::shared_ptr<Replica> replica = *found;
    dropped.erase(found);
    return replica;
  };
  for (const Target& target : targets_) {
    if (!target.found.has_value() || !target.found->ok()) continue;
    for (const Address& address : **target.found) {
      const bool twice = std::any_of(replicas_.begin(), replicas_.end(),
                                     [&](const auto& replica) { return replica->address == address; });
      if (twice) continue;
      std::shared_ptr<Replica> replica = take(address);
      if (replica == nullptr) {
        replica = std::make_shared<Replica>(address, target.name, options_.ejection, now);
      } else if (replica->health.state() == ReplicaState::kGone) {
        replica->health.Return(now);
      }
      replicas_.push_back(std::move(replica));
    }
  }
  for (auto it = dropped.begin(); it != dropped.end();) {
    (*it)->health.Vanish();
    const bool idle = (*it)->calls == 0 && !(*it)->asking;
    if (!idle) replicas_.push_back(*it);
    it = idle ? it + 1 : dropped.erase(it);
  }
  return dropped;
}

void ReplicaSet::Core::Ask(const std::shared_ptr<Replica>& replica, absl::Time deadline) {
  auto query = QueryModel(
      *completions_, replica->address, replica->authority(), deadline,
      [core = shared_from_this(), replica](ModelAnswer answer) { core->Answer(replica, std::move(answer)); });
  const std::shared_ptr<grpc::ClientContext> mine = query;
  bool stopping = false;
  {
    absl::MutexLock lock(&mutex_);
    stopping = stopping_;
    std::swap(replica->query, query);
  }
  if (stopping) mine->TryCancel();
}

void ReplicaSet::Core::Answer(const std::shared_ptr<Replica>& replica, ModelAnswer answer) {
  // Connections are made and dropped without the lock, so before it is known whether they are needed.
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  int64_t message_bytes = 0;
  if (answer.model.ok()) {
    message_bytes = std::min(answer.model->limits.max_message_bytes, options_.max_message_bytes);
    for (int i = 0; i < options_.channels_per_replica; ++i) {
      channels.push_back(OpenChannel(replica->address.uri, replica->authority(), message_bytes));
    }
  }
  std::vector<std::function<void(const std::string& name)>> waiting;
  std::vector<std::shared_ptr<grpc::Channel>> connect;
  {
    absl::MutexLock lock(&mutex_);
    replica->asking = false;
    replica->asked = absl::Now();
    waiting = std::move(replica->waiting);
    replica->waiting.clear();
    const bool served = replica->health.gets_calls();
    bool restarted = false;
    if (answer.model.ok()) {
      restarted = answer.model->server_epoch != replica->server_epoch;
      replica->numerics_id = answer.model->numerics_id;
      replica->server_epoch = answer.model->server_epoch;
    }
    const Finding finding = Judge(*replica, answer);
    replica->health.Asked(finding, answer.draining, restarted, replica->asked);
    replica->last_error = answer.model.status();
    if (replica->health.gets_calls() && (!served || message_bytes != replica->message_bytes)) {
      // Old connections may be pausing before they connect again.
      replica->message_bytes = message_bytes;
      std::swap(replica->channels, channels);
      ++replica->generation;
      connect = replica->channels;
      max_call_tokens_ = std::min(max_call_tokens_, answer.model->limits.max_call_tokens);
      max_message_bytes_ = std::min(max_message_bytes_, message_bytes);
    }
    changed_.SignalAll();
  }
  for (const auto& channel : connect) channel->GetState(/*try_to_connect=*/true);
  for (const auto& then : waiting) then(replica->address.name);
  waiting.clear();
  channels.clear();

  std::vector<std::shared_ptr<Replica>> dropped;
  absl::MutexLock lock(&mutex_);
  if (replica->health.state() == ReplicaState::kGone) dropped = FollowAddresses();
  --questions_;
  changed_.SignalAll();
}

Finding ReplicaSet::Core::Judge(const Replica& replica, ModelAnswer& answer) {
  if (!answer.model.ok()) return NobodyAnswered(answer.model.status()) ? Finding::kUnavailable : Finding::kOtherModel;
  const ModelInfo& model = *answer.model;
  const std::string& name = replica.address.name;
  const auto differs = [&](absl::string_view digest, const std::string& served, const std::string& expected) {
    const std::string got = absl::BytesToHexString(served);
    const std::string want = absl::BytesToHexString(expected);
    answer.model = Refuse(Reason::kDigestMismatch, digest, got, want,
                          absl::StrCat(name, " has ", digest, " ", got, ", expected ", want,
                                       ": it serves another model, or the token map differs"));
    return Finding::kOtherModel;
  };
  if (!hash_digest_.empty() && model.hash_digest != hash_digest_) {
    return differs("hash_digest", model.hash_digest, hash_digest_);
  }
  if (!model_.has_value()) {
    max_call_tokens_ = model.limits.max_call_tokens;
    max_message_bytes_ = std::min(model.limits.max_message_bytes, options_.max_message_bytes);
    model_ = model;
    return Finding::kGood;
  }
  if (model.config_digest != model_->config_digest) {
    return differs("config_digest", model.config_digest, model_->config_digest);
  }
  if (model.numerics_id != model_->numerics_id && !options_.allow_numerics_change) {
    answer.model = absl::FailedPreconditionError(
        absl::StrCat(name, " has numerics_id \"", model.numerics_id, "\", expected \"", model_->numerics_id, "\""));
    return Finding::kOtherNumerics;
  }
  return Finding::kGood;
}

absl::Time ReplicaSet::Core::AskDeadline() const {
  return model_.has_value() ? absl::Now() + kAskTimeout : connect_deadline_;
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
