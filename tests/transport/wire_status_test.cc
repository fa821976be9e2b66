#include "server/transport/wire_status.h"

#include <gtest/gtest.h>

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

TEST(WireStatusTest, OkAndPlainStatusesCarryNoDetails) {
  EXPECT_TRUE(ToWireStatus(absl::OkStatus()).ok());
  const grpc::Status internal = ToWireStatus(absl::InternalError("boom"));
  EXPECT_EQ(internal.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(internal.error_message(), "boom");
  EXPECT_EQ(internal.error_details(), "");
}

TEST(WireStatusTest, ARefusalWorthARetrySaysWhen) {
  const grpc::Status wire = ToWireStatus(Refuse({Reason::kQueueFull, "sequences", "9", "4", "full"}));
  EXPECT_EQ(wire.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(wire.error_details()));
  ASSERT_EQ(details.details_size(), 3);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.reason(), "QUEUE_FULL");
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(details.details(2).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().nanos(), 50'000'000);
}

TEST(WireStatusTest, TheInnermostIndexIsTold) {
  const grpc::Status wire = ToWireStatus(Refuse({Reason::kTokenOutOfRange, "sequences[3].token_ids[17]", "", "", ""}));
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(details.ParseFromString(wire.error_details()));
  ASSERT_TRUE(details.details(0).UnpackTo(&info));
  EXPECT_EQ(info.metadata().at("index"), "17");
}

TEST(WireStatusTest, DetailsStaySmallHoweverLongTheOffendersAre) {
  Refusals refusals;
  for (int i = 0; i < 64; ++i) {
    refusals.Add({Reason::kDigestMismatch, "model_key", std::string(64, 'a'), std::string(300, 'b'), "text"});
  }
  const grpc::Status wire = ToWireStatus(refusals.ToStatus());
  EXPECT_LT(wire.error_details().size(), kMaxDetailBytes + 1000);
}

}  // namespace
}  // namespace engram
