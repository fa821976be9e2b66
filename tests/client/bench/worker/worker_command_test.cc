// `engram-bench worker` against a real server: every form, both fan-outs, bits compared; and what is wrong with flags.

#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/process.h"

namespace engram::bench {
namespace {

using e2e::Finished;
using e2e::RunToEnd;
using e2e::ServerProcess;
using e2e::TempDir;
using testing::HasSubstr;
using testing::StartsWith;

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";

Finished RunWorker(std::vector<std::string> args) {
  args.insert(args.begin(), {ENGRAM_BENCH, "worker"});
  return RunToEnd(args);
}

class WorkerCommand : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto server = ServerProcess::Start(kTiny);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server).release();
  }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }

  // Runs it with a small batch and returns its JSON.
  nlohmann::json Json(std::vector<std::string> args) {
    const std::string path = dir_.path() + "/out.json";
    args.insert(args.begin(), {"--target", server_->unix_address(), "--json", path, "--duration", "0.3", "--warm-up",
                               "0.1", "--batch", "3", "--spec-k", "2", "--prompt-mean", "20", "--output-mean", "20"});
    const Finished run = RunWorker(args);
    EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
    std::ifstream file(path);
    return nlohmann::json::parse(file);
  }

  static ServerProcess* server_;
  const TempDir dir_;
};

ServerProcess* WorkerCommand::server_ = nullptr;

TEST_F(WorkerCommand, EveryFormAndBothFanOutsGiveTheBitsOfAPlainCall) {
  for (const char* fanout : {"slice", "broadcast"}) {
    const nlohmann::json json = Json({"--form", "rows-native,rows-bf16,kv,update,gate,highway", "--tp", "8", "--fanout",
                                      fanout, "--verify-every", "4"});
    ASSERT_EQ(json["runs"].size(), 6u);
    for (const auto& run : json["runs"]) {
      SCOPED_TRACE(std::string(fanout) + " " + run["form"].get<std::string>());
      EXPECT_GT(run["steps"].get<int>(), 3);
      EXPECT_EQ(run["errors"].size(), 0u) << run["errors"];
      EXPECT_GT(run["verified_layers"].get<int>(), 0);
      EXPECT_EQ(run["mismatch"], "");
      EXPECT_GE(run["slowdown"].get<double>(), 0);
      EXPECT_GE(run["hidden"].get<double>(), 0);
      EXPECT_LE(run["hidden"].get<double>(), 1);
      EXPECT_EQ(run["layers"].size(), 2u);
      EXPECT_GT(run["tokens_per_second"].get<double>(), 0);
    }
  }
}

TEST_F(WorkerCommand, BytesAreThoseOfTheForm) {
  const auto run = [this](const char* form) {
    return Json({"--form", form, "--prefill-chunk", "0", "--dtype", "f32"})["runs"][0];
  };
  const auto rows = run("rows-native");
  // 9 tokens, 2 layers, 24 rows of 84 bytes.
  EXPECT_EQ(rows["tokens_per_step"], 9);
  EXPECT_EQ(rows["bytes_down_per_step"], 9 * 2 * 24 * 84);
  EXPECT_EQ(rows["calls_per_step"], 2);
  const auto update = run("update");
  // 9 tokens, 2 layers: 4 gates and 64 values of bf16; up 4 * 64 floats and the ids.
  EXPECT_EQ(update["bytes_down_per_step"], 9 * 2 * (4 * 4 + 64 * 2));
  EXPECT_GT(update["bytes_up_per_step"], 9 * 2 * 4 * 64 * 4);
  EXPECT_EQ(update["calls_per_step"], 3);
}

TEST_F(WorkerCommand, SeveralWorkersTheEngineAndTheTableInTheOwnProcess) {
  const nlohmann::json json =
      Json({"--form", "rows-native,update", "--workers", "1,3", "--metrics", server_->metrics_address(), "--baseline",
            "local", "--model", kTiny, "--residency", "mmap", "--verify-every", "5", "--calls", "step"});
  ASSERT_EQ(json["runs"].size(), 8u);
  std::map<std::string, int> tables;
  for (const auto& run : json["runs"]) {
    ++tables[run["table"].get<std::string>()];
    EXPECT_EQ(run.contains("engine_busy"), run["table"] == "server");
    EXPECT_EQ(run["mismatch"], "");
    EXPECT_GT(run["verified_layers"].get<int>(), 0);
    EXPECT_EQ(run["errors"].size(), 0u);
  }
  EXPECT_EQ(tables["server"], 4);
  EXPECT_EQ(tables["local"], 4);
}

// A step that the memory for prepared results never holds: Prepare is refused, each time, and rows are still served.
TEST_F(WorkerCommand, CallsThatFailAreCountedByReason) {
  auto tight = ServerProcess::Start(kTiny, {"--prepare-memory-bytes", "1048576"});
  ASSERT_TRUE(tight.ok()) << tight.status();
  const Finished run = RunWorker({"--target", (*tight)->unix_address(), "--form", "rows-native,update", "--duration",
                                  "0.2", "--warm-up", "0", "--batch", "300"});
  EXPECT_EQ(run.exit_code, 2) << run.out;
  EXPECT_THAT(run.out, HasSubstr("update, 1 workers: "));
  EXPECT_THAT(run.out, HasSubstr("calls failed with RESOURCE_EXHAUSTED TOO_MANY_TOKENS"));
  EXPECT_EQ(run.err, "engram-bench: update, 1 workers: every call failed\n");
}

TEST_F(WorkerCommand, WrongFlagsAreNamed) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> kMistakes = {
      {{"--bogus"}, "--bogus"},
      {{"--form", "rows"}, "--form"},
      {{"--workers", "0"}, "--workers"},
      {{"--accept", "1.5"}, "--accept"},
      {{"--tp", "0"}, "--tp"},
      {{"--fanout", "both"}, "--fanout"},
      {{"--step-ms", "-1"}, "--step-ms"},
      {{"--duration", "0"}, "--duration"},
      {{"--dtype", "f16"}, "--dtype"},
      {{"--model", "no-such-file"}, "--model"},
      {{"--baseline", "local"}, "--baseline local needs --model"},
      {{"--model", kTiny}, "--model is given, but nothing reads it"},
      {{"--depth", "10", "--target", server_->unix_address()}, "--depth is 10; the model has an engram layer 14"},
      {{"--json", dir_.path() + "/no/such", "--target", server_->unix_address()}, "/no/such"},
  };
  for (const auto& [args, named] : kMistakes) {
    const Finished run = RunWorker(args);
    EXPECT_EQ(run.exit_code, 2) << named;
    EXPECT_THAT(run.err, HasSubstr(named));
    EXPECT_EQ(run.out, "") << named;
  }
}

TEST_F(WorkerCommand, AnotherModelIsNoBaseline) {
  const std::string other = dir_.path() + "/other.gguf";
  ASSERT_EQ(RunToEnd({ENGRAM_MODEL, "synth", "--preset", "tiny", "--seed", "99", "--out", other}).exit_code, 0);
  const Finished run =
      RunWorker({"--target", server_->unix_address(), "--duration", "0.1", "--baseline", "local", "--model", other});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, HasSubstr("has config digest "));
}

TEST(WorkerCommandAlone, NoServerIsOneLine) {
  const Finished run = RunWorker({"--target", "unix:/nonexistent.sock", "--connect-timeout", "0.2"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, StartsWith("engram-bench: UNAVAILABLE: "));
}

}  // namespace
}  // namespace engram::bench
