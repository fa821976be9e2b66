#include "client/raw_call.h"

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "client/error_details.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/client/raw_calls.h"

namespace engram::client {
namespace {

using testing::HasSubstr;

const std::string kReply(32, 'r');

// Refused as the server refuses; with a RetryInfo where `retry_after` is more than 0.
grpc::Status Refusal(grpc::StatusCode code, const std::string& reason, absl::Duration retry_after = {}) {
  google::rpc::ErrorInfo info;
  info.set_domain("engram");
  info.set_reason(reason);
  google::rpc::Status details;
  details.add_details()->PackFrom(info);
  if (retry_after > absl::ZeroDuration()) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(static_cast<int>(absl::ToInt64Nanoseconds(retry_after)));
    details.add_details()->PackFrom(retry);
  }
  return {code, reason + ": said the server", details.SerializeAsString()};
}

// An answer that never comes, until the client gives up.
grpc::Status Hang(grpc::ServerContext& context) {
  while (!context.IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
  return grpc::Status::CANCELLED;
}

// Two servers of one model. What a test sets in them must be set before Connect.
class RawCallTest : public testing::Test {
 protected:
  void Connect(bool both = true) {
    a_.Start();
    std::vector<std::string> targets = {a_.target()};
    if (both) {
      b_.Start();
      targets.push_back(b_.target());
    }
    ReplicaOptions options;
    options.targets = targets;
    options.ejection = {.failures = 3, .base = absl::Milliseconds(100), .max = absl::Milliseconds(400)};
    auto set = ReplicaSet::Connect(options);
    ASSERT_TRUE(set.ok()) << set.status();
    set_ = *std::move(set);
    for (const std::string& target : targets) {
      ASSERT_TRUE(Eventually([&] { return Serves(*set_, target); }));
    }
  }

  RawReply Call(const RetryOptions& options = {}) { return Await(*set_, ApplyOneToken(), options); }

  // The replica that the next call goes to first.
  FakeServer& Next() { return set_->Choose({})->replica() == a_.target() ? b_ : a_; }

  ReplicaState StateOf(const FakeServer& server) { return StatusOf(*set_, server.target()).state; }

  FakeServer a_;
  FakeServer b_;
  std::unique_ptr<ReplicaSet> set_;
};

TEST_F(RawCallTest, AnswersWithTheReplysBytes) {
  Connect();
  const RawReply reply = Call();
  EXPECT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(HighwayOf(reply), kReply);
  EXPECT_THAT(reply.replica, testing::AnyOf(a_.target(), b_.target()));
  EXPECT_EQ(reply.attempts, 1);
  for (const ReplicaStatus& status : set_->Replicas()) EXPECT_EQ(status.calls_in_flight, 0);
}

TEST_F(RawCallTest, ARefusalOfTheCallKeepsItsReasonAndIsNotRepeated) {
  for (FakeServer* server : {&a_, &b_}) {
    server->apply = [](auto&, auto&, auto*) {
      return Refusal(grpc::StatusCode::INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE");
    };
  }
  Connect();
  const RawReply reply = Call();
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(reply.status), "TOKEN_OUT_OF_RANGE");
  EXPECT_EQ(reply.attempts, 1);
}

TEST_F(RawCallTest, AnUnavailableReplicasCallGoesToAnother) {
  a_.apply = [](auto&, auto&, auto*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "loading"); };
  Connect();
  for (int i = 0; i < 6; ++i) {
    const RawReply reply = Call();
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    EXPECT_EQ(reply.replica, b_.target());
    EXPECT_LE(reply.attempts, 2);
  }
}

// What may have been done in part, in memory that the client shares with the server, is not done twice.
TEST_F(RawCallTest, ACallThatIsNotRepeatableIsSentAgainOnlyWhereItWasRefused) {
  std::atomic<bool> refuses = true;
  for (FakeServer* server : {&a_, &b_}) {
    server->apply = [&](auto&, auto&, auto*) {
      if (refuses.exchange(false)) return Refusal(grpc::StatusCode::UNAVAILABLE, "DRAINING");
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the connection broke");
    };
  }
  Connect();
  RawCall call = ApplyOneToken();
  call.repeatable = false;
  const RawReply reply = Await(*set_, std::move(call));
  EXPECT_THAT(std::string(reply.status.message()), HasSubstr("the connection broke"));
  EXPECT_EQ(reply.attempts, 2);
}

TEST_F(RawCallTest, AReplicaThatFailsInARowIsEjectedAndReturnsWhenItAnswers) {
  std::atomic<bool> broken = true;
  a_.apply = [&](auto&, auto&, auto*) {
    return broken ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "loading") : grpc::Status::OK;
  };
  a_.get_model = [&](auto&) {
    return broken && !a_.requests().empty() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "loading") : grpc::Status::OK;
  };
  Connect();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Call().status.ok());
  EXPECT_EQ(StateOf(a_), ReplicaState::kEjected);
  EXPECT_EQ(a_.requests().size(), 3u) << "ejection.failures";
  EXPECT_THAT(std::string(StatusOf(*set_, a_.target()).last_error.message()), HasSubstr("loading"));
  broken = false;
  EXPECT_TRUE(Eventually([&] { return Serves(*set_, a_.target()); }));
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Call().status.ok());
  EXPECT_EQ(a_.requests().size(), 5u) << "its share again";
}

TEST_F(RawCallTest, AKilledReplicaIsMissedByNobodyAndReturns) {
  Connect();
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Call().status.ok());
  a_.Stop();
  for (int i = 0; i < 10; ++i) {
    const RawReply reply = Call();
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    EXPECT_EQ(reply.replica, b_.target());
  }
  EXPECT_EQ(StateOf(a_), ReplicaState::kEjected);
  a_.model.set_server_epoch(8);
  a_.Start();
  EXPECT_TRUE(Eventually([&] { return Serves(*set_, a_.target()); }));
  EXPECT_TRUE(Eventually([&] { return Call().replica == a_.target(); }));
  EXPECT_EQ(StatusOf(*set_, a_.target()).server_epoch, 8u);
}

TEST_F(RawCallTest, OneThatRestartsWithAnotherModelNeverGetsACallAgain) {
  Connect();
  a_.Stop();
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Call().status.ok());
  const size_t before = a_.requests().size();
  a_.model.set_config_digest(std::string(32, '\x44'));
  a_.Start();
  EXPECT_TRUE(Eventually([&] { return StateOf(a_) == ReplicaState::kOtherModel; }));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Call().replica, b_.target());
  EXPECT_EQ(a_.requests().size(), before);
}

TEST_F(RawCallTest, OneThatRestartsUnnoticedWithAnotherModelRefusesAndTheCallMovesOn) {
  std::atomic<bool> other = false;
  a_.apply = [&](auto&, auto&, auto*) {
    return other ? Refusal(grpc::StatusCode::FAILED_PRECONDITION, "DIGEST_MISMATCH") : grpc::Status::OK;
  };
  Connect();
  a_.Stop();
  a_.model.set_config_digest(std::string(32, '\x44'));
  other = true;
  a_.Start();
  for (int i = 0; i < 10; ++i) {
    const RawReply reply = Call();
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    EXPECT_EQ(reply.replica, b_.target());
  }
  EXPECT_TRUE(Eventually([&] { return StateOf(a_) == ReplicaState::kOtherModel; }));
}

TEST_F(RawCallTest, ADigestThatNoReplicaHasIsRefusedOnceByEach) {
  for (FakeServer* server : {&a_, &b_}) {
    server->apply = [](auto&, auto&, auto*) {
      return Refusal(grpc::StatusCode::FAILED_PRECONDITION, "DIGEST_MISMATCH");
    };
  }
  Connect();
  const RawReply reply = Call({.attempts = 10});
  EXPECT_EQ(ErrorReason(reply.status), "DIGEST_MISMATCH");
  EXPECT_EQ(reply.attempts, 2);
  EXPECT_TRUE(Eventually([&] { return Serves(*set_, a_.target()) && Serves(*set_, b_.target()); }))
      << "the call was wrong, not the servers";
}

TEST_F(RawCallTest, AFullServersDelayIsHonoured) {
  std::atomic<int> calls = 0;
  a_.apply = [&](auto&, auto&, auto*) {
    return ++calls == 1 ? Refusal(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", absl::Milliseconds(300))
                        : grpc::Status::OK;
  };
  Connect(/*both=*/false);
  const absl::Time start = absl::Now();
  const RawReply reply = Call();
  EXPECT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.attempts, 2);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(290));
  EXPECT_EQ(StateOf(a_), ReplicaState::kServing) << "full is not broken";
}

TEST_F(RawCallTest, PushbackAloneIsHeardTooAndAPermanentRefusalIsFinal) {
  std::atomic<int> calls = 0;
  a_.apply = [&](grpc::ServerContext& context, auto&, auto*) {
    context.AddTrailingMetadata("grpc-retry-pushback-ms", ++calls == 1 ? "5" : "-1");
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "TOO_MANY_TOKENS");
  };
  Connect(/*both=*/false);
  const RawReply reply = Call({.attempts = 10});
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(reply.attempts, 2);
}

TEST_F(RawCallTest, AttemptsAreCountedAndTheLastErrorNamesItsReplica) {
  for (FakeServer* server : {&a_, &b_}) {
    server->apply = [](auto&, auto&, auto*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"); };
  }
  Connect();
  const RawReply reply = Call({.attempts = 3});
  EXPECT_EQ(reply.attempts, 3);
  EXPECT_EQ(reply.status.message(), reply.replica + ": gone");
  EXPECT_EQ(a_.requests().size() + b_.requests().size(), 3u);
  EXPECT_LE(a_.requests().size(), 2u) << "they take turns";
  EXPECT_LE(b_.requests().size(), 2u);
  EXPECT_EQ(Call({.attempts = 1}).attempts, 1);
}

TEST_F(RawCallTest, ARetryThatTheDeadlineLeavesNoTimeForIsNotWaitedFor) {
  a_.apply = [](auto&, auto&, auto*) {
    return Refusal(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", absl::Milliseconds(900));
  };
  Connect(/*both=*/false);
  RawCall call = ApplyOneToken(absl::Milliseconds(800));
  const RawReply reply = Await(*set_, std::move(call));
  EXPECT_EQ(ErrorReason(reply.status), "QUEUE_FULL");
  EXPECT_EQ(reply.attempts, 1);
}

TEST_F(RawCallTest, ADeadlineNamesTheReplicaAndTheTime) {
  a_.apply = [](grpc::ServerContext& context, auto&, auto*) { return Hang(context); };
  Connect(/*both=*/false);
  const RawReply reply = Await(*set_, ApplyOneToken(absl::Milliseconds(100)));
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(reply.status.message(), "no answer from " + a_.target() + " within 100ms");
  EXPECT_EQ(StateOf(a_), ReplicaState::kServing);
}

TEST_F(RawCallTest, ASlowReplicaIsOvertakenByASecondOne) {
  std::atomic<int> cancelled = 0;
  std::atomic<bool> slow = true;
  const auto hang_once = [&](grpc::ServerContext& context, auto&, auto*) {
    if (!slow.exchange(false)) return grpc::Status::OK;
    Hang(context);
    ++cancelled;
    return grpc::Status::CANCELLED;
  };
  a_.apply = hang_once;
  b_.apply = hang_once;
  Connect();
  for (int i = 1; i <= 5; ++i) {
    slow = true;
    RawCall call = ApplyOneToken();
    call.hedgeable = true;
    const RawReply reply = Await(*set_, std::move(call), {.hedge_after = absl::Milliseconds(20)});
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    EXPECT_EQ(HighwayOf(reply), kReply);
    EXPECT_EQ(reply.attempts, 2);
    EXPECT_TRUE(Eventually([&] { return cancelled == i; })) << "the loser is told";
  }
  EXPECT_EQ(StateOf(a_), ReplicaState::kServing) << "to lose is no failure";
  EXPECT_EQ(StateOf(b_), ReplicaState::kServing);
  EXPECT_TRUE(Eventually([&] {
    return StatusOf(*set_, a_.target()).calls_in_flight + StatusOf(*set_, b_.target()).calls_in_flight == 0;
  }));
}

TEST_F(RawCallTest, AFirstThatFailsWhileTheSecondRunsWaitsForIt) {
  std::atomic<int> calls = 0;
  const auto apply = [&](auto&, auto&, auto*) {
    if (++calls == 1) {
      while (calls < 2) absl::SleepFor(absl::Milliseconds(1));
      return grpc::Status(grpc::StatusCode::INTERNAL, "broken");
    }
    absl::SleepFor(absl::Milliseconds(100));
    return grpc::Status::OK;
  };
  a_.apply = apply;
  b_.apply = apply;
  Connect();
  RawCall call = ApplyOneToken();
  call.hedgeable = true;
  const RawReply reply = Await(*set_, std::move(call), {.hedge_after = absl::Milliseconds(20)});
  EXPECT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(calls, 2);
}

TEST_F(RawCallTest, WithoutLeaveOrASecondReplicaNothingIsSentTwice) {
  const auto slow = [](auto&, auto&, auto*) {
    absl::SleepFor(absl::Milliseconds(100));
    return grpc::Status::OK;
  };
  a_.apply = slow;
  b_.apply = slow;
  Connect();
  const RetryOptions options = {.hedge_after = absl::Milliseconds(10)};
  EXPECT_EQ(Call(options).attempts, 1);
  RawCall pinned = ApplyOneToken();
  pinned.hedgeable = true;
  pinned.replica = a_.target();
  EXPECT_EQ(Await(*set_, std::move(pinned), options).attempts, 1);
  b_.Stop();
  ASSERT_TRUE(Eventually([&] { return Call().status.ok() && StateOf(b_) == ReplicaState::kEjected; }));
  RawCall alone = ApplyOneToken();
  alone.hedgeable = true;
  EXPECT_EQ(Await(*set_, std::move(alone), options).attempts, 1);
}

TEST_F(RawCallTest, APinnedCallStaysWithItsReplica) {
  std::atomic<int> calls = 0;
  a_.apply = [&](auto&, auto&, auto*) {
    return ++calls == 1 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "busy") : grpc::Status::OK;
  };
  Connect();
  for (int i = 0; i < 4; ++i) {
    RawCall call = ApplyOneToken();
    call.replica = a_.target();
    const RawReply reply = Await(*set_, std::move(call));
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    EXPECT_EQ(reply.replica, a_.target());
    EXPECT_EQ(reply.attempts, i == 0 ? 2 : 1);
  }
  a_.Stop();
  RawCall call = ApplyOneToken();
  call.replica = a_.target();
  EXPECT_EQ(Await(*set_, std::move(call)).status.code(), absl::StatusCode::kUnavailable);
  call = ApplyOneToken();
  call.replica = "unix:/elsewhere";
  const RawReply gone = Await(*set_, std::move(call));
  EXPECT_EQ(gone.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(gone.attempts, 0);
  EXPECT_TRUE(b_.requests().empty());
}

TEST_F(RawCallTest, AvoidedReplicasAreTheLastResort) {
  Connect();
  for (int i = 0; i < 4; ++i) {
    RawCall call = ApplyOneToken();
    call.avoid = {a_.target()};
    EXPECT_EQ(Await(*set_, std::move(call)).replica, b_.target());
  }
  b_.Stop();
  RawCall call = ApplyOneToken();
  call.avoid = {a_.target()};
  EXPECT_EQ(Await(*set_, std::move(call)).replica, a_.target());
}

TEST_F(RawCallTest, WhenAllAreDeadTheErrorSaysSoAndTheFirstThatReturnsIsUsedAtOnce) {
  Connect();
  a_.Stop();
  b_.Stop();
  const RawReply reply = Call();
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(reply.status.message()), HasSubstr("unix:/"));
  ASSERT_TRUE(Eventually([&] {
    Call();
    return StateOf(a_) == ReplicaState::kEjected && StateOf(b_) == ReplicaState::kEjected;
  }));
  const RawReply none = Call();
  EXPECT_EQ(none.attempts, 0);
  EXPECT_THAT(std::string(none.status.message()), HasSubstr("no replica serves: " + a_.target() + " is ejected"));
  EXPECT_THAT(std::string(none.status.message()), HasSubstr(b_.target() + " is ejected"));

  b_.Start();
  const RawReply back = Call();
  EXPECT_TRUE(back.status.ok()) << "asked before its pause is over, since nobody else is there: " << back.status;
  EXPECT_EQ(back.replica, b_.target());
}

TEST_F(RawCallTest, ADrainingReplicaServesOnlyWhereNoOtherDoes) {
  std::atomic<bool> draining = false;
  a_.apply = [&](grpc::ServerContext& context, auto&, auto*) {
    if (draining) context.AddTrailingMetadata("engram-draining", "1");
    return grpc::Status::OK;
  };
  a_.get_model = [&](grpc::ServerContext& context) {
    if (draining) context.AddTrailingMetadata("engram-draining", "1");
    return grpc::Status::OK;
  };
  Connect();
  draining = true;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Call().status.ok());
  EXPECT_EQ(StateOf(a_), ReplicaState::kDraining);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Call().replica, b_.target());
  b_.Stop();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Call().replica, a_.target()) << "it still serves";
  draining = false;
  EXPECT_TRUE(Eventually([&] { return StateOf(a_) == ReplicaState::kServing; }));
}

TEST_F(RawCallTest, ADrainingRefusalMovesTheCallAndTheNextOnes) {
  a_.apply = [](auto&, auto&, auto*) { return Refusal(grpc::StatusCode::UNAVAILABLE, "DRAINING"); };
  a_.get_model = [this](grpc::ServerContext& context) {
    if (!a_.requests().empty()) context.AddTrailingMetadata("engram-draining", "1");
    return grpc::Status::OK;
  };
  Connect();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Call().replica, b_.target());
  absl::SleepFor(absl::Milliseconds(300));  // it is asked meanwhile, and answers that it drains
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Call().replica, b_.target());
  EXPECT_EQ(a_.requests().size(), 1u);
  b_.Stop();
  const RawReply reply = Call();
  EXPECT_EQ(reply.status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(RawCallTest, ManyThreadsNeverMissAReplicaThatDiesAndReturns) {
  Connect();
  std::atomic<bool> stop = false;
  std::atomic<int> good = 0;
  std::mutex mutex;
  std::map<std::string, int> bad;
  std::vector<std::thread> threads;
  threads.reserve(16);
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      while (!stop) {
        RawCall call = ApplyOneToken();
        call.hedgeable = t % 2 == 0;
        const RawReply reply = Await(*set_, std::move(call), {.attempts = 6, .hedge_after = absl::Milliseconds(50)});
        if (reply.status.ok() && HighwayOf(reply) == kReply) {
          ++good;
        } else {
          std::lock_guard<std::mutex> lock(mutex);
          ++bad[reply.status.ToString()];
        }
      }
    });
  }
  for (int round = 0; round < 4; ++round) {
    absl::SleepFor(absl::Milliseconds(150));
    a_.Stop();
    absl::SleepFor(absl::Milliseconds(150));
    a_.Start();
    EXPECT_TRUE(Eventually([&] { return Serves(*set_, a_.target()); }));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(good, 100);
  EXPECT_TRUE(bad.empty()) << testing::PrintToString(bad);
}

TEST_F(RawCallTest, TheEndCancelsWhatIsUnderWayAndEveryCallIsAnswered) {
  const auto apply = [](grpc::ServerContext& context, const v1::ApplyRequest& request, auto*) {
    if (request.sequences(0).start_pos() == 0) return Hang(context);
    return Refusal(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", absl::Milliseconds(900));
  };
  a_.apply = apply;
  b_.apply = apply;
  Connect();
  std::atomic<int> cancelled = 0;
  std::atomic<int> others = 0;
  const auto count = [&](const RawReply& reply) { ++(absl::IsCancelled(reply.status) ? cancelled : others); };
  for (int i = 0; i < 6; ++i) {
    RawCall call = ApplyOneToken(absl::Hours(1));
    call.hedgeable = i % 2 == 0;
    StartRawCall(*set_, {.hedge_after = absl::Milliseconds(20)}, std::move(call), count);
    v1::ApplyRequest waits;
    waits.add_sequences()->set_start_pos(1);
    const grpc::Slice slice(waits.SerializeAsString());
    call = ApplyOneToken(absl::Hours(1));
    call.request = grpc::ByteBuffer(&slice, 1);
    StartRawCall(*set_, {.attempts = 1000}, std::move(call), count);
  }
  ASSERT_TRUE(Eventually([&] { return a_.requests().size() + b_.requests().size() >= 15; }));
  set_.reset();
  EXPECT_EQ(cancelled, 12);
  EXPECT_EQ(others, 0);
}

TEST_F(RawCallTest, TheEndDoesNotWaitForADeadServer) {
  Connect();
  a_.Stop();
  b_.Stop();
  std::atomic<int> answered = 0;
  for (int i = 0; i < 20; ++i) {
    StartRawCall(*set_, {.attempts = 1000, .max_backoff = absl::Hours(1)}, ApplyOneToken(absl::Hours(2)),
                 [&](const RawReply&) { ++answered; });
  }
  absl::SleepFor(absl::Milliseconds(50));
  const absl::Time start = absl::Now();
  set_.reset();
  EXPECT_EQ(answered, 20);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(RawCallTest, ALeaseMayOutliveTheSet) {
  Connect();
  auto lease = set_->Choose({.weight_tokens = 5});
  ASSERT_TRUE(lease.ok());
  set_.reset();
  lease->Report(absl::UnavailableError("late"), false);
  EXPECT_FALSE(lease->replica().empty());
}

}  // namespace
}  // namespace engram::client
