// Refusals made by the client against those of the server: a caller must not have to know who refused.
#include "client/refusal.h"

#include <string>

#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/refusal/refusal.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::Field;
using testing::Pair;
using testing::UnorderedElementsAre;

TEST(ClientRefusal, EveryReasonIsOneOfTheServersWithTheServersCode) {
  for (const Reason reason : kReasons) {
    bool found = false;
    for (int i = 0; i <= static_cast<int>(engram::Reason::kLoading); ++i) {
      const auto servers = static_cast<engram::Reason>(i);
      if (engram::ReasonName(servers) != ReasonName(reason)) continue;
      found = true;
      EXPECT_EQ(engram::ReasonCode(servers), ReasonCode(reason)) << ReasonName(reason);
    }
    EXPECT_TRUE(found) << ReasonName(reason);
  }
}

TEST(ClientRefusal, ReadsLikeTheServers) {
  const absl::Status status = Refuse(Reason::kTokenOutOfRange, "sequences[3].token_ids[17]", "-1", ">= 0", "a text");
  const absl::Status servers =
      engram::Refuse({engram::Reason::kTokenOutOfRange, "sequences[3].token_ids[17]", "-1", ">= 0", "a text"});
  EXPECT_EQ(status.code(), servers.code());
  EXPECT_EQ(status.message(), servers.message());
  EXPECT_EQ(ErrorReason(status), "TOKEN_OUT_OF_RANGE");
  EXPECT_THAT(ErrorMetadata(status),
              UnorderedElementsAre(Pair("field", "sequences[3].token_ids[17]"), Pair("index", "17"),
                                   Pair("value", "-1"), Pair("bound", ">= 0"), Pair("offenders", "1")));
  EXPECT_THAT(ErrorOffenders(status), ElementsAre(Field(&ErrorOffender::description, "got -1, expected >= 0")));
}

TEST(ClientRefusal, AFieldWithoutAnIndexHasNone) {
  EXPECT_EQ(ErrorMetadata(Refuse(Reason::kEmptyCall, "layers", "0", ">= 1", "none"))["index"], "");
}

}  // namespace
}  // namespace engram::client
