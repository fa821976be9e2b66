// The fixtures of an independent oracle, replayed through the network by the command a user would type.
#include <gtest/gtest.h>

#include <csignal>
#include <string>

#include "tests/e2e/process.h"

namespace engram::e2e {
namespace {

struct Fixture {
  const char* name;
  const char* model;
  const char* expected;
};

class VerifyTest : public ::testing::TestWithParam<Fixture> {};

TEST_P(VerifyTest, EveryCaseHoldsOverUnixAndTcpInBothResidencies) {
  const std::string data = ENGRAM_TEST_DATA;
  for (const char* residency : {"ram", "mmap"}) {
    auto server = ServerProcess::Start(data + GetParam().model, {"--residency", residency});
    ASSERT_TRUE(server.ok()) << server.status();
    for (const std::string& target : {(*server)->unix_address(), (*server)->tcp_address()}) {
      const Finished verify = RunToEnd({ENGRAM_CLI, "--target", target, "verify", data + GetParam().expected});
      EXPECT_EQ(verify.exit_code, 0) << verify.out << verify.err;
    }
    EXPECT_EQ((*server)->Stop(SIGTERM), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, VerifyTest,
                         ::testing::Values(Fixture{"tiny", "/tiny/tiny.gguf", "/tiny/expected.json"},
                                           Fixture{"split", "/split/split-00001-of-00002.gguf",
                                                   "/split/expected.json"}),
                         [](const auto& fixture) { return fixture.param.name; });

TEST(VerifyMissTest, AnotherModelsFixtureIsAMissNotAPass) {
  const std::string data = ENGRAM_TEST_DATA;
  auto server = ServerProcess::Start(data + "/tiny/tiny.gguf");
  ASSERT_TRUE(server.ok()) << server.status();
  const Finished verify =
      RunToEnd({ENGRAM_CLI, "--target", (*server)->unix_address(), "verify", data + "/split/expected.json"});
  EXPECT_NE(verify.exit_code, 0) << verify.out;
}

}  // namespace
}  // namespace engram::e2e
