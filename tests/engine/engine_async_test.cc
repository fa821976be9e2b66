// The engine on a backend that has several steps under way.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "server/engine/engine.h"
#include "server/refusal/refusal.h"
#include "tests/engine/async_backend.h"
#include "tests/engine/event.h"

namespace engram {
namespace {

// Long enough for what must not happen to happen, as a rule.
void GiveItTime() { absl::SleepFor(absl::Milliseconds(30)); }

class EngineAsyncTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBatch = 10;

  void SetUp() override {
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf", {});
    ASSERT_TRUE(model.ok()) << model.status();
    shape_ = ShapeOf(**model);
    auto cpu = CpuBackend::Create(*model, kernels::CpuKernels(), {.threads = 1, .max_batch_tokens = kBatch});
    ASSERT_TRUE(cpu.ok()) << cpu.status();
    engine_ = std::make_unique<Engine>(*model, std::make_unique<AsyncBackend>(*std::move(cpu), hand_), shape_,
                                       EngineOptions{kBatch}, metrics_);
  }

  struct Outcome {
    Event over;
    absl::Status status;
    std::atomic<bool> cancelled{false};
    std::atomic<int> turn{0};          // when it was committed, counted over all calls
    int ended = 0;                     // when it was answered, counted over all calls
    std::atomic<int> layers{0};        // told of as done
    std::vector<kernels::Bf16> kv[2];  // of two layers, [T, kv_values]
  };

  std::shared_ptr<Outcome> Submit(int64_t tokens, Priority priority = Priority::kDecode) {
    auto outcome = std::make_shared<Outcome>();
    auto call = std::make_unique<Call>();
    call->form = Form::kKv;
    for (int layer = 0; layer < 2; ++layer) {
      outcome->kv[layer].resize(static_cast<size_t>(tokens * shape_.kv_values()));
      call->layers.push_back({.layer = layer, .highway = nullptr, .out = outcome->kv[layer].data()});
    }
    call->sequences = {{.tokens = tokens}};
    call->tokens = tokens;
    call->priority = priority;
    call->commit = [this, outcome, tokens](Call& c) {
      outcome->turn = ++turns_;
      for (int64_t i = 0; i < shape_.max_ngram - 1 + tokens; ++i) c.windows.push_back(static_cast<int32_t>(i % 7));
      return absl::OkStatus();
    };
    call->layer_done = [outcome](const Call&, size_t index) {
      EXPECT_FALSE(outcome->over.happened()) << "layers are done before the call is";
      EXPECT_EQ(outcome->layers++, static_cast<int>(index));
    };
    call->cancelled = [outcome] { return outcome->cancelled.load(); };
    call->done = [this, outcome](Call&, absl::Status status) {
      outcome->status = std::move(status);
      outcome->ended = ++ends_;
      outcome->over.Notify();  // a second end fails the test
    };
    engine_->Submit(std::move(call));
    return outcome;
  }

  const std::shared_ptr<AsyncBackend::Hand> hand_ = std::make_shared<AsyncBackend::Hand>();
  std::atomic<int> turns_{0}, ends_{0};
  StepShape shape_;
  Metrics metrics_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineAsyncTest, AsManyStepsAreUnderWayAsTheBackendTakesAndTheRestFormsTheNext) {
  hand_->HoldFrom(0);
  std::vector<std::shared_ptr<Outcome>> calls;
  for (int i = 1; i <= AsyncBackend::kMostSteps; ++i) {
    calls.push_back(Submit(i));
    hand_->AwaitStarted(i);
  }
  calls.push_back(Submit(4));
  calls.push_back(Submit(5));
  GiveItTime();
  EXPECT_EQ(hand_->tokens(), (std::vector<int64_t>{1, 2, 3}));
  for (const auto& call : calls) EXPECT_FALSE(call->over.happened());
  hand_->LetAllGo();
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i]->over.Await();
    EXPECT_TRUE(calls[i]->status.ok()) << calls[i]->status;
    EXPECT_EQ(calls[i]->layers, 2);
    EXPECT_EQ(calls[i]->ended, static_cast<int>(i) + 1) << "in the order of their steps";
  }
  EXPECT_EQ(hand_->tokens(), (std::vector<int64_t>{1, 2, 3, 9}));
  EXPECT_EQ(hand_->most_under_way(), AsyncBackend::kMostSteps);
}

TEST_F(EngineAsyncTest, ACallCutOverStepsUnderWayTogetherHasTheBitsOfItsPieces) {
  hand_->HoldFrom(0);
  auto whole = Submit(25);
  hand_->AwaitStarted(3);
  hand_->LetAllGo();
  auto part = Submit(10);
  whole->over.Await();
  part->over.Await();
  EXPECT_EQ(hand_->tokens(), (std::vector<int64_t>{10, 10, 5, 10}));
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(std::equal(part->kv[layer].begin(), part->kv[layer].end(), whole->kv[layer].begin()));
    // The windows' ids come again after 7 tokens.
    const auto after = static_cast<int64_t>(21 * shape_.kv_values());
    EXPECT_TRUE(std::equal(whole->kv[layer].begin() + after, whole->kv[layer].end(), whole->kv[layer].begin()));
  }
}

TEST_F(EngineAsyncTest, ACallIsAnsweredWhenItsLastTokenIsComputedNotWhenItIsStarted) {
  hand_->HoldFrom(1);
  auto call = Submit(15);
  hand_->AwaitStarted(2);
  GiveItTime();
  EXPECT_FALSE(call->over.happened());
  EXPECT_EQ(call->layers, 0);
  hand_->LetAllGo();
  call->over.Await();
  EXPECT_TRUE(call->status.ok());
  EXPECT_EQ(call->layers, 2);
}

// Its later steps write where it says until they are done.
TEST_F(EngineAsyncTest, ACutCallThatFailsIsAnsweredWhenNoStepOfItIsUnderWay) {
  for (const int64_t tokens : {25, 100}) {  // all of it under way, or more to come
    const auto before = static_cast<int>(hand_->tokens().size());
    hand_->HoldFrom(before);
    hand_->Fail(before);
    auto call = Submit(tokens);
    hand_->AwaitStarted(before + 3);
    auto other = Submit(1);
    hand_->HoldFrom(before + 1);
    hand_->AwaitStarted(before + 4);  // the other's
    GiveItTime();
    EXPECT_FALSE(call->over.happened()) << tokens;
    hand_->LetAllGo();
    call->over.Await();
    other->over.Await();
    EXPECT_EQ(call->status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(call->layers, 0) << "of its last step it hears nothing";
    EXPECT_TRUE(other->status.ok()) << other->status;
    GiveItTime();
    const std::vector<int64_t> steps = hand_->tokens();
    EXPECT_EQ(static_cast<int>(steps.size()), before + 4) << "nothing of it is started after its failure";
    EXPECT_EQ(steps.back(), 1);
  }
}

TEST_F(EngineAsyncTest, ACallOfWhichTheLastStepFailsIsAnsweredOnceWithThat) {
  hand_->Fail(2);
  auto call = Submit(25);
  call->over.Await();
  EXPECT_EQ(call->status.code(), absl::StatusCode::kInternal);
  auto after = Submit(3);
  after->over.Await();
  EXPECT_TRUE(after->status.ok());
}

TEST_F(EngineAsyncTest, ACutCallThatIsCancelledIsAnsweredWhenNoStepOfItIsUnderWay) {
  hand_->HoldFrom(0);
  auto call = Submit(100);
  hand_->AwaitStarted(3);
  call->cancelled = true;
  auto other = Submit(2);
  hand_->HoldFrom(1);
  hand_->AwaitStarted(4);
  EXPECT_EQ(hand_->tokens().back(), 2) << "nothing more of the first";
  GiveItTime();
  EXPECT_FALSE(call->over.happened());
  hand_->LetAllGo();
  call->over.Await();
  other->over.Await();
  EXPECT_EQ(call->status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(call->layers, 0);
  EXPECT_TRUE(other->status.ok());
  EXPECT_LT(call->ended, other->ended);
}

// It keeps its first end.
TEST_F(EngineAsyncTest, ACancelledCallOfWhichAStepUnderWayFailsEndsOnce) {
  hand_->HoldFrom(0);
  hand_->Fail(1);
  auto call = Submit(100);
  hand_->AwaitStarted(3);
  call->cancelled = true;
  auto other = Submit(2);
  hand_->HoldFrom(1);
  hand_->AwaitStarted(4);
  hand_->LetAllGo();
  call->over.Await();
  other->over.Await();
  EXPECT_EQ(call->status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(other->status.ok());
}

TEST_F(EngineAsyncTest, DecodeOvertakesALongPrefillAtTheNextStepThatIsStarted) {
  hand_->HoldFrom(0);
  auto prefill = Submit(100, Priority::kPrefill);
  hand_->AwaitStarted(3);
  auto second = Submit(1, Priority::kPrefill);
  auto decode = Submit(1);
  hand_->HoldFrom(1);
  hand_->AwaitStarted(4);
  EXPECT_EQ(decode->turn, 2) << "committed for the fourth step";
  hand_->LetAllGo();
  decode->over.Await();
  second->over.Await();
  prefill->over.Await();
  EXPECT_LT(decode->ended, prefill->ended);
  EXPECT_EQ(second->turn, 3);
}

TEST_F(EngineAsyncTest, ALightCallIsStartedWhereItIsSubmittedIfNothingIsUnderWay) {
  hand_->SetLightTokens(2);
  hand_->HoldFrom(0);
  auto alone = Submit(1);
  EXPECT_EQ(hand_->tokens().size(), 1u) << "started before Submit() returns";
  auto behind = Submit(2);
  hand_->AwaitStarted(2);
  hand_->LetAllGo();
  alone->over.Await();
  behind->over.Await();
  EXPECT_EQ(hand_->threads()[0], std::this_thread::get_id());
  EXPECT_NE(hand_->threads()[1], std::this_thread::get_id());
}

TEST_F(EngineAsyncTest, AnEngineThatStopsWaitsForItsStepsAndRefusesTheRest) {
  hand_->HoldFrom(0);
  auto first = Submit(1);
  hand_->AwaitStarted(1);
  auto cut = Submit(100);
  hand_->AwaitStarted(3);
  auto waiting = Submit(4);
  std::thread stopper([this] { engine_.reset(); });
  GiveItTime();
  EXPECT_FALSE(first->over.happened() || cut->over.happened() || waiting->over.happened());
  hand_->LetAllGo();
  stopper.join();
  EXPECT_TRUE(first->over.happened() && cut->over.happened() && waiting->over.happened());
  EXPECT_TRUE(first->status.ok()) << first->status;
  EXPECT_EQ(DetailOf(cut->status).offenders.at(0).reason, Reason::kDraining);
  EXPECT_EQ(DetailOf(waiting->status).offenders.at(0).reason, Reason::kDraining);
  EXPECT_EQ(hand_->tokens(), (std::vector<int64_t>{1, 10, 10}));
}

TEST_F(EngineAsyncTest, ManyThreadsSubmitLightAndCutCallsAndEveryCallEndsOnce) {
  hand_->SetLightTokens(2);
  hand_->Fail(100);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, &failed] {
      std::vector<std::shared_ptr<Outcome>> calls;
      for (int i = 0; i < 200; ++i) {
        calls.push_back(Submit(1 + i % 25, i % 3 == 0 ? Priority::kPrefill : Priority::kDecode));
        if (i % 50 == 0) calls.back()->over.Await();
      }
      for (const auto& call : calls) {
        call->over.Await();
        EXPECT_TRUE(call->status.ok() || absl::IsInternal(call->status)) << call->status;
        if (!call->status.ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(failed, 0);
  EXPECT_LE(failed, kBatch);
}

}  // namespace
}  // namespace engram
