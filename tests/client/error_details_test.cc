#include "client/error_details.h"

#include <string>

#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"

namespace engram::client {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

// As the server sends it: ErrorInfo and BadRequest of two offenders.
std::string SampleDetails(const std::string& domain) {
  google::rpc::ErrorInfo info;
  info.set_reason("TOKEN_OUT_OF_RANGE");
  info.set_domain(domain);
  (*info.mutable_metadata())["bound"] = "[0, 512)";
  google::rpc::BadRequest bad;
  for (const char* field : {"sequences[0].token_ids[3]", "sequences[2].token_ids[0]"}) {
    auto* violation = bad.add_field_violations();
    violation->set_field(field);
    violation->set_description("is 512");
  }
  google::rpc::Status status;
  status.set_code(3);
  status.add_details()->PackFrom(info);
  status.add_details()->PackFrom(bad);
  return status.SerializeAsString();
}

TEST(ErrorDetails, CodeMessageReasonAndOffendersSurvive) {
  const absl::Status status =
      StatusFromGrpc({grpc::StatusCode::INVALID_ARGUMENT, "two bad tokens", SampleDetails("engram")});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "two bad tokens");
  EXPECT_EQ(ErrorReason(status), "TOKEN_OUT_OF_RANGE");
  EXPECT_EQ(ErrorMetadata(status)["bound"], "[0, 512)");
  const auto offenders = ErrorOffenders(status);
  ASSERT_THAT(offenders, SizeIs(2));
  EXPECT_EQ(offenders[1].field, "sequences[2].token_ids[0]");
  EXPECT_EQ(offenders[1].description, "is 512");
}

TEST(ErrorDetails, AReasonOfAnotherDomainIsNotOurs) {
  const absl::Status status =
      StatusFromGrpc({grpc::StatusCode::INVALID_ARGUMENT, "proxy says no", SampleDetails("example.com")});
  EXPECT_EQ(ErrorReason(status), "");
}

TEST(ErrorDetails, GarbageIsDroppedAndTheMessageStands) {
  const std::string whole = SampleDetails("engram");
  for (size_t length = 0; length <= whole.size(); ++length) {
    const absl::Status status = StatusFromGrpc({grpc::StatusCode::INTERNAL, "m", whole.substr(0, length)});
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(status.message(), "m");
    ErrorReason(status);
    ErrorOffenders(status);
  }
  google::rpc::Status details;
  auto* any = details.add_details();
  any->set_type_url(std::string(kErrorInfoUrl));
  any->set_value("\xff\xff\xff\xff");
  const absl::Status status = StatusFromGrpc({grpc::StatusCode::INTERNAL, "m", details.SerializeAsString()});
  EXPECT_EQ(ErrorReason(status), "");
  EXPECT_THAT(ErrorMetadata(status), IsEmpty());
}

TEST(ErrorDetails, CodesOutsideTheListAreUnknown) {
  EXPECT_EQ(StatusFromGrpc({static_cast<grpc::StatusCode>(30), "odd"}).code(), absl::StatusCode::kUnknown);
  EXPECT_TRUE(StatusFromGrpc(grpc::Status::OK).ok());
}

}  // namespace
}  // namespace engram::client
