// engram-bench as a user runs it, against a real server.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/model/engram_model.h"
#include "server/model/synth.h"
#include "tests/e2e/process.h"

namespace engram::bench {
namespace {

using e2e::Finished;
using e2e::RunToEnd;
using e2e::ServerProcess;
using e2e::TempDir;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";

std::string FileText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

class LoadTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto server = ServerProcess::Start(kTiny);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = server->release();
  }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }

  // Short, with its JSON read; exit code 0 expected.
  json Measure(std::vector<std::string> args, bool unix_socket = true) {
    const std::string file = dir_.path() + "/report.json";
    args.insert(args.begin(), {ENGRAM_BENCH, "--target", unix_socket ? server_->unix_address() : server_->tcp_address(),
                               "--json", file});
    if (std::find(args.begin(), args.end(), "--duration") == args.end()) {
      args.insert(args.end(), {"--duration", "0.3"});
    }
    args.insert(args.end(), {"--warmup", "0.05"});
    const Finished run = RunToEnd(args);
    EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
    out_ = run.out;
    return json::parse(FileText(file), nullptr, false);
  }

  static ServerProcess* server_;
  TempDir dir_;
  std::string out_;
};

ServerProcess* LoadTest::server_ = nullptr;

void ExpectServedAndRight(const json& point) {
  EXPECT_GT(point["service"]["calls"], 0) << point;
  EXPECT_EQ(point["service"]["failed"], 0) << point["service"]["errors"];
  EXPECT_EQ(point["verify"]["checked"].get<int64_t>() + point["verify"]["skipped"].get<int64_t>(),
            point["service"]["calls"].get<int64_t>());
  EXPECT_GT(point["verify"]["checked"], 0);
  EXPECT_EQ(point["verify"]["wrong"], 0) << point["verify"]["mismatches"];
}

TEST_F(LoadTest, EveryFormIsMeasuredAndEveryReplyIsRight) {
  const json report = Measure({"--form", "highway,kv,update,gate,rows-native,rows-bf16", "--tokens-per-call", "1,7",
                               "--concurrency", "3", "--sequences-per-call", "1", "--verify-fraction", "1", "--model",
                               kTiny, "--metrics", server_->metrics_address(), "--html", dir_.path() + "/page.html"});
  ASSERT_EQ(report["points"].size(), 12u);
  EXPECT_EQ(report["path"], "unix socket, same host");
  EXPECT_THAT(report["verify_against"].get<std::string>(), HasSubstr("bit for bit"));
  for (const json& point : report["points"]) {
    ExpectServedAndRight(point);
    EXPECT_GE(point.at("server").at("calls"), point["service"]["calls"]);
    EXPECT_GT(point.at("server").at("stages").at("decode").at("count"), 0);
    EXPECT_GE(point.at("server").at("cpu_seconds"), 0);
    EXPECT_GT(point.at("server").at("resident_bytes_end"), 0);
  }
  const std::string page = FileText(dir_.path() + "/page.html");
  EXPECT_THAT(page, HasSubstr("</html>"));
  for (const char* reference : {"<script", "<link", "<img", "http://", "https://", "@import", "url("}) {
    EXPECT_THAT(page, Not(HasSubstr(reference)));
  }
}

TEST_F(LoadTest, SessionsAndSeveralSequencesACallAreFollowedToTheBit) {
  const json report =
      Measure({"--form", "highway", "--dtype", "bf16", "--tokens-per-call", "5", "--sequences-per-call", "2",
               "--sessions", "8", "--concurrency", "3", "--verify-fraction", "1", "--model", kTiny},
              /*unix_socket=*/false);
  ASSERT_EQ(report["points"].size(), 1u);
  EXPECT_EQ(report["path"], "loopback TCP, same host");
  ExpectServedAndRight(report["points"][0]);
}

TEST_F(LoadTest, ByTicketTheRepliesAreTheSame) {
  const json report = Measure({"--prepare", "--form", "highway,kv,gate", "--tokens-per-call", "4", "--concurrency", "2",
                               "--verify-fraction", "1", "--model", kTiny, "--baseline", "echo", "--rounds", "2"});
  ASSERT_EQ(report["points"].size(), 3u);
  for (const json& point : report["points"]) {
    ExpectServedAndRight(point);
    EXPECT_GT(point.at("prepare_seconds").at("count"), 0);
    EXPECT_GT(point["echo"]["calls"], 0);
    EXPECT_EQ(point["echo"]["failed"], 0) << point["echo"]["errors"];
    EXPECT_GT(point["echo"]["throughput_ratio"], 0);
    EXPECT_GT(point["echo"]["p50_ratio"], 0);
    EXPECT_EQ(point["echo"]["payload_bytes_up"].get<int64_t>() / point["echo"]["calls"].get<int64_t>(),
              point["service"]["payload_bytes_up"].get<int64_t>() / point["service"]["calls"].get<int64_t>());
  }
  EXPECT_THAT(out_, HasSubstr("against the echo"));
}

TEST_F(LoadTest, AnOpenLoopKeepsItsRateAndVerifies) {
  const json report = Measure({"--form", "update", "--rate", "100", "--arrivals", "constant", "--duration", "1",
                               "--verify-fraction", "0.5", "--seed", "4", "--model", kTiny});
  const json& point = report["points"][0];
  EXPECT_EQ(point["rate"], 100.0);
  const int64_t calls = point["service"]["calls"].get<int64_t>();
  EXPECT_EQ(calls + point["service"]["open_loop"]["unsent"].get<int64_t>(), 100);
  EXPECT_DOUBLE_EQ(point["service"]["calls_per_second"].get<double>(), static_cast<double>(calls));
  EXPECT_GT(point["verify"]["checked"], 20);
  EXPECT_LT(point["verify"]["checked"], 80);
  EXPECT_EQ(point["verify"]["wrong"], 0) << point["verify"]["mismatches"];
}

TEST_F(LoadTest, TheShippedTracesReplayAndVerify) {
  for (const char* trace : {"/decode.jsonl", "/prefill.jsonl"}) {
    const json report = Measure({"--trace", std::string(ENGRAM_TRACES) + trace, "--form", "highway", "--concurrency",
                                 "2", "--verify-fraction", "0.2", "--model", kTiny});
    ASSERT_EQ(report["points"].size(), 1u);
    EXPECT_EQ(report["points"][0]["service"]["failed"], 0) << report["points"][0]["service"]["errors"];
    EXPECT_GT(report["points"][0]["verify"]["checked"], 0);
    EXPECT_EQ(report["points"][0]["verify"]["wrong"], 0) << report["points"][0]["verify"]["mismatches"];
  }
  const json report = Measure({"--trace", std::string(ENGRAM_TRACES) + "/decode.jsonl", "--form", "rows-native"});
  EXPECT_EQ(report["points"][0]["rate"], "trace") << "at its own times where no loop is asked for";
}

TEST_F(LoadTest, AnotherModelsFileVerifiesNothingAndSaysWhichDigest) {
  SynthOptions other;
  other.out = dir_.path() + "/other.gguf";
  other.seed = 99;
  ASSERT_TRUE(WriteSynthModel(other).ok());
  const Finished run = RunToEnd({ENGRAM_BENCH, "--target", server_->unix_address(), "--duration", "0.1", "--warmup",
                                 "0", "--verify-fraction", "1", "--model", other.out});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.err, HasSubstr("DIGEST_MISMATCH: --model " + other.out + " has config digest "));
  EXPECT_EQ(run.out, "");
}

// The digests that a server tells are of weights and shapes; of the tables' bytes only where they were read. So a
// mapped file of other tables passes for the same model, and the rows must tell.
TEST_F(LoadTest, RepliesThatAreNotTheFilesAreFoundAndExitCode1) {
  std::string bytes = FileText(kTiny);
  LoadOptions load;
  const auto model = EngramModel::Load(kTiny, load);
  ASSERT_TRUE(model.ok()) << model.status();
  for (const EngramLayer& layer : (*model)->layers()) {
    const std::string table(reinterpret_cast<const char*>(layer.table.bytes),
                            static_cast<size_t>(layer.table.rows * 84));
    const size_t at = bytes.find(table);
    ASSERT_NE(at, std::string::npos);
    // The codes of each block, not its scales: values change and stay finite.
    for (size_t i = 0; i < table.size(); ++i) {
      if (i % 84 >= 16 && i % 84 < 80) bytes[at + i] = static_cast<char>(bytes[at + i] ^ 0x55);
    }
  }
  const std::string other = dir_.path() + "/other-tables.gguf";
  std::ofstream(other, std::ios::binary) << bytes;
  for (const char* form : {"highway", "kv", "update", "gate", "rows-native", "rows-bf16"}) {
    const std::string file = dir_.path() + "/wrong.json";
    const Finished run = RunToEnd({ENGRAM_BENCH, "--target", server_->unix_address(), "--form", form, "--duration",
                                   "0.1", "--warmup", "0", "--verify-fraction", "1", "--model", other, "--json", file});
    EXPECT_EQ(run.exit_code, 1) << form << run.err;
    EXPECT_THAT(run.out, HasSubstr("WRONG              sequences[0], position ")) << form;
    const json point = json::parse(FileText(file))["points"][0];
    EXPECT_EQ(point.at("verify").at("wrong"), point.at("verify").at("checked"));
  }
}

TEST_F(LoadTest, RefusalsAreCountedByCodeAndReason) {
  // A message of the size that the server takes, but more tokens at a time than its queue may hold.
  auto small = ServerProcess::Start(kTiny, {"--max-queue-tokens", "8", "--max-batch-tokens", "8"});
  ASSERT_TRUE(small.ok()) << small.status();
  const std::string file = dir_.path() + "/refused.json";
  const Finished run =
      RunToEnd({ENGRAM_BENCH, "--target", (*small)->unix_address(), "--form", "kv", "--tokens-per-call", "8",
                "--concurrency", "16", "--duration", "0.5", "--warmup", "0", "--json", file});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  const json report = json::parse(FileText(file));
  EXPECT_GT(report["points"][0]["service"]["errors"].value("RESOURCE_EXHAUSTED QUEUE_FULL", 0), 0) << run.out;
  EXPECT_GT(report["points"][0]["service"]["calls"], 0);
  EXPECT_GT(report["points"][0]["service"].at("failure_latency_seconds").at("p99"), 0);
}

TEST_F(LoadTest, AServerThatDiesWhileItsMetricsAreReadLosesThoseAlone) {
  auto mortal = ServerProcess::Start(kTiny);
  ASSERT_TRUE(mortal.ok()) << mortal.status();
  std::thread later([&mortal] {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    (*mortal)->Stop(SIGKILL);
  });
  const std::string file = dir_.path() + "/lost.json";
  const Finished run = RunToEnd({ENGRAM_BENCH, "--target", (*mortal)->unix_address(), "--metrics",
                                 (*mortal)->metrics_address(), "--duration", "4", "--warmup", "0", "--json", file});
  later.join();
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("metrics            lost: --metrics "));
  const json report = json::parse(FileText(file));
  EXPECT_GT(report["points"][0]["service"]["calls"], 0);
  EXPECT_GT(report["points"][0]["service"]["errors"].value("UNAVAILABLE", 0), 0);
  EXPECT_THAT(report["points"][0].value("metrics_lost", ""), HasSubstr("Connection refused"));
  EXPECT_FALSE(report["points"][0].contains("server"));
}

TEST_F(LoadTest, ARunThatFailsLeavesAnEarlierReportAsItIs) {
  const std::string earlier = dir_.path() + "/earlier.json", fresh = dir_.path() + "/fresh.html";
  std::ofstream(earlier) << "earlier";
  const Finished run = RunToEnd({ENGRAM_BENCH, "--target", "unix:" + dir_.path() + "/none", "--connect-timeout", "0.2",
                                 "--json", earlier, "--html", fresh});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(FileText(earlier), "earlier");
  EXPECT_FALSE(std::ifstream(fresh).is_open()) << "no empty page where none was";
}

TEST_F(LoadTest, ASignalEndsTheRunWithThePointsMeasuredSoFar) {
  for (const auto& [signal, code] : {std::pair("INT", 130), std::pair("TERM", 143)}) {
    const std::string file = dir_.path() + "/" + signal + ".json";
    const Finished run = RunToEnd({"/usr/bin/timeout", "--preserve-status", "-s", signal, "2", ENGRAM_BENCH, "--target",
                                   server_->unix_address(), "--concurrency", "1:200", "--duration", "0.1", "--warmup",
                                   "0", "--json", file});
    EXPECT_EQ(run.exit_code, code) << run.err;
    EXPECT_THAT(run.out, HasSubstr("highway, 1 tokens, concurrency 1\n"));
    const json report = json::parse(FileText(file), nullptr, false);
    ASSERT_TRUE(report.is_object());
    EXPECT_GT(report["points"].size(), 0u);
    EXPECT_LT(report["points"].size(), 200u);
  }
}

TEST_F(LoadTest, WhatIsNoEchoServerIsRefusedBeforeAnythingIsMeasured) {
  for (const std::string& address : {server_->unix_address(), "unix:" + dir_.path() + "/nothing"}) {
    const Finished run = RunToEnd({ENGRAM_BENCH, "--target", server_->unix_address(), "--baseline", "echo",
                                   "--echo-target", address, "--duration", "0.1"});
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_THAT(run.err, HasSubstr("no engram-bench echo-server answers at " + address + ": "));
    EXPECT_EQ(run.out, "");
  }
}

struct Mistake {
  std::vector<std::string> args;
  std::string says;
};

TEST_F(LoadTest, MistakesAreOneLineThatNamesThemAndExitCode2) {
  const std::string kTrace = std::string(ENGRAM_TRACES) + "/decode.jsonl";
  const std::vector<Mistake> mistakes = {
      {{"--form", "auto"}, "--form: \"auto\" is no form"},
      {{"--concurrency", "0"}, "--concurrency: entry \"0\" is no count"},
      {{"--tokens-per-call", "1:x"}, "--tokens-per-call: entry \"1:x\" is no count"},
      {{"--rate", "0"}, "--rate: 0 is not above 0"},
      {{"--rate", "nan"}, "--rate: nan is not finite"},
      {{"--duration", "-1"}, "--duration: -1 is not above 0"},
      {{"--verify-fraction", "2"}, "--verify-fraction"},
      {{"--verify-fraction", "1"}, "--verify-fraction needs --model"},
      {{"--target", "nowhere"}, "--target: target is \"nowhere\""},
      {{"--bogus"}, "--bogus"},
      {{"bogus"}, "bogus"},
      {{"--layers", "77"}, "--layers: the model has no engram layer 77"},
      {{"--metrics", "127.0.0.1:1"}, "--metrics 127.0.0.1:1: "},
      {{"--metrics", server_->tcp_address()}, ": what answers there is no HTTP listener"},
      {{"--tokens-per-call", "1:8:0"}, "--tokens-per-call: entry \"1:8:0\" has step 0, expected at least 1"},
      {{"--trace", kTrace, "--tokens-per-call", "2"},
       "--tokens-per-call is given, but the steps of --trace have their own"},
      {{"--trace", kTrace, "--ngram-pool", "2"}, "--ngram-pool is given, but the steps of --trace have their own"},
      {{"--arrivals", "poisson"}, "--arrivals is given, but not --rate"},
      {{"--max-outstanding", "5"}, "--max-outstanding is given, but not --rate"},
      {{"--rounds", "2"}, "--rounds is given, but not --baseline echo"},
      {{"--rate", "5", "--concurrency", "2"}, "--concurrency is given, but --rate asks for an open loop"},
      {{"--json", "/no/such/folder/x"}, "--json /no/such/folder/x: cannot be opened for writing"},
      {{"--trace", kTiny}, ":1: the line is no JSON object"},
      {{"--tokens-per-call", "1000000"}, "--tokens-per-call: 1000000 tokens in a call, the server takes at most"},
  };
  for (const Mistake& mistake : mistakes) {
    std::vector<std::string> command = {ENGRAM_BENCH, "--target", server_->unix_address()};
    command.insert(command.end(), mistake.args.begin(), mistake.args.end());
    const Finished run = RunToEnd(command);
    EXPECT_EQ(run.exit_code, 2) << mistake.says;
    EXPECT_THAT(run.err, testing::StartsWith("engram-bench: ")) << mistake.says;
    EXPECT_THAT(run.err, HasSubstr(mistake.says));
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
    EXPECT_EQ(run.out, "");
  }
  const Finished absent =
      RunToEnd({ENGRAM_BENCH, "--target", "unix:" + dir_.path() + "/none", "--connect-timeout", "0.2"});
  EXPECT_EQ(absent.exit_code, 2);
  EXPECT_THAT(absent.err, HasSubstr("/none: no server answered within 200ms"));
}

TEST_F(LoadTest, HelpTeachesWithExamplesAndEnvironmentTwins) {
  const Finished help = RunToEnd({ENGRAM_BENCH, "--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* part :
       {"Examples:", "ENGRAM_TARGET", "ENGRAM_BENCH_FORM", "--verify-fraction", "make-trace", "echo-server"}) {
    EXPECT_THAT(help.out, HasSubstr(part));
  }
  EXPECT_THAT(RunToEnd({ENGRAM_BENCH, "--version"}).out, HasSubstr("engram-bench "));
}

}  // namespace
}  // namespace engram::bench
