// A share of the replies, recomputed and compared beside the load: on one thread that gives way to everything else.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/bench/recompute/recomputer.h"
#include "client/bench/report.h"
#include "client/bench/request_composer.h"
#include "grpcpp/support/byte_buffer.h"

namespace engram::bench {

class ReplyVerifier {
 public:
  // `fraction` in (0, 1] of the replies offered, chosen by `seed`. Errors as Recomputer's. `composer` outlives this.
  static absl::StatusOr<std::unique_ptr<ReplyVerifier>> Make(const std::string& model_path, double fraction,
                                                             uint64_t seed, const client::ModelInfo& served,
                                                             const RequestComposer& composer);
  // Replies still waiting are dropped.
  ~ReplyVerifier();
  ReplyVerifier(const ReplyVerifier&) = delete;
  ReplyVerifier& operator=(const ReplyVerifier&) = delete;

  // A served call. Never blocks and copies no tensor; a chosen reply that finds too many waiting is counted as skipped.
  // Any thread.
  void Offer(const Step& step, const grpc::ByteBuffer& reply);

  // Waits until all that wait are looked at; returns what was found since the last time.
  VerifyReport Finish();

  // Of the thread that computes, since it began.
  absl::Duration CpuTime() const;

  // What is compared with what, in words.
  std::string Against() const;

 private:
  struct Waiting {
    Step step;
    grpc::ByteBuffer reply;
    int64_t bytes = 0;
  };

  ReplyVerifier(std::unique_ptr<Recomputer> recomputer, double fraction, uint64_t seed, const client::ModelInfo& served,
                const RequestComposer& composer);

  void Work();
  // Empty where the reply is right.
  std::string Check(Waiting& waiting);

  const std::unique_ptr<Recomputer> recomputer_;
  const double fraction_;
  const uint64_t seed_;
  const client::ModelInfo served_;
  const RequestComposer& composer_;

  absl::Mutex mutex_;
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t offered_ ABSL_GUARDED_BY(mutex_) = 0;
  VerifyReport report_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace engram::bench
