// The part of ReplicaSet::Core that follows DNS.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/replica_core.h"

namespace engram::client {
namespace {

// Between two look-ups of a name, whatever happens.
constexpr absl::Duration kLookUpGap = absl::Seconds(1);

}  // namespace

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

}  // namespace engram::client
