#include "client/replica_health.h"

#include <algorithm>

namespace engram::client {
namespace {

// A server that has never answered is probably starting: it is asked again after 0.1, 0.2, 0.4 s and so on, up to the
// first pause of an ejected one.
constexpr absl::Duration kFirstPause = absl::Milliseconds(100);

}  // namespace

absl::string_view ReplicaStateName(ReplicaState state) {
  switch (state) {
    case ReplicaState::kNew:
      return "new";
    case ReplicaState::kServing:
      return "serving";
    case ReplicaState::kDraining:
      return "draining";
    case ReplicaState::kEjected:
      return "ejected";
    case ReplicaState::kOtherModel:
      return "other model";
    case ReplicaState::kOtherNumerics:
      return "other numerics";
    case ReplicaState::kGone:
      return "gone";
  }
  return "";
}

void ReplicaHealth::Answered(bool draining, absl::Time now) {
  if (!gets_calls()) return;  // a call that began before
  failures_ = 0;
  pauses_ = 0;
  if (draining && state_ == ReplicaState::kServing) {
    state_ = ReplicaState::kDraining;
    ask_at_ = now + ejection_.base;
  }
}

void ReplicaHealth::Failed(bool unreachable, absl::Time now) {
  if (!gets_calls()) return;
  if (++failures_ >= ejection_.failures || unreachable) Eject(now);
}

void ReplicaHealth::RefusedDraining(absl::Time now) {
  if (!gets_calls()) return;
  Eject(now);
  refuses_ = true;
}

void ReplicaHealth::Doubt(absl::Time now) {
  if (!gets_calls()) return;
  state_ = ReplicaState::kEjected;
  ask_at_ = now;
  refuses_ = false;
}

void ReplicaHealth::Asked(Finding finding, bool draining, bool restarted, absl::Time now) {
  if (state_ == ReplicaState::kGone) return;
  switch (finding) {
    case Finding::kGood:
      if (draining && refuses_ && !restarted) {
        ask_at_ = now + ejection_.base;
        return;
      }
      refuses_ = false;
      failures_ = 0;
      state_ = draining ? ReplicaState::kDraining : ReplicaState::kServing;
      ask_at_ = draining ? now + ejection_.base : absl::InfiniteFuture();
      return;
    case Finding::kUnavailable:
      if (!gets_calls() && now < ask_at_) return;
      if (state_ != ReplicaState::kNew) {
        Eject(now);
        return;
      }
      ask_at_ = now + std::min(kFirstPause * (int64_t{1} << std::min(pauses_++, 20)), ejection_.base);
      return;
    case Finding::kOtherModel:
    case Finding::kOtherNumerics:
      state_ = finding == Finding::kOtherModel ? ReplicaState::kOtherModel : ReplicaState::kOtherNumerics;
      refuses_ = false;
      ask_at_ = now + NextPause();
      return;
  }
}

void ReplicaHealth::Vanish() {
  state_ = ReplicaState::kGone;
  ask_at_ = absl::InfiniteFuture();
}

void ReplicaHealth::Return(absl::Time now) { *this = ReplicaHealth(ejection_, now); }

void ReplicaHealth::Eject(absl::Time now) {
  // Another model that cannot be reached is still the last thing known of it.
  if (gets_calls()) state_ = ReplicaState::kEjected;
  refuses_ = false;
  ask_at_ = now + NextPause();
}

absl::Duration ReplicaHealth::NextPause() {
  // 2^20 pauses of a millisecond pass any maximum that makes sense.
  return std::min(ejection_.base * (int64_t{1} << std::min(pauses_++, 20)), ejection_.max);
}

}  // namespace engram::client
