// The part of ReplicaSet::Core that asks replicas what they serve, and judges their answers.
#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/channels.h"
#include "client/refusal.h"
#include "client/replica_core.h"
#include "grpcpp/client_context.h"

namespace engram::client {
namespace {

// GetModel reads nothing but memory: a server that takes longer hangs.
constexpr absl::Duration kAskTimeout = absl::Seconds(5);

// Calls that find no server ask for one at most this often.
constexpr absl::Duration kAskGap = absl::Milliseconds(20);

constexpr absl::Duration kShortestQuestion = absl::Milliseconds(50);

// Nobody answered, so that asking again may help.
bool NobodyAnswered(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsResourceExhausted(status);
}

}  // namespace

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
    if (finding == Finding::kGood) {
      replica->good_epoch = answer.model->server_epoch;
    } else if (finding != Finding::kUnavailable) {
      replica->good_epoch.reset();
    }
    replica->health.Asked(finding, answer.draining, restarted, replica->asked);
    replica->last_error = answer.model.status();
    if (replica->health.gets_calls()) {
      max_call_tokens_ = std::min(max_call_tokens_, answer.model->limits.max_call_tokens);
      max_message_bytes_ = std::min(max_message_bytes_, message_bytes);
    }
    if (replica->health.gets_calls() && (!served || message_bytes != replica->message_bytes)) {
      // Old connections may be pausing before they connect again.
      replica->message_bytes = message_bytes;
      std::swap(replica->channels, channels);
      ++replica->generation;
      connect = replica->channels;
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
  if (!config_digest_.empty() && model.config_digest != config_digest_) {
    return differs("config_digest", model.config_digest, config_digest_);
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

}  // namespace engram::client
