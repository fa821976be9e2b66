// Whether one replica gets calls: what is known of it from its calls' outcomes and from asking it GetModel.
//
//                 asked, the right model            UNAVAILABLE in a row, unreachable, DRAINING
//   kNew ───────────────────────────────► kServing ────────────────────────────────────────────► kEjected
//     │                                    │    ▲ ▲                                                 │
//     └─► kOtherModel, kOtherNumerics      │    │ └─── asked, after a pause ────────────────────────┘
//         (asked again, slower and slower) ▼    │
//                                        kDraining: still serves; gets calls when no other does
//
// Pure: the caller brings the time and does the asking. Not thread-safe.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace engram::client {

// Of a replica that fails.
struct Ejection {
  int failures = 3;                        // UNAVAILABLE in a row, >= 1
  absl::Duration base = absl::Seconds(1);  // the first pause; doubled each time
  absl::Duration max = absl::Seconds(30);  // >= base
};

enum class ReplicaState {
  kNew,            // not asked yet, or never answered
  kServing,        // gets calls
  kDraining,       // serves, and has said that it will stop: new calls go elsewhere
  kEjected,        // failed; gets none until asked again
  kOtherModel,     // another config_digest or hash_digest, or no engram at all
  kOtherNumerics,  // another numerics_id, and that is not allowed
  kGone,           // DNS does not name it any more: gets none, ends with its last call
};

absl::string_view ReplicaStateName(ReplicaState state);  // "serving", "other model"

// What asking a replica showed.
enum class Finding { kGood, kUnavailable, kOtherModel, kOtherNumerics };

class ReplicaHealth {
 public:
  ReplicaHealth(const Ejection& ejection, absl::Time now) : ejection_(ejection), ask_at_(now) {}

  ReplicaState state() const { return state_; }
  bool gets_calls() const { return state_ == ReplicaState::kServing || state_ == ReplicaState::kDraining; }

  // When it is to be asked GetModel next; InfiniteFuture while there is no doubt.
  absl::Time ask_at() const { return ask_at_; }

  // A call was answered, or refused for its own sake. `draining`: with the trailer engram-draining.
  void Answered(bool draining, absl::Time now);

  // A call ended UNAVAILABLE. `unreachable`: no connection could be made, so that more failures would add nothing.
  void Failed(bool unreachable, absl::Time now);

  // A call was refused with DRAINING: it serves no more.
  void RefusedDraining(absl::Time now);

  // It seems to have become another server: nothing until it is asked, at once.
  void Doubt(absl::Time now);

  // `draining`: the answer had the trailer. `restarted`: its server_epoch is not the one known before. Asked before its
  // time and silent, it stays as it was: who asks often must not make its pause longer.
  void Asked(Finding finding, bool draining, bool restarted, absl::Time now);

  // DNS dropped it, and named it again.
  void Vanish();
  void Return(absl::Time now);

 private:
  void Eject(absl::Time now);
  absl::Duration NextPause();  // doubles with every one, until a call is answered

  Ejection ejection_;
  ReplicaState state_ = ReplicaState::kNew;
  absl::Time ask_at_;
  int failures_ = 0;      // in a row
  int pauses_ = 0;        // since a call was answered
  bool refuses_ = false;  // ejected for DRAINING
};

}  // namespace engram::client
