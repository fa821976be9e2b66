#include "client/verify/fixture.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string DataPath(const std::string& name) { return std::string(ENGRAM_TEST_DATA) + "/" + name; }

TEST(Fixture, LoadsWhatTheProjectShips) {
  for (const char* name : {"tiny", "split", "ds4"}) {
    const auto fixture = LoadFixture(DataPath(std::string(name) + "/expected.json"));
    ASSERT_TRUE(fixture.ok()) << fixture.status();
    EXPECT_EQ(fixture->name, name);
    EXPECT_FALSE(fixture->cases.empty());
  }
  const Fixture tiny = LoadFixture(DataPath("tiny/expected.json")).value();
  EXPECT_THAT(tiny.layer_ids, ElementsAre(1, 14));
  EXPECT_THAT(tiny.files, ElementsAre("tiny.gguf"));
  const FixtureCall& first = tiny.cases[0].calls[0];
  EXPECT_EQ(first.layers[1].highway.size(), first.tokens.size() * tiny.hc * tiny.dim);
  EXPECT_EQ(first.layers[1].kv_exact.size(), first.tokens.size() * (tiny.hc + 1) * tiny.dim);
}

// A copy of the tiny fixture, one text replaced by another.
class SpoiltFixture : public testing::Test {
 protected:
  SpoiltFixture() {
    std::string pattern = (std::filesystem::temp_directory_path() / "engram-fixture-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) ADD_FAILURE() << "no temporary directory " << pattern;
    directory_ = pattern;
    std::ifstream file(DataPath("tiny/expected.json"));
    json_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    std::filesystem::copy(DataPath("tiny/expected.bin"), directory_ / "expected.bin");
  }
  ~SpoiltFixture() override {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  std::string ErrorWith(const std::string& text, const std::string& other) {
    std::string json = json_;
    const size_t at = json.find(text);
    if (at == std::string::npos) return "no such text: " + text;
    json.replace(at, text.size(), other);
    return Write(json);
  }

  std::string Write(const std::string& json) {
    std::ofstream(directory_ / "expected.json") << json;
    const auto fixture = LoadFixture((directory_ / "expected.json").string());
    return fixture.ok() ? "loaded" : std::string(fixture.status().message());
  }

  std::filesystem::path directory_;
  std::string json_;
};

TEST_F(SpoiltFixture, IsRefusedByName) {
  EXPECT_EQ(Write(json_), "loaded");
  EXPECT_THAT(Write("[1, 2"), HasSubstr("not a fixture: no JSON object"));
  EXPECT_THAT(Write("{\"cases\": [1, 2"), HasSubstr("not a fixture: no JSON object"));
  EXPECT_THAT(Write("{}"), HasSubstr("not a fixture: no key \"cases\""));
  EXPECT_THAT(Write("{\"cases\": []}"), HasSubstr("not a fixture: no key \"layers\""));
  EXPECT_THAT(ErrorWith("\"dim\"", "\"no_dim\""), HasSubstr("\"dim\" is missing"));
  EXPECT_THAT(ErrorWith("\"dim\": 64", "\"dim\": 0"), HasSubstr("\"dim\" is 0"));
  EXPECT_THAT(ErrorWith("\"dim\": 64", "\"dim\": \"x\""), HasSubstr("\"dim\""));
  EXPECT_THAT(ErrorWith("\"dim\": 64", "\"dim\": 65"), HasSubstr("case prefill_then_decode, call 0"));
  EXPECT_THAT(ErrorWith("\"cases\"", "\"no_cases\""), HasSubstr("\"cases\""));
  EXPECT_THAT(ErrorWith("\"kv_exact_f64\"", "\"kv\""), HasSubstr("\"kv_exact_f64\" is missing"));
}

TEST_F(SpoiltFixture, AShortExpectedBinIsRefused) {
  std::filesystem::resize_file(directory_ / "expected.bin", 600000);
  EXPECT_THAT(Write(json_), HasSubstr("inside the 600000 bytes of expected.bin"));
}

TEST_F(SpoiltFixture, AnotherFileIsNoFixtureWhateverLiesBesideIt) {
  std::filesystem::remove(directory_ / "expected.bin");
  EXPECT_THAT(Write("{\"a\": 1}"), HasSubstr("not a fixture: no key \"cases\""));
  EXPECT_THAT(Write("GGUF"), HasSubstr("not a fixture: no JSON object"));
  EXPECT_THAT(Write(json_), HasSubstr("expected.bin: cannot be read"));
}

TEST(Fixture, AMissingFileIsNamed) {
  EXPECT_THAT(std::string(LoadFixture("/nonexistent/expected.json").status().message()), HasSubstr("/nonexistent"));
}

}  // namespace
}  // namespace engram::client
