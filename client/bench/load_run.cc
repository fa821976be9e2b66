#include "client/bench/load_run.h"

#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/bench/token_source.h"
#include "client/error_details.h"
#include "engram/v1/engram.grpc.pb.h"

namespace engram::bench {
namespace {

// A server that is away refuses connections within microseconds: a closed loop would count nothing but that.
constexpr absl::Duration kPauseAfterUnavailable = absl::Milliseconds(50);

// How much more than its tensors a reply may hold.
constexpr int64_t kMostEnvelope = client::kMaxEnvelopeBytes;

std::string ErrorLabel(const grpc::Status& status) {
  const absl::Status error = client::StatusFromGrpc(status);
  std::string label = absl::StatusCodeToString(error.code());
  const std::string reason = client::ErrorReason(error);
  if (!reason.empty()) label += ' ';
  // It is a server's, and goes to terminals.
  for (const char c : reason.substr(0, 64)) label += absl::ascii_isgraph(static_cast<unsigned char>(c)) ? c : '?';
  return label;
}

absl::Duration ProcessCpu() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return absl::DurationFromTimeval(usage.ru_utime) + absl::DurationFromTimeval(usage.ru_stime);
}

class LoadRun {
 public:
  LoadRun(Connections& connections, const RequestComposer& composer, StepSource& source, const LoadRunOptions& options)
      : connections_(connections),
        composer_(composer),
        source_(source),
        options_(options),
        slots_(options.slots),
        threads_(static_cast<size_t>(connections.threads())) {}

  Stretch Closed() {
    Begin();
    end_ = begin_ + absl::ToInt64Nanoseconds(options_.duration);
    {
      absl::MutexLock lock(&mutex_);
      busy_ = slots_.size();
    }
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      slots_[slot].call.done = [this, slot] {
        const bool away = Ended(slot);
        if (NowNanos() >= end_) return Idle();
        if (away) {
          connections_.After(kPauseAfterUnavailable, slot, [this, slot] { Send(slot, std::nullopt); });
        } else {
          Send(slot, std::nullopt);
        }
      };
      Send(slot, std::nullopt);
    }
    AwaitAll();
    return Finish();
  }

  Stretch Open(Arrivals& arrivals) {
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      slots_[slot].call.done = [this, slot] {
        Ended(slot);
        const absl::MutexLock lock(&mutex_);
        free_.push_back(slot);
        --busy_;
      };
      free_.push_back(slot);
    }
    // Wake-ups within microseconds, not the 50 that Linux allows itself.
    prctl(PR_SET_TIMERSLACK, 1000);
    Begin();
    end_ = begin_ + absl::ToInt64Nanoseconds(options_.duration);
    for (;;) {
      const int64_t due = begin_ + arrivals.Next();
      if (due >= end_) break;
      if (const int64_t ahead = due - NowNanos(); ahead > 0) absl::SleepFor(absl::Nanoseconds(ahead));
      const std::optional<size_t> slot = TakeSlot();
      if (!slot.has_value()) {
        do ++stretch_.unsent;
        while (begin_ + arrivals.Next() < end_);
        break;
      }
      stretch_.send_lag.Add(absl::Nanoseconds(Send(*slot, due) - due));
    }
    AwaitAll();
    Stretch stretch = Finish();
    // All of them began in it; the time from the first to the last would have one gap fewer than calls.
    stretch.elapsed = options_.duration;
    return stretch;
  }

 private:
  struct Slot {
    RawCall call;
    Step step;
    int64_t payload_up = 0;
    int64_t payload_down = 0;
    int64_t tokens = 0;
    int64_t due = 0;
    uint64_t calls = 0;
  };
  struct Thread {
    Tally tally;
    int64_t last_end = 0;
  };

  void Begin() {
    cpu_ = ProcessCpu();
    begin_ = NowNanos();
  }

  // Makes the slot's next call, due at `due`, or when it is sent; returns when that was.
  int64_t Send(size_t slot, std::optional<int64_t> due) {
    Slot& own = slots_[slot];
    const std::string* ticket = &no_ticket_;
    if (options_.prepared != nullptr && !options_.prepared->empty()) {
      const PreparedStep& prepared = (*options_.prepared)[slot % options_.prepared->size()];
      ticket = &prepared.ticket;
      if (own.calls == 0) own.step = prepared.step;
      own.step.highway_at =
          static_cast<int64_t>(Mix(slot ^ Mix(own.calls)) % static_cast<uint64_t>(composer_.highway_starts()));
    } else {
      source_.Next(slot, &own.step);
    }
    ++own.calls;
    const Composed composed =
        options_.echo ? composer_.ComposeEcho(own.step, *ticket) : composer_.Compose(own.step, *ticket);
    own.payload_up = composed.payload_up;
    own.payload_down = composed.payload_down;
    own.tokens = composed.tokens;
    // From here on the call may end at any time, and the slot be another one's.
    const int64_t sent = NowNanos();
    own.due = due.value_or(sent);
    connections_.Start(&own.call, slot, composed.method, composed.message, options_.timeout);
    return sent;
  }

  // On the slot's thread. True where the server is away.
  bool Ended(size_t slot) {
    const int64_t now = NowNanos();
    Slot& own = slots_[slot];
    Thread& thread = threads_[static_cast<size_t>(connections_.thread_of(slot))];
    thread.last_end = now;
    if (!own.call.status.ok()) {
      ++thread.tally.errors[ErrorLabel(own.call.status)];
      thread.tally.failures.Add(absl::Nanoseconds(now - own.due));
      source_.Restart(slot);
      return own.call.status.error_code() == grpc::StatusCode::UNAVAILABLE;
    }
    const auto bytes = static_cast<int64_t>(own.call.reply.Length());
    if (bytes < own.payload_down || bytes > own.payload_down + kMostEnvelope) {
      ++thread.tally.errors["INTERNAL reply of the wrong size"];
      thread.tally.failures.Add(absl::Nanoseconds(now - own.due));
      return false;
    }
    thread.tally.latency.Add(absl::Nanoseconds(now - own.due));
    thread.tally.tokens += own.tokens;
    thread.tally.payload_up += own.payload_up;
    thread.tally.payload_down += own.payload_down;
    if (options_.reply_seen != nullptr) options_.reply_seen(own.step, own.call.reply);
    return false;
  }

  void Idle() {
    const absl::MutexLock lock(&mutex_);
    --busy_;
  }

  // Waits for one; none when the time is over.
  std::optional<size_t> TakeSlot() {
    const absl::MutexLock lock(&mutex_);
    if (free_.empty()) {
      ++stretch_.bound_hits;
      const int64_t from = NowNanos();
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](std::vector<size_t>* free) { return !free->empty(); }, &free_),
                              absl::Nanoseconds(std::max<int64_t>(0, end_ - from)));
      stretch_.bound_waits += absl::Nanoseconds(NowNanos() - from);
      if (free_.empty()) return std::nullopt;
    }
    // The one that ended first: all slots, and so all connections, take turns.
    const size_t slot = free_.front();
    free_.erase(free_.begin());
    ++busy_;
    return slot;
  }

  void AwaitAll() {
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](size_t* busy) { return *busy == 0; }, &busy_));
  }

  Stretch Finish() {
    stretch_.client_cpu = ProcessCpu() - cpu_;
    int64_t last = begin_;
    for (const Thread& thread : threads_) {
      stretch_.tally.Merge(thread.tally);
      last = std::max(last, thread.last_end);
    }
    stretch_.elapsed = absl::Nanoseconds(last - begin_);
    return std::move(stretch_);
  }

  Connections& connections_;
  const RequestComposer& composer_;
  StepSource& source_;
  const LoadRunOptions& options_;
  const std::string no_ticket_;
  std::vector<Slot> slots_;
  std::vector<Thread> threads_;  // of the connections, each touched by itself alone until all calls have ended
  int64_t begin_ = 0;
  int64_t end_ = 0;
  absl::Duration cpu_;
  Stretch stretch_;

  absl::Mutex mutex_;
  size_t busy_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<size_t> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Stretch RunClosedLoop(Connections& connections, const RequestComposer& composer, StepSource& source,
                      const LoadRunOptions& options) {
  return LoadRun(connections, composer, source, options).Closed();
}

Stretch RunOpenLoop(Connections& connections, const RequestComposer& composer, StepSource& source, Arrivals& arrivals,
                    const LoadRunOptions& options) {
  return LoadRun(connections, composer, source, options).Open(arrivals);
}

absl::StatusOr<std::vector<PreparedStep>> PrepareSteps(Connections& connections, const RequestComposer& composer,
                                                       StepSource& source, size_t count, absl::Duration timeout,
                                                       LatencyHistogram* took) {
  std::vector<PreparedStep> prepared(count);
  for (size_t i = 0; i < count; ++i) {
    source.Next(i, &prepared[i].step);
    const Composed composed = composer.ComposePrepare(prepared[i].step);
    RawCall call;
    absl::Notification ended;
    call.done = [&ended] { ended.Notify(); };
    connections.Start(&call, i, composed.method, composed.message, timeout);
    ended.WaitForNotification();
    const int64_t now = NowNanos();
    if (!call.status.ok()) {
      const absl::Status error = client::StatusFromGrpc(call.status);
      return {absl::Status(error.code(), absl::StrCat("Prepare: ", ErrorLabel(call.status), ": ", error.message()))};
    }
    took->Add(absl::Nanoseconds(now - call.started));
    v1::PrepareResponse response;
    if (!grpc::SerializationTraits<v1::PrepareResponse>::Deserialize(&call.reply, &response).ok() ||
        response.ticket().empty()) {
      return absl::InternalError("Prepare: the server's reply has no ticket");
    }
    prepared[i].ticket = response.ticket();
  }
  return prepared;
}

absl::Status ProbeEcho(Connections& connections, const std::string& address, absl::Duration timeout) {
  // 8 bytes that ask for more than they are, which nothing but an echo server gives.
  constexpr int64_t kAsked = 24;
  const grpc::Slice slice(&kAsked, sizeof kAsked);
  RawCall call;
  absl::Notification ended;
  call.done = [&ended] { ended.Notify(); };
  connections.Start(&call, 0, "/engram.v1.EngramService/Apply", grpc::ByteBuffer(&slice, 1), timeout);
  ended.WaitForNotification();
  if (call.status.ok() && call.reply.Length() == static_cast<size_t>(kAsked)) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "no engram-bench echo-server answers at ", address, ": ",
      call.status.ok() ? absl::StrCat("a call for ", kAsked, " bytes got ", call.reply.Length())
                       : absl::StrCat(ErrorLabel(call.status), ", ", client::StatusFromGrpc(call.status).message())));
}

}  // namespace engram::bench
