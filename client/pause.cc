#include "client/pause.h"

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/optional.h"
#include "grpcpp/alarm.h"

namespace engram::client {
namespace {

// Kept alive by its alarm's tag.
class Pause : public std::enable_shared_from_this<Pause> {
 public:
  Pause(ReplicaSet& replicas, absl::AnyInvocable<void(bool due)> then) : replicas_(replicas), then_(std::move(then)) {}

  void Start(absl::Time until) {
    // Assigned before anything that could end the pause.
    work_.emplace(replicas_.Begin([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->Cancel();
    }));
    if (!*work_) return then_(false);
    alarm_.Set(replicas_.completions().queue(), absl::ToChronoTime(until),
               Completions::Tag([self = shared_from_this()](bool due) { self->then_(due); }));
    {
      absl::MutexLock lock(&mutex_);
      set_ = true;
      if (!cancelled_) return;
    }
    alarm_.Cancel();
  }

 private:
  void Cancel() {
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      if (!set_) return;  // Start will
    }
    alarm_.Cancel();
  }

  absl::optional<ReplicaSet::Work> work_;  // first: the set ends when everything below is gone
  ReplicaSet& replicas_;
  absl::AnyInvocable<void(bool due)> then_;  // the tag's alone, once the alarm is set
  grpc::Alarm alarm_;

  absl::Mutex mutex_;
  bool set_ ABSL_GUARDED_BY(mutex_) = false;  // the alarm can be cancelled
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

void StartPause(ReplicaSet& replicas, absl::Time until, absl::AnyInvocable<void(bool due)> then) {
  std::make_shared<Pause>(replicas, std::move(then))->Start(until);
}

}  // namespace engram::client
