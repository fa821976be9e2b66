// The queue and the batch, with a backend that the test holds by the hand.
#include "server/engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "server/engine/cpu_backend.h"
#include "server/refusal/refusal.h"
#include "tests/engine/event.h"

namespace engram {
namespace {

// Notes the size of each step; the first waits until it is let go.
class HeldBackend final : public Backend {
 public:
  struct Log {
    Event entered, let_go;
    std::mutex mutex;
    std::vector<int64_t> steps;
    std::atomic<int> fail_step{-1};        // index of a step that fails
    std::atomic<int64_t> light_tokens{0};  // calls of so few are light
    std::vector<std::thread::id> threads;  // of each step
  };
  explicit HeldBackend(std::shared_ptr<Log> log) : log_(std::move(log)) {}

  void Start(const Step& step, LayerDone layer_done, StepDone done) override {
    size_t index = 0;
    {
      const std::lock_guard<std::mutex> lock(log_->mutex);
      index = log_->steps.size();
      log_->steps.push_back(step.hashed_tokens);
      log_->threads.push_back(std::this_thread::get_id());
    }
    if (index == 0) {
      log_->entered.Notify();
      log_->let_go.Await();
    }
    if (static_cast<int>(index) == log_->fail_step) return done(absl::InternalError("device on fire"));
    for (size_t i = 0; i < step.layers.size(); ++i) layer_done(i);
    done(StepTimes{});
  }
  StagingMemory TakePreparedKv(int64_t) override { return nullptr; }  // no call of these tests prepares
  bool IsLight(const Call& call) const override { return call.tokens <= log_->light_tokens; }
  std::string name() const override { return "held"; }
  std::string numerics_id() const override { return "held"; }

 private:
  const std::shared_ptr<Log> log_;
};

class EngineTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBatch = 10;

  void SetUp() override {
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf", {});
    ASSERT_TRUE(model.ok()) << model.status();
    engine_ = std::make_unique<Engine>(*model, std::make_unique<HeldBackend>(log_), ShapeOf(**model),
                                       EngineOptions{kBatch}, metrics_);
  }

  struct Outcome {
    Event over;
    absl::Status status;
    std::atomic<bool> committed{false};
    std::atomic<bool> cancelled{false};
    std::atomic<int> turn{0};    // when it was committed, counted over all calls
    std::atomic<int> layers{0};  // told of as done
  };

  std::shared_ptr<Outcome> Submit(int64_t tokens, absl::Time deadline = absl::InfiniteFuture(),
                                  absl::Status commit = absl::OkStatus(), Priority priority = Priority::kDecode,
                                  std::vector<std::string> sessions = {}) {
    auto outcome = std::make_shared<Outcome>();
    auto call = std::make_unique<Call>();
    call->form = Form::kKv;
    if (tokens > 0) {
      call->layers = {{.layer = 0, .highway = nullptr, .out = out_}};
      call->sequences = {{.tokens = tokens}};
    }
    call->tokens = tokens;
    call->priority = priority;
    call->session_keys = std::move(sessions);
    call->deadline = deadline;
    call->commit = [this, outcome, tokens, commit](Call& c) {
      outcome->committed = true;
      outcome->turn = ++turns_;
      c.windows.assign(static_cast<size_t>(3 + tokens), 1);
      return commit;
    };
    call->layer_done = [outcome](const Call&, size_t) { ++outcome->layers; };
    call->cancelled = [outcome] { return outcome->cancelled.load(); };
    call->done = [outcome](Call&, absl::Status status) {
      outcome->status = std::move(status);
      outcome->over.Notify();
    };
    engine_->Submit(std::move(call));
    return outcome;
  }

  std::vector<int64_t> Steps() {
    const std::lock_guard<std::mutex> lock(log_->mutex);
    return log_->steps;
  }

  std::shared_ptr<HeldBackend::Log> log_ = std::make_shared<HeldBackend::Log>();
  std::atomic<int> turns_{0};
  char out_[1] = {};  // HeldBackend writes nothing
  Metrics metrics_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, WhatWaitsFormsTheNextBatchUpToItsLimit) {
  auto first = Submit(1);
  log_->entered.Await();
  std::vector<std::shared_ptr<Outcome>> calls = {Submit(4), Submit(5), Submit(3)};
  log_->let_go.Notify();
  for (const auto& call : calls) {
    call->over.Await();
    EXPECT_TRUE(call->status.ok());
  }
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 10, 2})) << "4 + 5 + 1 of 3, then the rest";
}

TEST_F(EngineTest, ALightCallRunsWhereItIsSubmitted) {
  log_->let_go.Notify();
  log_->light_tokens = 2;
  for (const int64_t tokens : {1, 2}) {
    auto call = Submit(tokens);
    ASSERT_EQ(call->layers, 1) << "over before Submit() returns";
    call->over.Await();
    EXPECT_TRUE(call->status.ok());
  }
  Submit(3)->over.Await();
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(log_->threads[0], std::this_thread::get_id());
  EXPECT_EQ(log_->threads[1], std::this_thread::get_id());
  EXPECT_NE(log_->threads[2], std::this_thread::get_id());
}

TEST_F(EngineTest, ALightCallBehindOthersWaitsForItsTurn) {
  auto first = Submit(8);
  log_->entered.Await();
  log_->light_tokens = 2;
  auto heavy = Submit(9);
  auto light = Submit(2);
  EXPECT_EQ(light->layers, 0);
  log_->let_go.Notify();
  light->over.Await();
  EXPECT_GT(light->turn, heavy->turn);
  EXPECT_EQ(Steps(), (std::vector<int64_t>{8, 10, 1})) << "2 with 9, cut at the batch's limit";
}

// A light call cut by a small batch, or met by heavy ones while it runs, leaves the rest to the engine's thread.
TEST_F(EngineTest, WhatALightCallLeavesTheEngineGoesOnWith) {
  log_->light_tokens = 25;
  std::shared_ptr<Outcome> cut;
  std::thread submitter([&] { cut = Submit(25); });  // held in its first batch, on this thread
  log_->entered.Await();
  log_->light_tokens = 0;
  auto heavy = Submit(4);
  log_->let_go.Notify();
  submitter.join();
  cut->over.Await();
  heavy->over.Await();
  EXPECT_TRUE(cut->status.ok());
  EXPECT_TRUE(heavy->status.ok());
  EXPECT_EQ(Steps(), (std::vector<int64_t>{10, 10, 9}));
}

TEST_F(EngineTest, AThreadThatSubmitsRunsNoMoreThanFourInARow) {
  log_->light_tokens = 1;
  std::shared_ptr<Outcome> first;
  std::thread submitter([&] { first = Submit(1); });
  const std::thread::id its_id = submitter.get_id();
  log_->entered.Await();
  std::vector<std::shared_ptr<Outcome>> calls;
  for (int i = 0; i < 6; ++i) calls.push_back(Submit(1));
  log_->let_go.Notify();
  submitter.join();
  for (const auto& call : calls) {
    call->over.Await();
    EXPECT_TRUE(call->status.ok());
  }
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 1, 1, 1, 3})) << "four alone, then one batch";
  EXPECT_EQ(std::count(log_->threads.begin(), log_->threads.end(), its_id), 4);
}

TEST_F(EngineTest, AnEngineThatStopsWaitsForALightCall) {
  log_->light_tokens = 1;
  std::shared_ptr<Outcome> running;
  std::thread submitter([&] { running = Submit(1); });
  log_->entered.Await();
  auto waiting = Submit(1);
  std::thread stopper([&] { engine_.reset(); });
  absl::SleepFor(absl::Milliseconds(20));  // enough for the stop to be seen, as a rule
  log_->let_go.Notify();
  submitter.join();
  stopper.join();
  EXPECT_TRUE(running->status.ok());
  waiting->over.Await();  // served or refused, by whether the stop came first
}

TEST_F(EngineTest, ALongCallIsCut) {
  log_->let_go.Notify();
  auto call = Submit(34);
  call->over.Await();
  EXPECT_TRUE(call->status.ok());
  EXPECT_EQ(Steps(), (std::vector<int64_t>{10, 10, 10, 4}));
}

TEST_F(EngineTest, ACallCancelledWhileItWaitsIsNeitherCommittedNorComputed) {
  auto first = Submit(1);
  log_->entered.Await();
  auto call = Submit(4);
  call->cancelled = true;
  log_->let_go.Notify();
  call->over.Await();
  EXPECT_EQ(call->status.code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(call->committed);
  EXPECT_EQ(Steps(), std::vector<int64_t>{1});
}

TEST_F(EngineTest, ACallWhoseDeadlinePassesWhileItWaitsIsNeitherCommittedNorComputed) {
  auto first = Submit(1);
  log_->entered.Await();
  auto call = Submit(4, absl::Now() - absl::Seconds(1));
  log_->let_go.Notify();
  call->over.Await();
  EXPECT_EQ(call->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(call->committed);
  EXPECT_EQ(Steps(), std::vector<int64_t>{1});
}

TEST_F(EngineTest, LaterBatchesOfALongCallAreNotComputedOnceItIsCancelled) {
  auto call = Submit(100);
  log_->entered.Await();
  call->cancelled = true;
  log_->let_go.Notify();
  call->over.Await();
  EXPECT_TRUE(call->committed);
  EXPECT_EQ(call->status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Steps(), std::vector<int64_t>{10});
}

TEST_F(EngineTest, ARefusedCommitEndsThatCallAlone) {
  auto first = Submit(1);
  log_->entered.Await();
  auto bad = Submit(4, absl::InfiniteFuture(), absl::FailedPreconditionError("gap"));
  auto good = Submit(4);
  log_->let_go.Notify();
  good->over.Await();
  EXPECT_TRUE(good->status.ok());
  bad->over.Await();
  EXPECT_EQ(bad->status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 4}));
}

TEST_F(EngineTest, AFailedBatchFailsItsCallsAndNoOthers) {
  log_->fail_step = 1;
  auto first = Submit(1);
  log_->entered.Await();
  auto a = Submit(4);
  auto b = Submit(30);  // cut: its first piece is in the failing batch
  log_->let_go.Notify();
  a->over.Await();
  b->over.Await();
  EXPECT_EQ(a->status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(b->status.code(), absl::StatusCode::kInternal);
  auto after = Submit(2);
  after->over.Await();
  EXPECT_TRUE(after->status.ok());
  EXPECT_TRUE(first->status.ok());
}

TEST_F(EngineTest, DecodeOvertakesALongPrefillAtTheNextBatch) {
  auto prefill = Submit(100, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill);
  log_->entered.Await();
  auto decode = Submit(1);
  log_->let_go.Notify();
  decode->over.Await();
  prefill->over.Await();
  const std::vector<int64_t> steps = Steps();
  EXPECT_EQ(std::count(steps.begin(), steps.end(), 10), 10) << "the decode token rides along in the second batch";
  EXPECT_EQ(prefill->turn, 1);
  EXPECT_EQ(decode->turn, 2);
  EXPECT_EQ(prefill->layers, 1);
}

TEST_F(EngineTest, DecodeGoesBeforePrefillsThatWaitedLonger) {
  auto first = Submit(1);
  log_->entered.Await();
  auto prefill = Submit(100, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill);
  auto decode = Submit(2);
  log_->let_go.Notify();
  prefill->over.Await();
  EXPECT_LT(decode->turn, prefill->turn);
  EXPECT_EQ(Steps().at(1), 10) << "2 of DECODE, 8 of PREFILL";
}

TEST_F(EngineTest, DecodeNeverStarvesPrefill) {
  auto first = Submit(1);
  log_->entered.Await();
  auto prefill = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill);
  std::vector<std::shared_ptr<Outcome>> decodes;
  for (int i = 0; i < 40; ++i) decodes.push_back(Submit(9));
  log_->let_go.Notify();
  prefill->over.Await();
  for (const auto& decode : decodes) decode->over.Await();
  EXPECT_EQ(prefill->turn, 3) << "an eighth of each batch is the prefill's";
}

TEST_F(EngineTest, ACallNeverOvertakesAnEarlierOneOfItsSession) {
  auto first = Submit(1);
  log_->entered.Await();
  auto prefill = Submit(100, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill, {"s"});
  auto same = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kDecode, {"s"});
  auto other = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kDecode, {"t"});
  log_->let_go.Notify();
  same->over.Await();
  EXPECT_LT(other->turn, prefill->turn);
  EXPECT_LT(prefill->turn, same->turn);
}

TEST_F(EngineTest, APrefillNeverOvertakesAnEarlierDecodeOfItsSession) {
  auto first = Submit(1);
  log_->entered.Await();
  // More DECODE than a batch holds: the last of it is still waiting when PREFILL gets its share.
  std::vector<std::shared_ptr<Outcome>> decodes;
  for (int i = 0; i < 4; ++i) decodes.push_back(Submit(9));
  auto same = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kDecode, {"s"});
  auto other = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill, {"t"});
  auto prefill = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill, {"s"});
  log_->let_go.Notify();
  prefill->over.Await();
  EXPECT_LT(same->turn, prefill->turn);
  EXPECT_LT(other->turn, same->turn) << "only those of its session wait for it";
}

TEST_F(EngineTest, ACallWithoutTokensIsItsCommitInItsTurn) {
  auto first = Submit(1, absl::InfiniteFuture(), absl::OkStatus(), Priority::kDecode, {"s"});
  log_->entered.Await();
  auto prefill = Submit(100, absl::InfiniteFuture(), absl::OkStatus(), Priority::kPrefill, {"s"});
  auto close = Submit(0, absl::InfiniteFuture(), absl::OkStatus(), Priority::kDecode, {"s"});
  log_->let_go.Notify();
  close->over.Await();
  EXPECT_TRUE(close->status.ok());
  EXPECT_GT(close->turn, prefill->turn);
}

// A stream's reply goes out when its layers are done, so that they must be, whoever is served.
TEST_F(EngineTest, LayersAreDoneWhereEverySequenceOrTheLastOfThemIsRefused) {
  log_->let_go.Notify();
  for (const int64_t tokens : {int64_t{0}, kBatch, kBatch + 3}) {
    auto outcome = std::make_shared<Outcome>();
    auto call = std::make_unique<Call>();
    call->form = Form::kKv;
    call->layers = {{.layer = 0, .highway = nullptr, .out = out_}, {.layer = 1, .highway = nullptr, .out = out_}};
    // Of kBatch + 3 tokens the last batch holds the second sequence alone.
    call->sequences = {{.tokens = std::min(tokens, kBatch)}, {.tokens = std::max<int64_t>(0, tokens - kBatch)}};
    call->tokens = tokens;
    call->commit = [tokens](Call& c) {
      c.windows.assign(static_cast<size_t>(2 * 3 + c.tokens), 1);
      c.sequences[0].refused = tokens <= kBatch;
      c.sequences[1].refused = true;
      return absl::OkStatus();
    };
    call->layer_done = [outcome](const Call&, size_t) { ++outcome->layers; };
    call->cancelled = [] { return false; };
    call->done = [outcome](Call&, absl::Status status) {
      outcome->status = std::move(status);
      outcome->over.Notify();
    };
    engine_->Submit(std::move(call));
    outcome->over.Await();
    EXPECT_TRUE(outcome->status.ok()) << outcome->status;
    EXPECT_EQ(outcome->layers, 2) << tokens;
  }
}

TEST_F(EngineTest, StoppingRefusesWhatStillWaits) {
  auto first = Submit(1);
  log_->entered.Await();
  auto waiting = Submit(4);
  std::thread stopper([this] { engine_.reset(); });
  absl::SleepFor(absl::Milliseconds(20));
  log_->let_go.Notify();
  stopper.join();
  waiting->over.Await();
  first->over.Await();
  EXPECT_TRUE(first->status.ok()) << "the batch at hand is finished: " << first->status;
  EXPECT_EQ(DetailOf(waiting->status).offenders.at(0).reason, Reason::kDraining);
}

TEST_F(EngineTest, ManyThreadsSubmitAndEveryCallEndsOnce) {
  log_->let_go.Notify();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      std::vector<std::shared_ptr<Outcome>> calls;
      for (int i = 0; i < 200; ++i) calls.push_back(Submit(1 + i % 25));
      for (const auto& call : calls) {
        call->over.Await();  // a second end fails the test
        EXPECT_TRUE(call->status.ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace engram
