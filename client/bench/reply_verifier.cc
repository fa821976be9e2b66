#include "client/bench/reply_verifier.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/bench/expected_reply.h"
#include "client/bench/token_source.h"
#include "engram/v1/engram.grpc.pb.h"

namespace engram::bench {
namespace {

// Replies that may wait, with their requests' ids: some seconds of a fast connection's.
constexpr int64_t kMostWaitingBytes = int64_t{512} << 20;

// Mismatches kept word for word; all are counted.
constexpr size_t kMostMismatches = 10;

}  // namespace

absl::StatusOr<std::unique_ptr<ReplyVerifier>> ReplyVerifier::Make(const std::string& model_path, double fraction,
                                                                   uint64_t seed, const client::ModelInfo& served,
                                                                   const RequestComposer& composer) {
  absl::StatusOr<std::unique_ptr<Recomputer>> recomputer = Recomputer::Load(model_path, served);
  if (!recomputer.ok()) return recomputer.status();
  return std::unique_ptr<ReplyVerifier>(new ReplyVerifier(*std::move(recomputer), fraction, seed, served, composer));
}

ReplyVerifier::ReplyVerifier(std::unique_ptr<Recomputer> recomputer, double fraction, uint64_t seed,
                             const client::ModelInfo& served, const RequestComposer& composer)
    : recomputer_(std::move(recomputer)),
      fraction_(fraction),
      seed_(seed),
      served_(served),
      composer_(composer),
      thread_([this] { Work(); }) {}

ReplyVerifier::~ReplyVerifier() {
  {
    const absl::MutexLock lock(&mutex_);
    ending_ = true;
    waiting_.clear();
  }
  thread_.join();
}

void ReplyVerifier::Offer(const Step& step, const grpc::ByteBuffer& reply) {
  const absl::MutexLock lock(&mutex_);
  if (UnitOf(Mix(seed_ ^ Mix(offered_++))) >= fraction_) return;
  // Slices are shared, not copied.
  Waiting waiting = {step, reply, static_cast<int64_t>(reply.Length()) + 4 * step.tokens()};
  if (!waiting_.empty() && waiting_bytes_ + waiting.bytes > kMostWaitingBytes) {
    ++report_.skipped;
    return;
  }
  waiting_bytes_ += waiting.bytes;
  waiting_.push_back(std::move(waiting));
}

void ReplyVerifier::Work() {
  // Only what the load and the server leave: on Linux a thread has a priority of its own.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  absl::MutexLock lock(&mutex_);
  for (;;) {
    mutex_.Await(absl::Condition(
        +[](ReplyVerifier* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->ending_ || !self->waiting_.empty(); },
        this));
    if (ending_) return;
    Waiting waiting = std::move(waiting_.front());
    waiting_.pop_front();
    waiting_bytes_ -= waiting.bytes;
    busy_ = true;
    mutex_.Unlock();
    std::string mismatch = Check(waiting);
    mutex_.Lock();
    busy_ = false;
    ++report_.checked;
    if (mismatch.empty()) continue;
    ++report_.wrong;
    if (report_.mismatches.size() < kMostMismatches) report_.mismatches.push_back(std::move(mismatch));
  }
}

std::string ReplyVerifier::Check(Waiting& waiting) {
  // Apply's and Lookup's replies have the same shape as far as tensors go.
  v1::ApplyResponse reply;
  if (!grpc::SerializationTraits<v1::ApplyResponse>::Deserialize(&waiting.reply, &reply).ok()) {
    return "the reply is no message of the service's";
  }
  ReplyRules rules = {&served_, composer_.dtype(), recomputer_->same_numerics(), {}};
  for (size_t layer = 0; layer < composer_.layer_ids().size(); ++layer) {
    rules.highways.push_back(SendsHighway(waiting.step.form) ? composer_.HighwayOf(waiting.step, layer) : nullptr);
  }
  const auto expected = recomputer_->Compute(waiting.step, composer_.layer_ids(), composer_.dtype(), rules.highways);
  if (!expected.ok()) return absl::StrCat("cannot be recomputed: ", expected.status().message());
  return FirstMismatch(rules, waiting.step, *expected, reply.layers());
}

VerifyReport ReplyVerifier::Finish() {
  const absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](ReplyVerifier* self) ABSL_NO_THREAD_SAFETY_ANALYSIS { return !self->busy_ && self->waiting_.empty(); },
      this));
  return std::exchange(report_, {});
}

absl::Duration ReplyVerifier::CpuTime() const {
  clockid_t clock{};
  timespec used{};
  if (pthread_getcpuclockid(const_cast<std::thread&>(thread_).native_handle(), &clock) != 0) return {};
  clock_gettime(clock, &used);
  return absl::DurationFromTimespec(used);
}

std::string ReplyVerifier::Against() const {
  const std::string share = absl::StrCat(fraction_ * 100, " % of replies, recomputed here");
  if (recomputer_->same_numerics()) return absl::StrCat(share, " and compared bit for bit");
  return absl::StrCat(share, "; rows bit for bit, the rest within tolerances, since this machine computes as ",
                      recomputer_->numerics_id());
}

}  // namespace engram::bench
