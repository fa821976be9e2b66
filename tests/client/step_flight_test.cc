// The life of a call over a sender that answers as each test says: order, repetition, replicas, what is left unwritten.
#include "client/step_flight.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/error_details.h"
#include "client/refusal.h"
#include "engram/v1/engram.pb.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

struct Sent {
  v1::ApplyRequest request;
  std::string replica;
  bool hedgeable = false;
  absl::AnyInvocable<void(RawReply)> done;
};

// What a server would answer: every byte 'r'.
RawReply GoodReply(const v1::ApplyRequest& request, const std::string& replica) {
  v1::ApplyResponse response;
  for (const v1::LayerInput& layer : request.layers()) {
    v1::LayerOutput& output = *response.add_layers();
    output.set_layer_id(layer.layer_id());
    output.set_highway(std::string(layer.highway().size(), 'r'));
  }
  response.set_server_epoch(7);
  const grpc::Slice slice(response.SerializeAsString());
  return {absl::OkStatus(), grpc::ByteBuffer(&slice, 1), replica, 1};
}

absl::Status Busy(absl::Duration delay) {
  absl::Status status = absl::ResourceExhaustedError("QUEUE_FULL");
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(delay)));
  status.SetPayload(kRetryInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

class StepFlightTest : public testing::Test {
 protected:
  StepFlightTest() {
    carrier_.send = [this](RawCall raw, absl::AnyInvocable<void(RawReply)> done) {
      Sent sent;
      EXPECT_TRUE(sent.request.ParseFromString(Flat(raw.request)));
      sent.replica = raw.replica;
      sent.hedgeable = raw.hedgeable;
      sent.done = std::move(done);
      sent_.push_back(std::move(sent));
      const size_t index = sent_.size() - 1;
      if (answer_) {
        RawReply reply = answer_(index);
        std::exchange(sent_[index].done, nullptr)(std::move(reply));
      }
    };
    carrier_.knows_epoch = [this](const std::string&, uint64_t) { return unknown_ <= 0 || --unknown_ < 0; };
    carrier_.pause = [this](absl::Time until, absl::AnyInvocable<void(bool due)> then) {
      absl::SleepFor(until - absl::Now());
      then(!ending_);
    };
    call_.sequences = {{.history = &history_, .token_ids = ids_}};
    call_.layers = {{.layer_id = 1, .highway = highway_, .out = absl::MakeSpan(out_)}};
  }

  std::shared_ptr<StepFlight> Flight(int64_t max_message_bytes = 64 << 20, int64_t max_call_tokens = 64) {
    const CheckedCall checked = CheckApply(model_, call_).value();
    const CallPlan plan =
        PlanCall(model_,
                 {.max_message_bytes = max_message_bytes, .max_call_tokens = max_call_tokens, .stripe_bytes = 0},
                 checked)
            .value();
    return std::make_shared<StepFlight>(model_, carrier_, &homes_, checked, plan);
  }

  absl::Status Fly(int64_t max_message_bytes = 64 << 20) {
    auto flight = Flight(max_message_bytes);
    absl::Notification over;
    flight->Start([&over] { over.Notify(); });
    over.WaitForNotification();
    return flight->Finish(&report_);
  }

  void Answer(size_t index, absl::Status status = absl::OkStatus()) {
    RawReply reply{std::move(status), grpc::ByteBuffer(), "r", 1};
    if (reply.status.ok()) reply = GoodReply(sent_[index].request, "r");
    std::exchange(sent_[index].done, nullptr)(std::move(reply));
  }

  const ModelInfo model_ = SampleModel();
  const std::vector<int32_t> ids_ = std::vector<int32_t>(40, 5);
  const std::string highway_ = std::string(size_t{40} * 32, 'i');
  std::string out_ = std::string(size_t{40} * 32, 'o');
  SequenceHistory history_{4};
  ApplyCall call_;
  CallReport report_;
  SessionHomes homes_;
  std::vector<Sent> sent_;
  std::function<RawReply(size_t)> answer_;  // at once; null: the test answers
  Carrier carrier_;
  int unknown_ = 0;      // replies whose server has restarted
  bool ending_ = false;  // pauses are cut short
};

TEST_F(StepFlightTest, AReplyOfAServerThatHasRestartedIsAskedForAgain) {
  answer_ = [this](size_t index) { return GoodReply(sent_[index].request, "r"); };
  unknown_ = 2;
  EXPECT_TRUE(Fly().ok());
  EXPECT_EQ(sent_.size(), 3u);
  EXPECT_EQ(history_.length(), 40);
}

TEST_F(StepFlightTest, AReplyOfTheServerThatWasChosenIsGoodAlsoWhereItsReplicaIsForgotten) {
  answer_ = [this](size_t index) {
    RawReply reply = GoodReply(sent_[index].request, "r");
    reply.server_epoch = 7;
    return reply;
  };
  unknown_ = 100;
  EXPECT_TRUE(Fly().ok());
  EXPECT_EQ(sent_.size(), 1u);
}

TEST_F(StepFlightTest, AServerThatIsAnotherOneWithEveryReplyIsAnError) {
  answer_ = [this](size_t index) { return GoodReply(sent_[index].request, "r"); };
  unknown_ = 100;
  const absl::Status status = Fly();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(sent_.size(), 4u);
  EXPECT_EQ(history_.length(), 0);
}

TEST_F(StepFlightTest, APassingFailureIsRepeatedUntilItPasses) {
  call_.on_failure = OnFailure::kRetry;
  answer_ = [this](size_t index) -> RawReply {
    if (index == 0) return {absl::UnavailableError("gone"), {}, "r", 3};
    if (index == 1) return {Busy(absl::Milliseconds(120)), {}, "r", 1};
    return GoodReply(sent_[index].request, "r");
  };
  const absl::Time start = absl::Now();
  EXPECT_TRUE(Fly().ok());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(120)) << "the server's own delay is waited for";
  EXPECT_EQ(report_.attempts, 5);
  EXPECT_EQ(out_, std::string(out_.size(), 'r'));
  EXPECT_EQ(history_.length(), 40);
}

TEST_F(StepFlightTest, RepetitionEndsWithTheDeadlineAndNeverMendsARefusal) {
  call_.on_failure = OnFailure::kRetry;
  call_.timeout = absl::Milliseconds(200);
  answer_ = [](size_t) -> RawReply { return {absl::UnavailableError("gone"), {}, "r", 1}; };
  EXPECT_EQ(Fly().code(), absl::StatusCode::kUnavailable);
  EXPECT_GT(sent_.size(), 1u);
  for (const absl::Status& status : {absl::InvalidArgumentError("no"), absl::ResourceExhaustedError("for good")}) {
    sent_.clear();
    answer_ = [&status](size_t) -> RawReply { return {status, {}, "r", 1}; };
    EXPECT_EQ(Fly().code(), status.code());
    EXPECT_THAT(sent_, SizeIs(1));
    call_.on_failure = OnFailure::kSkip;
    EXPECT_EQ(Fly().code(), status.code()) << "nor is it skipped";
    call_.on_failure = OnFailure::kRetry;
  }
  EXPECT_EQ(history_.length(), 0);
}

TEST_F(StepFlightTest, TheEndOfTheClientEndsACallThatPausesAndSkipsNothing) {
  ending_ = true;
  answer_ = [](size_t) -> RawReply { return {absl::UnavailableError("gone"), {}, "r", 1}; };
  call_.on_failure = OnFailure::kRetry;
  EXPECT_EQ(Fly().code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(sent_, SizeIs(1));
  answer_ = [](size_t) -> RawReply { return {absl::CancelledError("the client is ending"), {}, "", 1}; };
  call_.on_failure = OnFailure::kSkip;
  EXPECT_EQ(Fly().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(history_.length(), 0);
}

TEST_F(StepFlightTest, AFailedPartEndsTheCallAtOnceAndLateAnswersAreDropped) {
  auto flight = Flight(10 * 32, 80);
  bool over = false;
  flight->Start([&over] { over = true; });
  ASSERT_THAT(sent_, SizeIs(4)) << "stateless parts go together";
  EXPECT_TRUE(sent_[0].hedgeable);
  Answer(3);
  EXPECT_FALSE(over);
  Answer(1, absl::UnavailableError("gone"));
  EXPECT_TRUE(over);
  const absl::Status status = flight->Finish(&report_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gone (part 2 of 4 of the call, 10 tokens)"));
  Answer(0);
  Answer(2, absl::InternalError("late"));
  EXPECT_EQ(out_, std::string(out_.size(), 'o'));
  EXPECT_EQ(history_.length(), 0);
}

TEST_F(StepFlightTest, AtMostSixteenPartsAreUnderWay) {
  auto flight = Flight(32);
  bool over = false;
  flight->Start([&over] { over = true; });
  EXPECT_THAT(sent_, SizeIs(16));
  for (size_t i = 0; i < 40; ++i) Answer(i);
  EXPECT_TRUE(over);
  EXPECT_TRUE(flight->Finish(&report_).ok());
  EXPECT_EQ(report_.parts, 40);
}

TEST_F(StepFlightTest, PartsUnderWayLeaveHalfAQueueToOthers) {
  auto flight = Flight(10 * 32, 40);  // ten tokens each, 20 of 40 together
  bool over = false;
  flight->Start([&over] { over = true; });
  ASSERT_THAT(sent_, SizeIs(2));
  Answer(1);
  ASSERT_THAT(sent_, SizeIs(3));
  for (const size_t i : {0, 2, 3}) Answer(i);
  EXPECT_TRUE(over);
  EXPECT_TRUE(flight->Finish(&report_).ok());
}

// The parts of one call filled the queue themselves, and the call failed on an idle server.
TEST_F(StepFlightTest, AFullQueueIsWaitedForByTheCallThatFilledItAndFewerPartsGoTogether) {
  absl::Status full = Busy(absl::Milliseconds(1));
  google::rpc::ErrorInfo info;
  info.set_domain("engram");
  info.set_reason("QUEUE_FULL");
  full.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  auto flight = Flight(32);
  bool over = false;
  flight->Start([&over] { over = true; });
  ASSERT_THAT(sent_, SizeIs(16));
  Answer(15, full);
  ASSERT_THAT(sent_, SizeIs(17)) << "sent again after a pause";
  for (size_t i = 0; i < 8; ++i) Answer(i);
  EXPECT_THAT(sent_, SizeIs(17)) << "eight are under way, which is what may be now";
  Answer(8);
  EXPECT_THAT(sent_, SizeIs(18));
  for (size_t i = 9; i < sent_.size(); ++i) {
    if (i != 15) Answer(i);
  }
  EXPECT_TRUE(over);
  EXPECT_TRUE(flight->Finish(&report_).ok());
  EXPECT_EQ(report_.attempts, 41);

  answer_ = [&full](size_t) -> RawReply { return {full, {}, "r", 1}; };
  sent_.clear();
  EXPECT_EQ(Fly().code(), absl::StatusCode::kResourceExhausted) << "a call of one part has others to thank";
  EXPECT_THAT(sent_, SizeIs(1));
}

// Each answer sent the next part from within itself.
TEST_F(StepFlightTest, AnswersThatComeAtOnceDoNotNest) {
  const std::vector<int32_t> ids(100'000, 5);
  std::string highway(ids.size() * 32, 'i');
  call_.sequences = {{.token_ids = ids}};
  call_.layers = {{.layer_id = 1, .highway = highway, .out = absl::MakeSpan(highway)}};
  call_.on_failure = OnFailure::kSkip;
  int depth = 0;
  int deepest = 0;
  carrier_.send = [&](const RawCall&, absl::AnyInvocable<void(RawReply)> done) {
    deepest = std::max(deepest, ++depth);
    done({absl::UnavailableError("gone"), {}, "r", 1});
    --depth;
  };
  EXPECT_TRUE(Fly(32).ok());
  EXPECT_EQ(report_.parts, 100'000);
  EXPECT_EQ(deepest, 1);
}

TEST_F(StepFlightTest, PartsOfASessionGoOneByOneToTheServerThatTookTheFirst) {
  call_.sequences = {{.token_ids = ids_, .session = "s"}};
  auto flight = Flight(10 * 32);
  bool over = false;
  flight->Start([&over] { over = true; });
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_THAT(sent_, SizeIs(i + 1));
    EXPECT_EQ(sent_[i].replica, i == 0 ? "" : "r");
    EXPECT_FALSE(sent_[i].hedgeable);
    Answer(i);
  }
  EXPECT_TRUE(over);
  EXPECT_TRUE(flight->Finish(nullptr).ok());
  EXPECT_EQ(homes_.Find("s"), "r");
}

TEST_F(StepFlightTest, WhatFollowsASkippedPartOfASessionIsSkippedWithIt) {
  call_.sequences = {{.token_ids = ids_, .session = "s"}};
  call_.on_failure = OnFailure::kSkip;
  answer_ = [this](size_t index) -> RawReply {
    if (index == 1) return {absl::UnavailableError("gone"), {}, "r", 1};
    return GoodReply(sent_[index].request, "r");
  };
  EXPECT_TRUE(Fly(10 * 32).ok());
  EXPECT_THAT(sent_, SizeIs(2));
  EXPECT_THAT(report_.skipped, SizeIs(3));
  EXPECT_EQ(report_.skipped[2].tokens.begin, 30);
  EXPECT_EQ(out_, std::string(size_t{10} * 32, 'r') + highway_.substr(size_t{10} * 32));
}

TEST_F(StepFlightTest, APreparedPartGoesToItsServerAndWithoutThatServerByItsIds) {
  auto state = std::make_shared<PreparedState>();
  state->tokens = 40;
  state->sequences = {{.start_pos = 0, .token_ids = ids_, .lookback = {-1, -1, -1}}};
  state->parts = {{"r1", "ticket", 0, 40, 1}};
  const Prepared prepared(state);
  call_.sequences.clear();
  call_.prepared = &prepared;
  const absl::Status gone[] = {absl::UnavailableError("gone"),
                               Refuse(Reason::kDigestMismatch, "model_key", "1", "2", "another model")};
  for (const absl::Status& status : gone) {
    sent_.clear();
    answer_ = [this, &status](size_t index) -> RawReply {
      if (index == 0) return {status, {}, "r1", 1};
      return GoodReply(sent_[index].request, "r2");
    };
    EXPECT_TRUE(Fly().ok());
    ASSERT_THAT(sent_, SizeIs(2));
    EXPECT_EQ(sent_[0].replica, "r1");
    EXPECT_EQ(sent_[0].request.ticket(), "ticket");
    EXPECT_EQ(sent_[1].replica, "");
    EXPECT_EQ(sent_[1].request.ticket(), "");
    EXPECT_EQ(sent_[1].request.sequences(0).token_ids_size(), 40);
    EXPECT_EQ(report_.replica, "r2");
  }
}

// By ids and with the session it was written there once more, and what came after it was truncated.
TEST_F(StepFlightTest, APreparedPartThatOnlyItsSessionKnowsIsNotMadeAgainByIds) {
  auto state = std::make_shared<PreparedState>();
  state->tokens = 40;
  state->sequences = {{.start_pos = 4, .token_ids = ids_}};
  state->parts = {{"r1", "ticket", 0, 40, 1}};
  const Prepared prepared(state);
  call_.sequences.clear();
  call_.prepared = &prepared;
  absl::Status expired = absl::NotFoundError("TICKET_EXPIRED: ticket");
  google::rpc::ErrorInfo info;
  info.set_domain("engram");
  info.set_reason("TICKET_EXPIRED");
  expired.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  answer_ = [&expired](size_t) -> RawReply { return {expired, {}, "r1", 1}; };
  EXPECT_EQ(ErrorReason(Fly()), "TICKET_EXPIRED");
  EXPECT_THAT(sent_, SizeIs(1));
  // From its fourth token on the ids say it all.
  call_.token_slice = Range{3, 40};
  call_.layers = {{.layer_id = 1,
                   .highway = absl::string_view(highway_).substr(size_t{3} * 32),
                   .out = absl::MakeSpan(out_).subspan(size_t{3} * 32)}};
  sent_.clear();
  answer_ = [this, &expired](size_t index) -> RawReply {
    if (index == 0) return {expired, {}, "r1", 1};
    return GoodReply(sent_[index].request, "r2");
  };
  EXPECT_TRUE(Fly().ok());
  ASSERT_THAT(sent_, SizeIs(2));
  EXPECT_EQ(sent_[1].request.sequences(0).session(), "");
  EXPECT_EQ(sent_[1].request.sequences(0).lookback_token_ids_size(), 3);
}

TEST_F(StepFlightTest, AReplyThatIsNoneIsInternalAndNotSkipped) {
  answer_ = [](size_t) -> RawReply {
    const grpc::Slice slice("\x0a\x7f");
    return {absl::OkStatus(), grpc::ByteBuffer(&slice, 1), "r", 1};
  };
  EXPECT_EQ(Fly().code(), absl::StatusCode::kInternal);
  call_.on_failure = OnFailure::kSkip;
  EXPECT_EQ(Fly().code(), absl::StatusCode::kInternal) << "a bug is not passed over in silence";
  EXPECT_EQ(out_, std::string(out_.size(), 'o'));
}

}  // namespace
}  // namespace engram::client
