#include "client/raw_call.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "client/error_details.h"
#include "client/model_query.h"
#include "client/refusal.h"
#include "grpcpp/alarm.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"

namespace engram::client {
namespace {

// The request on its way to one replica.
struct Attempt {
  explicit Attempt(Lease chosen)
      : lease(std::move(chosen)), name(lease->replica()), server_epoch(lease->server_epoch()), stub(lease->channel()) {}

  absl::optional<Lease> lease;  // until its end
  const std::string name;
  const uint64_t server_epoch;
  grpc::GenericStub stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> call;
  grpc::ByteBuffer reply;
  grpc::Status status;
};

std::string Pushback(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("grpc-retry-pushback-ms");
  return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
}

// The call as it goes from attempt to attempt. Kept alive by whatever will move it on: an attempt under way, a timer, a
// question to a replica. At any time it has either one or two attempts, or one of the other two, or has ended.
// gRPC is never called under the lock.
class Call : public std::enable_shared_from_this<Call> {
 public:
  Call(ReplicaSet& replicas, const RetryOptions& options, RawCall call, absl::AnyInvocable<void(RawReply)> done)
      : replicas_(replicas),
        options_(options),
        call_(std::move(call)),
        started_(absl::Now()),
        avoid_(call_.avoid),
        done_(std::move(done)) {}

  void Start() {
    // Assigned before anything that could end the call, read by no other thread: it only has to live as long as this.
    work_.emplace(replicas_.Begin([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->Cancel();
    }));
    if (!*work_) {
      Cancel();
      return;
    }
    Try();
  }

 private:
  enum class Wake { kRetry, kHedge, kDeadline };

  ReplicaSet::Wish Wish(bool never_avoided) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return {
        .weight_tokens = call_.weight_tokens, .only = call_.replica, .avoid = avoid_, .never_avoided = never_avoided};
  }

  // The next attempt, where there is a replica for it; else asks one whether it serves again.
  void Try() {
    absl::optional<ReplicaSet::Wish> wish;
    bool moved = false;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_) return;
      moved = moved_;
      wish = Wish(/*never_avoided=*/moved);
    }
    absl::StatusOr<Lease> lease = replicas_.Choose(*wish);
    if (lease.ok()) {
      Send(*std::move(lease));
    } else if (moved) {
      End({}, absl::nullopt);  // with the error of the replica that has another model now
    } else if (!call_.replica.empty() || !absl::IsUnavailable(lease.status())) {
      End(lease.status(), absl::nullopt);
    } else {
      AskFirst();
    }
  }

  void AskFirst() {
    std::vector<std::string> avoid;
    uint64_t turn = 0;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_) return;
      turn = ++turn_;
      avoid = avoid_;
    }
    SetTimer(Wake::kDeadline, call_.deadline, turn);
    const bool asked = replicas_.AskNow(
        avoid, [self = shared_from_this(), turn](const std::string& name) { self->Answered(turn, name); });
    // None to ask, or the set is ending: Choose tells which.
    if (!asked) Answered(turn, "");
  }

  // The replica `name` has been asked, or, where it is empty, there was none to ask.
  void Answered(uint64_t turn, const std::string& name) {
    if (!TakeTurn(turn)) return;
    absl::optional<ReplicaSet::Wish> wish;
    {
      absl::MutexLock lock(&mutex_);
      wish = Wish(/*never_avoided=*/false);
    }
    absl::StatusOr<Lease> lease = replicas_.Choose(*wish);
    if (lease.ok()) {
      Send(*std::move(lease));
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (!name.empty()) avoid_.push_back(name);  // another one is asked next time
    }
    Failed(lease.status(), "", /*pushback=*/"");
  }

  void Send(Lease lease) {
    auto attempt = std::make_shared<Attempt>(std::move(lease));
    attempt->context.set_deadline(absl::ToChronoTime(call_.deadline));
    uint64_t turn = 0;
    bool hedge = false;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_) return;
      ++sent_;
      running_.push_back(attempt);
      turn = ++turn_;
      hedge = call_.hedgeable && call_.replica.empty() && running_.size() == 1 && tries_ + 1 < options_.attempts;
      ++tries_;
    }
    // Before the attempt begins: its end takes the timer away.
    if (hedge && options_.hedge_after < absl::InfiniteDuration()) {
      SetTimer(Wake::kHedge, absl::Now() + options_.hedge_after, turn);
    }
    attempt->call =
        attempt->stub.PrepareUnaryCall(&attempt->context, call_.method, call_.request, replicas_.completions().queue());
    attempt->call->StartCall();
    attempt->call->Finish(&attempt->reply, &attempt->status,
                          Completions::Tag([self = shared_from_this(), attempt](bool) { self->Ended(attempt); }));
  }

  void Ended(const std::shared_ptr<Attempt>& attempt) {
    absl::Status status = StatusFromGrpc(attempt->status);
    std::unique_ptr<grpc::Alarm> timer;
    bool ended = false;
    bool alone = false;
    {
      absl::MutexLock lock(&mutex_);
      running_.erase(std::find(running_.begin(), running_.end(), attempt));
      ended = ended_;
      alone = running_.empty();
      if (!ended && alone) {
        ++turn_;
        timer = std::move(timer_);
      }
    }
    timer.reset();
    if (absl::IsCancelled(status)) {
      if (ended) return;  // by us: it shows nothing
      // Not by us: gRPC's servers answer so what crosses their end.
      status = absl::UnavailableError("the server ended while it had the call");
    }
    attempt->lease->Report(status, AnnouncesDrain(attempt->context));
    attempt->lease.reset();  // before `done` makes the next call
    if (ended) return;

    const std::string& name = attempt->name;
    if (status.ok()) {
      End(std::move(status), attempt);
      return;
    }
    status = Named(status, name);
    if (!alone) {
      // The other one may still succeed.
      absl::MutexLock lock(&mutex_);
      avoid_.push_back(name);
      if (!absl::IsUnavailable(status)) first_error_ = {status, name};
      return;
    }
    Failed(std::move(status), name, Pushback(attempt->context));
  }

  // gRPC's own errors say neither whom it was asking nor how long it waited.
  absl::Status Named(const absl::Status& status, const std::string& name) {
    if (!ErrorReason(status).empty()) return status;
    if (absl::IsDeadlineExceeded(status)) return TooLate(name);
    if (!absl::IsUnavailable(status)) return status;
    absl::Status named = absl::UnavailableError(absl::StrCat(name, ": ", status.message()));
    status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { named.SetPayload(url, payload); });
    return named;
  }

  absl::Status TooLate(absl::string_view name) {
    const absl::Duration waited =
        absl::Trunc(call_.deadline - started_ + absl::Microseconds(500), absl::Milliseconds(1));
    return absl::DeadlineExceededError(absl::StrCat("no answer from ", name, " within ", absl::FormatDuration(waited)));
  }

  // No attempt is under way, and the last one ended with `status`, given by `name`.
  void Failed(absl::Status status, const std::string& name, const std::string& pushback) {
    const double random = replicas_.Random();
    absl::optional<absl::Duration> delay;
    uint64_t turn = 0;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_) return;
      if (name.empty()) ++tries_;
      // That none serves says less than why one refused.
      const bool says_less =
          name.empty() && absl::IsUnavailable(last_error_.status) && !ErrorReason(last_error_.status).empty();
      if (!says_less) last_error_ = first_error_.value_or(Error{std::move(status), name});
      if (!name.empty()) avoid_.push_back(name);
      delay = DelayBeforeRetry(options_, tries_, last_error_.status, pushback, random);
      // It restarted with another model; the others have the one this call is for.
      moved_ = ErrorReason(last_error_.status) == ReasonName(Reason::kDigestMismatch) && call_.replica.empty() &&
               tries_ < options_.attempts;
      if (moved_) delay = absl::ZeroDuration();
      const bool refused = name.empty() || !ErrorReason(last_error_.status).empty();
      if (!call_.repeatable && !refused) delay.reset();
      first_error_.reset();
      turn = ++turn_;
    }
    const absl::Time at = absl::Now() + delay.value_or(absl::ZeroDuration());
    if (!delay.has_value() || at >= call_.deadline) {
      End({}, absl::nullopt);
    } else if (*delay == absl::ZeroDuration()) {
      Try();
    } else {
      SetTimer(Wake::kRetry, at, turn);
    }
  }

  void SetTimer(Wake wake, absl::Time at, uint64_t turn) {
    auto timer = std::make_unique<grpc::Alarm>();
    timer->Set(replicas_.completions().queue(), absl::ToChronoTime(at),
               Completions::Tag([self = shared_from_this(), wake, turn](bool due) {
                 if (due) self->Due(wake, turn);
               }));
    std::unique_ptr<grpc::Alarm> unneeded;
    absl::MutexLock lock(&mutex_);
    // What it was for may be over already.
    unneeded = std::move(ended_ || turn != turn_ ? timer : timer_);
    if (timer != nullptr) timer_ = std::move(timer);
  }

  // Whether what waits is still what waited when `turn` was counted; it does not wait any more then.
  bool TakeTurn(uint64_t turn) {
    std::unique_ptr<grpc::Alarm> timer;
    absl::MutexLock lock(&mutex_);
    if (ended_ || turn != turn_) return false;
    ++turn_;
    timer = std::move(timer_);
    return true;
  }

  void Due(Wake wake, uint64_t turn) {
    if (!TakeTurn(turn)) return;
    switch (wake) {
      case Wake::kRetry:
        Try();
        return;
      case Wake::kHedge:
        Hedge();
        return;
      case Wake::kDeadline: {
        absl::Status error;
        {
          absl::MutexLock lock(&mutex_);
          error = last_error_.status.ok() ? TooLate("any replica") : last_error_.status;
        }
        End(std::move(error), absl::nullopt);
        return;
      }
    }
  }

  void Hedge() {
    absl::optional<ReplicaSet::Wish> wish;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_ || running_.size() != 1) return;
      wish = Wish(/*never_avoided=*/true);
      wish->avoid.push_back(running_.front()->name);
    }
    absl::StatusOr<Lease> lease = replicas_.Choose(*wish);
    if (lease.ok()) Send(*std::move(lease));
  }

  void Cancel() { End(absl::CancelledError("the client is ending"), absl::nullopt); }

  // `status`, or the last error where it is OK and there is no `winner`.
  void End(absl::Status status, absl::optional<std::shared_ptr<Attempt>> winner) {
    std::unique_ptr<grpc::Alarm> timer;
    std::vector<std::shared_ptr<Attempt>> losers;
    absl::AnyInvocable<void(RawReply)> done;
    RawReply reply;
    {
      absl::MutexLock lock(&mutex_);
      if (ended_) return;
      ended_ = true;
      timer = std::move(timer_);
      losers = running_;
      done = std::move(done_);
      reply.attempts = sent_;
      if (winner.has_value()) {
        reply.body.Swap(&(*winner)->reply);
        reply.replica = (*winner)->name;
        reply.server_epoch = (*winner)->server_epoch;
      } else if (status.ok()) {
        reply.status = last_error_.status;
        reply.replica = last_error_.replica;
      } else {
        reply.status = std::move(status);
      }
    }
    for (const auto& loser : losers) loser->context.TryCancel();
    timer.reset();
    done(std::move(reply));
  }

  struct Error {
    absl::Status status;
    std::string replica;
  };

  absl::optional<ReplicaSet::Work> work_;  // first: the set ends when everything below is gone
  ReplicaSet& replicas_;
  const RetryOptions options_;
  const RawCall call_;
  const absl::Time started_;

  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool moved_ ABSL_GUARDED_BY(mutex_) = false;  // only replicas that were not tried can help
  int tries_ ABSL_GUARDED_BY(mutex_) = 0;       // towards RetryOptions::attempts
  int sent_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;  // counts what the call waits for; what is of an earlier turn is void
  std::vector<std::string> avoid_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Attempt>> running_ ABSL_GUARDED_BY(mutex_);
  Error last_error_ ABSL_GUARDED_BY(mutex_);
  absl::optional<Error> first_error_ ABSL_GUARDED_BY(mutex_);  // a final one, of the first of two attempts
  std::unique_ptr<grpc::Alarm> timer_ ABSL_GUARDED_BY(mutex_);
  absl::AnyInvocable<void(RawReply)> done_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void StartRawCall(ReplicaSet& replicas, const RetryOptions& options, RawCall call,
                  absl::AnyInvocable<void(RawReply)> done) {
  std::make_shared<Call>(replicas, options, std::move(call), std::move(done))->Start();
}

}  // namespace engram::client
