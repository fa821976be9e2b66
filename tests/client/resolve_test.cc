#include "client/resolve.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(ResolveTarget, LiteralAddressesAndSocketsStandForThemselves) {
  EXPECT_THAT(*ResolveTarget("127.0.0.1:8001"), ElementsAre(Address{"127.0.0.1:8001", "ipv4:127.0.0.1:8001"}));
  EXPECT_THAT(*ResolveTarget("[::1]:8001"), ElementsAre(Address{"[::1]:8001", "ipv6:%5B::1%5D:8001"}));
  EXPECT_THAT(*ResolveTarget("unix:/run/engram.sock"),
              ElementsAre(Address{"unix:/run/engram.sock", "unix:/run/engram.sock"}));
}

TEST(ResolveTarget, ANameGivesEachOfItsAddressesOnce) {
  const auto addresses = ResolveTarget("localhost:8001");
  ASSERT_TRUE(addresses.ok()) << addresses.status();
  EXPECT_THAT(*addresses, testing::Contains(Address{"127.0.0.1:8001", "ipv4:127.0.0.1:8001"}));
  for (size_t i = 0; i < addresses->size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE((*addresses)[i] == (*addresses)[j]);
  }
}

TEST(ResolveTarget, ANameThatDoesNotExistIsNamed) {
  const absl::Status status = ResolveTarget("engram.invalid:8001").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("engram.invalid:8001: no address: "));
}

TEST(ResolveTarget, WhatIsNoTargetIsRefused) {
  for (const char* target : {"", "localhost", "unix:", ":1", "host:0", "host:70000"}) {
    EXPECT_EQ(ResolveTarget(target).status().code(), absl::StatusCode::kInvalidArgument) << target;
  }
}

TEST(NeedsDns, OnlyNames) {
  EXPECT_TRUE(NeedsDns("localhost:1"));
  EXPECT_TRUE(NeedsDns("engram.default.svc:8001"));
  for (const char* target : {"127.0.0.1:1", "[::1]:1", "unix:/a", "nonsense"}) EXPECT_FALSE(NeedsDns(target)) << target;
}

}  // namespace
}  // namespace engram::client
