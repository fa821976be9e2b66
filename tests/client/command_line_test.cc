// What the tools say to a newcomer's mistakes: one line that names the real one, and exit code 2.
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

using e2e::Finished;
using e2e::RunToEnd;
using e2e::TempDir;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

const std::vector<std::string> kTools = {ENGRAM_CLI, ENGRAM_MODEL};

// A variable of the environment for as long as this lives.
class Variable {
 public:
  Variable(std::string name, const std::string& value) : name_(std::move(name)) {
    setenv(name_.c_str(), value.c_str(), 1);
  }
  ~Variable() { unsetenv(name_.c_str()); }

 private:
  const std::string name_;
};

Finished RunTool(const std::string& tool, std::vector<std::string> args) {
  args.insert(args.begin(), tool);
  return RunToEnd(args);
}

struct Mistake {
  std::vector<std::string> args;
  std::string line;  // that stderr is to hold
};

void ExpectOneLineEach(const std::string& tool, const std::vector<Mistake>& mistakes) {
  const std::string name = std::filesystem::path(tool).filename().string();
  for (const Mistake& mistake : mistakes) {
    const Finished run = RunTool(tool, mistake.args);
    EXPECT_EQ(run.exit_code, 2) << mistake.line;
    EXPECT_EQ(run.err, name + ": " + mistake.line + "\n");
    EXPECT_EQ(run.out, "");
  }
}

TEST(CommandLine, WhatIsNotKnownIsNamedAndNotSomethingElseMissing) {
  for (const std::string& tool : kTools) {
    ExpectOneLineEach(tool, {{{"bogus"}, "there is no command \"bogus\" (--help lists the commands)"},
                             {{}, "a command is missing (--help lists the commands)"}});
    EXPECT_THAT(RunTool(tool, {"--bogus"}).err, HasSubstr("there is no flag \"--bogus\""));
  }
  ExpectOneLineEach(
      ENGRAM_CLI,
      {{{"apply", "--bogus"}, "apply: there is no flag \"--bogus\" (apply --help lists the flags)"},
       {{"apply", "5,6"}, "apply: the argument \"5,6\" is not expected (apply --help lists the flags)"},
       {{"apply", "--tokens", "1", "6"}, "apply: the argument \"6\" is not expected (apply --help lists the flags)"},
       {{"lookup"}, "lookup: --tokens or --tokens-file is required (lookup --help lists the flags)"},
       {{"verify", "--all", "x"}, "verify: there is no flag \"--all\" (verify --help lists the flags)"},
       {{"verify"}, "FIXTURE is required (verify --help lists the flags)"},
       {{"apply"}, "apply: --tokens or --tokens-file is required (apply --help lists the flags)"}});
  ExpectOneLineEach(
      ENGRAM_MODEL,
      {{{"synth", "--bogus"}, "synth: there is no flag \"--bogus\" (synth --help lists the flags)"},
       {{"synth", "tiny"}, "synth: the argument \"tiny\" is not expected (synth --help lists the flags)"},
       {{"synth"}, "synth: --out is required (where to write the .gguf)"},
       {{"inspect", "a", "b"}, "inspect: the argument \"b\" is not expected (inspect --help lists the flags)"},
       {{"inspect"}, "PATH is required (inspect --help lists the flags)"}});
}

TEST(CommandLine, VersionAndHelpAreNoErrors) {
  for (const std::string& tool : kTools) {
    const Finished version = RunTool(tool, {"--version"});
    EXPECT_EQ(version.exit_code, 0);
    EXPECT_EQ(version.out, std::filesystem::path(tool).filename().string() + " " ENGRAM_VERSION "\n");
    EXPECT_EQ(RunTool(tool, {"--help"}).exit_code, 0);
  }
  EXPECT_THAT(RunTool(ENGRAM_CLI, {"apply", "--help"}).out, HasSubstr("ENGRAM_CLI_APPLY_FORM"));
}

TEST(CommandLine, ValuesOutOfRangeAreSaidShortly) {
  ExpectOneLineEach(
      ENGRAM_CLI,
      {{{"model", "--timeout", "0"}, "--timeout: 0 is not above 0 (model --help lists the flags)"},
       {{"model", "--timeout", "nan"}, "--timeout: nan is not above 0 (model --help lists the flags)"},
       {{"model", "--connect-timeout=-1"}, "--connect-timeout: -1 is not above 0 (model --help lists the flags)"},
       {{"apply", "--tokens", "1", "--highway-fill", "nan"},
        "--highway-fill: nan is not finite in f32 (apply --help lists the flags)"},
       {{"apply", "--tokens", "1", "--highway-fill", "inf"},
        "--highway-fill: inf is not finite in f32 (apply --help lists the flags)"},
       {{"apply", "--tokens", "1,,2"}, "--tokens: entry 1 is empty, expected an integer"},
       {{"apply", "--tokens", "1,"}, "--tokens: entry 1 is empty, expected an integer"},
       {{"apply", "--tokens", ""}, "--tokens: entry 0 is empty, expected an integer"},
       {{"apply", "--tokens", "1", "--layer", "1,,14"}, "--layer: entry 1 is empty, expected an integer"},
       {{"apply", "--tokens", "1", "--mask", "2"}, "--mask: entry 0 is 2, expected 1 (live) or 0 (masked)"}});
}

TEST(CommandLine, FormKvRefusesTheFlagsOfAHighway) {
  const std::vector<std::vector<std::string>> kFlags = {
      {"--highway", "/dev/null"}, {"--highway-fill", "0.5"}, {"--dtype", "f32"}};
  for (const auto& flag : kFlags) {
    const Finished run = RunTool(ENGRAM_CLI, {"apply", "--tokens", "1", "--form", "kv", flag[0], flag[1]});
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_THAT(run.err, HasSubstr(flag[0] + " is given, but --form kv sends no highway"));
  }
}

TEST(CommandLine, SynthBlamesTheFlagThatIsWrong) {
  const TempDir dir;
  const std::string out = dir.path() + "/m.gguf";
  ExpectOneLineEach(
      ENGRAM_MODEL,
      {{{"synth", "--layers", "14,1", "--out", out}, "--layers has 1 behind 14; expected ascending ids, each once"},
       {{"synth", "--compressed-vocab", "9999", "--out", out},
        "--compressed-vocab is 9999; expected 2 to 512, no more than --vocab"},
       {{"synth", "--dead-tokens", "600", "--out", out},
        "--dead-tokens is 600; expected 0 to 112, what --vocab has beyond --compressed-vocab"}});
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(CommandLine, ATwinMeansItsOwnCommandAndNoOther) {
  const TempDir dir;
  const std::string mine = dir.path() + "/mine.gguf";
  const Variable general("ENGRAM_OUT", dir.path() + "/general.gguf");
  const Variable start_pos("ENGRAM_CLI_APPLY_START_POS", "nonsense");
  const Variable target("ENGRAM_TARGET", "nobody");
  EXPECT_THAT(RunTool(ENGRAM_MODEL, {"synth"}).err, HasSubstr("--out is required"));
  EXPECT_THAT(RunTool(ENGRAM_CLI, {"model"}).err, HasSubstr("target is \"nobody\""));
  EXPECT_THAT(RunTool(ENGRAM_CLI, {"apply", "--tokens", "1"}).err, HasSubstr("--start-pos = nonsense"));
  const Variable out("ENGRAM_MODEL_SYNTH_OUT", mine);
  EXPECT_EQ(RunTool(ENGRAM_MODEL, {"synth"}).out, mine + "\n");
  EXPECT_THAT(RunTool(ENGRAM_MODEL, {"synth", "--help"}).out, HasSubstr("ENGRAM_MODEL_SYNTH_OUT"));
}

TEST(CommandLine, VerifySaysWhatIsNoFixture) {
  const TempDir dir;
  const std::string path = dir.path() + "/a.json";
  std::ofstream(path) << "{\"a\": 1}";
  ExpectOneLineEach(ENGRAM_CLI, {{{"verify", path}, path + ": not a fixture: no key \"cases\""}});
}

class CliTest : public testing::Test {
 protected:
  CliTest() {
    server_.apply = [this](grpc::ServerContext& context, auto&, auto*) {
      while (slow_ && !context.IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
      return grpc::Status::OK;
    };
    server_.Start();
  }

  Finished Apply(std::vector<std::string> args) {
    args.insert(args.begin(), {ENGRAM_CLI, "--target", server_.target(), "apply", "--tokens", "5,6"});
    return RunToEnd(args);
  }

  static std::string Content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  FakeServer server_;
  const TempDir dir_;
  std::atomic<bool> slow_ = false;
};

TEST_F(CliTest, AnOutputThatCannotBeOpenedCostsNoCall) {
  const Finished run = Apply({"--out", dir_.path() + "/no/such"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.err,
            "engram-cli: " + dir_.path() + "/no/such: cannot be opened for writing: No such file or directory\n");
  EXPECT_TRUE(server_.requests().empty());
}

// Both were read to the end that does not come.
TEST_F(CliTest, AFileWithoutEndIsReadNoFurtherThanItCouldFit) {
  const Finished highway = Apply({"--highway", "/dev/zero"});
  EXPECT_EQ(highway.exit_code, 2);
  EXPECT_EQ(
      highway.err,
      "engram-cli: /dev/zero has more than 128 bytes, expected 64 (one highway for all layers) or 2 times that\n");
  const Finished tokens = RunToEnd({ENGRAM_CLI, "apply", "--tokens-file", "/dev/zero"});
  EXPECT_EQ(tokens.exit_code, 2);
  EXPECT_EQ(tokens.err,
            "engram-cli: /dev/zero has more than 201326592 bytes, expected the ids of at most 16777216 tokens\n");
  EXPECT_TRUE(server_.requests().empty());
}

TEST_F(CliTest, AnEntryThatIsNoTokenIsShownInPart) {
  const std::string path = dir_.path() + "/tokens";
  std::ofstream(path) << "5," << std::string(1000, '\x01');
  const Finished run = RunToEnd({ENGRAM_CLI, "apply", "--tokens-file", path});
  EXPECT_EQ(run.exit_code, 2);
  std::string shown;
  for (int i = 0; i < 32; ++i) shown += "\\x01";
  EXPECT_EQ(run.err, "engram-cli: " + path + ": entry 1 is \"" + shown + "...\", expected an integer\n");
}

TEST_F(CliTest, TheOutputIsReplacedByAReplyAndKeptWithoutOne) {
  const std::string out = dir_.path() + "/out";
  EXPECT_EQ(Apply({"--out", out, "--layer", "14", "--start-pos", "-1"}).exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(out)) << "nothing is left of a call that failed";
  std::ofstream(out) << std::string(1000, 'x');
  EXPECT_EQ(Apply({"--out", out, "--layer", "14", "--start-pos", "-1"}).exit_code, 2);
  EXPECT_EQ(Content(out), std::string(1000, 'x'));
  const Finished run = Apply({"--out", out, "--layer", "14"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(Content(out), std::string(64, 'r'));
}

TEST_F(CliTest, ARefusalOfItsOwnReadsLikeTheServers) {
  const Finished run = Apply({"--layer", "2"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.err,
            "engram-cli: INVALID_ARGUMENT: LAYER_UNKNOWN: layers[0].layer_id: layer 2 is no engram layer of this "
            "model; those are 1, 14\n  layers[0].layer_id: got 2, expected 1, 14\n");
}

TEST_F(CliTest, ADeadlineNamesTargetAndLimit) {
  slow_ = true;
  const Finished run = Apply({"--timeout", "0.05"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.err, "engram-cli: DEADLINE_EXCEEDED: no answer from " + server_.target() + " within 50ms\n");
}

TEST_F(CliTest, AReplicaOfAnotherModelIsToldAndGetsNoCalls) {
  FakeServer other;
  other.model.set_config_digest(std::string(32, '\x23'));
  other.Start();
  const std::string wanted(64, '2');
  const std::vector<std::string> base = {ENGRAM_CLI, "--target", other.target() + "," + server_.target(),
                                         "--config-digest", wanted};
  const auto run = [&](std::vector<std::string> command) {
    command.insert(command.begin(), base.begin(), base.end());
    return RunToEnd(command);
  };
  const std::string line = "engram-cli: excluded, other model: DIGEST_MISMATCH: config_digest: " + other.target() +
                           " has config_digest 2323";
  const Finished apply = run({"apply", "--tokens", "5", "--layer", "14"});
  EXPECT_EQ(apply.exit_code, 0) << apply.err;
  EXPECT_THAT(apply.err, StartsWith(line));
  EXPECT_EQ(std::count(apply.err.begin(), apply.err.end(), '\n'), 1);
  EXPECT_THAT(apply.out, StartsWith("1 token at position 0, 1 layer, form highway: "));
  EXPECT_THAT(run({"model", "--json"}).err, StartsWith(line));
  const Finished model = run({"model"});
  EXPECT_THAT(model.out, HasSubstr(other.target() + ", other model: "));
  EXPECT_THAT(model.out, HasSubstr(server_.target() + ", serving"));

  const Finished none = RunToEnd({ENGRAM_CLI, "--target", other.target(), "--config-digest", wanted, "model"});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.err, StartsWith("engram-cli: FAILED_PRECONDITION: DIGEST_MISMATCH: "));
}

TEST_F(CliTest, JsonNamesADtypeOnlyWhereThereIsAHighway) {
  server_.model.add_form_costs()->set_form(v1::FORM_KV);
  const Finished run = RunToEnd({ENGRAM_CLI, "--target", server_.target(), "model", "--json"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("\"form\": \"kv\""));
  EXPECT_THAT(run.out, Not(HasSubstr("highway_dtype")));
  EXPECT_THAT(run.out, HasSubstr("\"ticket_ttl_ms\": 10000"));
  EXPECT_THAT(run.out, HasSubstr("\"prepare_memory_bytes\": 1073741824"));
  EXPECT_THAT(run.out, HasSubstr("\"suggested_form\": \"highway\""));
}

TEST_F(CliTest, VerifyAgainstAnotherModelNamesTheFilesToServe) {
  const Finished run = RunToEnd(
      {ENGRAM_CLI, "--target", server_.target(), "verify", std::string(ENGRAM_TEST_DATA) + "/split/expected.json"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, HasSubstr("serve the fixture's own, which lies beside it: split-00001-of-00002.gguf, "
                                 "split-00002-of-00002.gguf"));
}

}  // namespace
}  // namespace engram::client
