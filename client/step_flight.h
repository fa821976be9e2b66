// One call under way: its parts are sent, together or in order, until every one has answered or the call has failed;
// then everything is written at once.
//
//   auto flight = std::make_shared<StepFlight>(model, carrier, &homes, checked, plan);
//   flight->Start([flight] { status = flight->Finish(&report); });
//
// Owns nothing of the caller's. `model`, `carrier` and `homes` outlive it; answers that come after it is over are
// dropped. Start and Finish are called once each; `over` runs on the thread of the last answer, or on Start's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/call_plan.h"
#include "client/checked_call.h"
#include "client/reply_reader.h"
#include "client/sender.h"
#include "client/session_homes.h"
#include "client/step_calls.h"

namespace engram::client {

class StepFlight : public std::enable_shared_from_this<StepFlight> {
 public:
  StepFlight(const ModelInfo& model, const Carrier& carrier, SessionHomes* homes, CheckedCall call, CallPlan plan);

  void Start(absl::AnyInvocable<void()> over);

  // After `over`: the outcome. Where it is OK, results and histories have been written, by this thread; else nothing
  // has. `report` may be null.
  absl::Status Finish(CallReport* report);

  // After an OK Finish of a Prepare.
  Prepared TakePrepared() const;

 private:
  struct Trip {
    bool by_ids = false;  // its ticket is not good any more
    int attempts = 0;
    int rounds = 0;    // begun by kRetry
    int restarts = 0;  // of servers, found by their replies
    bool ended = false;
    absl::Status status;
    std::optional<Reply> reply;
    std::string replica;
  };

  // Sends what may go now. An answer that comes while a part is being sent, on the same thread, adds to what that loop
  // sends: a call of many parts never nests.
  void Depart() ABSL_LOCKS_EXCLUDED(mutex_);
  void DepartAgain(size_t index) ABSL_LOCKS_EXCLUDED(mutex_);
  void Answered(size_t index, RawReply raw) ABSL_LOCKS_EXCLUDED(mutex_);
  RawCall RawCallOf(size_t index, bool by_ids) const;
  // Who must answer the part; empty: anyone.
  std::string ReplicaOf(const Part& part, bool by_ids) const;

  // Whether the trip goes on after `status`: at once by ids, or after a pause.
  bool SendAgain(size_t index, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts a reply of a server that was not the one asked; false: no more of them.
  bool Restarted(size_t index) ABSL_LOCKS_EXCLUDED(mutex_);
  void KeepHomes(const Part& part, const std::string& replica);
  absl::Status Named(const absl::Status& status, size_t index, const std::string& replica) const;
  // The part to send now, if any, which is under way from then on.
  std::optional<size_t> Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Skips(const absl::Status& status) const;
  void Over();
  absl::Status Land(const std::vector<Trip>& trips, CallReport& report);
  // Sequences that were not served, told of in `report`.
  std::vector<bool> Refused(const std::vector<Trip>& trips, CallReport& report) const;
  void ReportSkip(size_t index, const absl::Status& why, CallReport& report) const;

  const ModelInfo& model_;
  const Carrier& carrier_;
  SessionHomes* const homes_;
  const CheckedCall call_;
  const CallPlan plan_;
  const absl::Time deadline_;

  mutable absl::Mutex mutex_;
  std::vector<Trip> trips_ ABSL_GUARDED_BY(mutex_);  // one per part
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<size_t> again_ ABSL_GUARDED_BY(mutex_);  // under way, to be sent once more
  size_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  // Under way, pauses included: how many may be, how many are, their tokens and bytes.
  size_t together_ ABSL_GUARDED_BY(mutex_);
  size_t flying_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t flying_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t flying_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread::id> departing_ ABSL_GUARDED_BY(mutex_);  // that are in Depart
  bool over_ ABSL_GUARDED_BY(mutex_) = false;                       // nothing touches trips_ any more
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::AnyInvocable<void()> on_over_;
  std::shared_ptr<StepFlight> self_;  // until it is over
};

}  // namespace engram::client
