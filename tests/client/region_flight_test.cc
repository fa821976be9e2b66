// The life of a call whose highways lie in a region, over a sender that the test answers for.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "client/refusal.h"
#include "client/shared_region.h"
#include "client/step_flight.h"
#include "engram/v1/engram.pb.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "server/regions/region_listener.h"
#include "tests/client/sample_model.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

constexpr size_t kTokenBytes = 32;  // of the sample model's highway

struct Sent {
  v1::ApplyRequest request;
  std::string replica;
  bool repeatable = true;
  bool hedgeable = true;
  absl::AnyInvocable<void(RawReply)> done;
};

class RegionFlightTest : public testing::Test {
 protected:
  void SetUp() override {
    auto listener = RegionListener::Start({.path = dir_.path() + "/m"}, store_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    const auto grant = store_.Reserve("p", 4096);
    ASSERT_TRUE(grant.ok());
    auto region = SharedRegion::Fetch({grant->token, grant->id, dir_.path() + "/m", grant->bytes, "here", false, ""},
                                      absl::Seconds(20));
    ASSERT_TRUE(region.ok()) << region.status();
    region_ = *std::move(region);

    carrier_.send = [this](RawCall raw, absl::AnyInvocable<void(RawReply)> done) {
      std::vector<grpc::Slice> slices;
      ASSERT_TRUE(raw.request.Dump(&slices).ok());
      std::string bytes;
      for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
      Sent sent;
      ASSERT_TRUE(sent.request.ParseFromString(bytes));
      sent.replica = raw.replica;
      sent.repeatable = raw.repeatable;
      sent.hedgeable = raw.hedgeable;
      sent.done = std::move(done);
      sent_.push_back(std::move(sent));
    };
    carrier_.knows_epoch = [](const std::string&, uint64_t) { return true; };

    // What is refused here (it needs look-back) leaves a gap: two parts, under way together.
    call_.sequences = {{.token_ids = three_}, {.start_pos = 9, .token_ids = two_}, {.token_ids = four_}};
    call_.partial_ok = true;
    const absl::Span<char> memory = region_->memory().first(9 * kTokenBytes);
    call_.layers = {{.layer_id = 1, .highway = memory, .out = memory}};
    call_.region = region_.get();
  }

  void Start() {
    const CheckedCall checked = CheckApply(model_, call_).value();
    const CallPlan plan =
        PlanCall(model_, {.max_message_bytes = 64, .max_call_tokens = 64, .stripe_bytes = 64}, checked).value();
    flight_ = std::make_shared<StepFlight>(model_, carrier_, &homes_, checked, plan);
    flight_->Start([this] { over_ = true; });
    ASSERT_EQ(sent_.size(), 2u);
  }

  void Answer(size_t index, absl::Status status = absl::OkStatus()) {
    RawReply reply{std::move(status), grpc::ByteBuffer(), "here", 1};
    if (reply.status.ok()) {
      v1::ApplyResponse response;
      response.add_layers()->set_layer_id(1);
      response.add_sequences();
      response.set_server_epoch(7);
      const grpc::Slice slice(response.SerializeAsString());
      reply.body = grpc::ByteBuffer(&slice, 1);
    }
    std::exchange(sent_[index].done, nullptr)(std::move(reply));
  }

  static absl::Status Refused() { return Refuse(Reason::kPositionGap, "sequences[0].start_pos", "1", "0", "a gap"); }

  const e2e::TempDir dir_;
  RegionStore store_{{}};
  std::unique_ptr<RegionListener> listener_;
  std::unique_ptr<SharedRegion> region_;
  const ModelInfo model_ = SampleModel();
  const std::vector<int32_t> three_ = {1, 2, 3}, two_ = {4, 4}, four_ = {5, 6, 7, 8};
  ApplyCall call_;
  SessionHomes homes_;
  Carrier carrier_;
  std::vector<Sent> sent_;
  std::shared_ptr<StepFlight> flight_;
  bool over_ = false;
};

TEST_F(RegionFlightTest, PartsGoOnceToTheRegionsServerAndSayWhereTheirTokensStand) {
  Start();
  const uint64_t first[] = {0, 5 * kTokenBytes};
  const uint64_t bytes[] = {3 * kTokenBytes, 4 * kTokenBytes};
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(sent_[i].replica, "here");
    EXPECT_FALSE(sent_[i].repeatable);
    EXPECT_FALSE(sent_[i].hedgeable);
    EXPECT_EQ(sent_[i].request.region(), region_->id());
    const v1::LayerInput& layer = sent_[i].request.layers(0);
    EXPECT_EQ(layer.highway(), "");
    EXPECT_EQ(layer.highway_in_region().offset(), first[i]);
    EXPECT_EQ(layer.highway_in_region().bytes(), bytes[i]);
    EXPECT_EQ(layer.out_in_region().offset(), first[i]);
    EXPECT_EQ(layer.out_in_region().bytes(), bytes[i]);
    Answer(i);
  }
  EXPECT_TRUE(over_);
  EXPECT_TRUE(flight_->Finish(nullptr).ok());
  EXPECT_TRUE(region_->Usable().ok());
}

TEST_F(RegionFlightTest, APartThatFailsWhileAnotherIsUnderWaySpoilsTheRegion) {
  Start();
  Answer(1, Refused());
  EXPECT_TRUE(over_);
  EXPECT_EQ(region_->Usable().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(CheckApply(model_, call_).status(), region_->Usable());
}

TEST_F(RegionFlightTest, ARefusalOfTheLastPartUnderWaySpoilsNothing) {
  Start();
  Answer(0);
  Answer(1, Refused());
  EXPECT_TRUE(over_);
  EXPECT_TRUE(region_->Usable().ok());
}

TEST_F(RegionFlightTest, WhatNobodyAnsweredIsNotSentAgainAndSpoilsTheRegion) {
  call_.on_failure = OnFailure::kRetry;
  Start();
  Answer(0);
  Answer(1, absl::UnavailableError("the connection broke"));
  EXPECT_TRUE(over_);
  EXPECT_EQ(sent_.size(), 2u);
  EXPECT_FALSE(region_->Usable().ok());
}

}  // namespace
}  // namespace engram::client
