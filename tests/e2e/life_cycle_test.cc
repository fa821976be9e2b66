// A server's life as an operator sees it: start, health, reflection, metrics, stop, and every way not to start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <future>
#include <string>
#include <vector>

#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";

TEST(LifeCycleTest, SigtermEndsCleanlyAndTheSocketGoesWithIt) {
  for (const int signal : {SIGTERM, SIGINT}) {
    auto server = ServerProcess::Start(kTiny);
    ASSERT_TRUE(server.ok()) << server.status();
    const std::string socket = (*server)->unix_address().substr(5);
    EXPECT_EQ(::access(socket.c_str(), F_OK), 0);
    EXPECT_EQ((*server)->Stop(signal), 0) << (*server)->Log();
    EXPECT_NE(::access(socket.c_str(), F_OK), 0);
  }
}

TEST(LifeCycleTest, ACallInFlightWhenSigtermComesIsAnswered) {
  auto server = ServerProcess::Start(kTiny, {"--drain-delay-secs", "1"});
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->tcp_address());
  v1::ApplyRequest request;
  request.set_form(v1::FORM_KV);
  AddSequence(request, {"", 0, std::vector<int32_t>(2000, 7), {}, {}});
  request.add_layers()->set_layer_id(1);
  std::atomic<bool> stop{false};
  auto calls = std::async(std::launch::async, [&] {
    int failed = 0;
    while (!stop) failed += rpc.Apply(request).status.ok() ? 0 : 1;
    return failed;
  });
  ::usleep(50'000);
  ::kill((*server)->pid(), SIGTERM);
  ::usleep(300'000);  // within the drain delay every call is still served
  stop = true;
  EXPECT_EQ(calls.get(), 0);
  EXPECT_EQ((*server)->Stop(0), 0);
}

// gRPC's own shutdown would answer calls that cross it with CANCELLED, which tells a client nothing.
TEST(LifeCycleTest, CallsThatMeetTheEndOfADrainAreRefusedWithDraining) {
  auto server = ServerProcess::Start(kTiny, {"--drain-delay-secs", "1"});
  ASSERT_TRUE(server.ok()) << server.status();
  v1::ApplyRequest request;
  request.set_form(v1::FORM_KV);
  AddSequence(request, {"", 0, {1, 2, 3}, {}, {}});
  request.add_layers()->set_layer_id(1);
  std::vector<std::future<Answer>> clients;
  for (int i = 0; i < 16; ++i) {
    clients.push_back(std::async(std::launch::async, [&] {
      Rpc rpc((*server)->tcp_address());
      for (;;) {
        Answer answer = rpc.Apply(request, 10'000);
        if (!answer.status.ok()) return answer;
      }
    }));
  }
  ::usleep(200'000);
  ::kill((*server)->pid(), SIGTERM);
  for (std::future<Answer>& client : clients) {
    const Answer end = client.get();
    EXPECT_EQ(end.status.error_code(), grpc::StatusCode::UNAVAILABLE) << end.status.error_message();
    EXPECT_EQ(end.error.reason(), "DRAINING");
  }
  EXPECT_EQ((*server)->Stop(0), 0);
}

TEST(LifeCycleTest, DrainingRepliesSaySoInATrailerAndHealthSaysNotServing) {
  auto server = ServerProcess::Start(kTiny, {"--drain-delay-secs", "2"});
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->tcp_address());
  const auto trailer = [&rpc] {
    grpc::ClientContext context;
    v1::GetModelResponse response;
    EXPECT_TRUE(rpc.stub().GetModel(&context, {}, &response).ok());
    return context.GetServerTrailingMetadata().count("engram-draining");
  };
  EXPECT_EQ(trailer(), 0);
  ::kill((*server)->pid(), SIGTERM);
  for (int i = 0; i < 100 && trailer() == 0; ++i) ::usleep(10'000);
  EXPECT_EQ(trailer(), 1);
  EXPECT_EQ((*server)->Stop(0), 0);
}

TEST(LifeCycleTest, TheStandardHealthServiceSaysServing) {
  auto server = ServerProcess::Start(kTiny);
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  ASSERT_GT(rpc.Model().layers_size(), 0);
  // HealthCheckResponse{status: SERVING}: field 1, varint 1.
  const std::string serving("\x08\x01", 2);
  EXPECT_EQ(RawCall(rpc.channel(), "/grpc.health.v1.Health/Check", ""), serving);
  // HealthCheckRequest{service}: field 1, 23 bytes.
  EXPECT_EQ(RawCall(rpc.channel(), "/grpc.health.v1.Health/Check",
                    "\x0a\x17"
                    "engram.v1.EngramService"),
            serving);
}

TEST(LifeCycleTest, ReflectionListsTheService) {
  auto server = ServerProcess::Start(kTiny);
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  ASSERT_GT(rpc.Model().layers_size(), 0);
  // ServerReflectionRequest{list_services: "*"}: field 7, one byte.
  const std::string names = RawCall(rpc.channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                    std::string("\x3a\x01*", 3));
  EXPECT_THAT(names, HasSubstr("engram.v1.EngramService"));
  EXPECT_THAT(names, HasSubstr("grpc.health.v1.Health"));
}

TEST(LifeCycleTest, MetricsCountCallsTokensAndRefusals) {
  auto server = ServerProcess::Start(kTiny);
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  v1::ApplyRequest request;
  request.set_form(v1::FORM_KV);
  AddSequence(request, {"s", 0, {7, 8, 9}, {1, 0, 1}, {}});
  request.add_layers()->set_layer_id(14);
  ASSERT_TRUE(rpc.Apply(request).status.ok());
  request.mutable_sequences(0)->set_start_pos(77);
  ASSERT_FALSE(rpc.Apply(request).status.ok());
  const std::string text = HttpGet((*server)->metrics_address(), "/metrics");
  for (const char* line : {
           "engram_requests_total{code=\"OK\",method=\"Apply\"} 1",
           "engram_requests_total{code=\"FAILED_PRECONDITION\",method=\"Apply\"} 1",
           "engram_rejected_total{reason=\"POSITION_GAP\"} 1",
           "engram_tokens_total{form=\"KV\",layer=\"14\"} 3",
           "engram_dead_tokens_total 1",
           "engram_rows_gathered_total 72",
           "engram_sessions 1",
           "engram_inflight_requests 0",
           "engram_stage_duration_seconds_count{stage=\"project\"} 1",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

struct Refused {
  const char* name;
  std::vector<std::string> args;
  const char* says;
};

TEST(StartTest, WhatCannotBeUsedIsOneLineAndExitCode2) {
  const TempDir dir;
  const std::string fifo = dir.path() + "/fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::ofstream(dir.path() + "/empty.gguf");
  std::ofstream(dir.path() + "/noise.gguf") << std::string(5000, '\x5a');
  std::ifstream tiny(kTiny, std::ios::binary);
  std::string half(100'000, '\0');
  tiny.read(half.data(), static_cast<std::streamsize>(half.size()));
  std::ofstream(dir.path() + "/half.gguf", std::ios::binary) << half;
  std::ofstream(dir.path() + "/lone-00001-of-00002.gguf", std::ios::binary)
      << std::ifstream(std::string(ENGRAM_TEST_DATA) + "/split/split-00001-of-00002.gguf", std::ios::binary).rdbuf();

  ASSERT_EQ(RunToEnd({ENGRAM_MODEL, "synth", "--preset", "tiny", "--dim", "2048", "--out", dir.path() + "/wide.gguf"})
                .exit_code,
            0);

  const std::vector<Refused> cases = {
      {"missing", {"--model", "missing.gguf"}, "missing.gguf"},
      {"empty", {"--model", dir.path() + "/empty.gguf"}, "empty.gguf"},
      {"noise", {"--model", dir.path() + "/noise.gguf"}, "noise.gguf"},
      {"half", {"--model", dir.path() + "/half.gguf"}, "half.gguf"},
      {"folder", {"--model", dir.path()}, "directory"},
      {"fifo", {"--model", fifo}, "fifo"},
      {"shard", {"--model", dir.path() + "/lone-00001-of-00002.gguf"}, "lone-00002-of-00002.gguf"},
      {"dialect B", {"--model", std::string(ENGRAM_TEST_DATA) + "/ds4/ds4.gguf"}, "e4m3_e8m0_32_row264"},
      {"no model", {}, "--model is missing"},
      {"cuda", {"--model", kTiny, "--backend", "cuda", "--cuda-module", "/no/module.so"}, "CUDA module /no/module.so"},
      {"address", {"--model", kTiny, "--listen", "nonsense"}, "--listen nonsense"},
      {"port", {"--model", kTiny, "--listen", "127.0.0.1:65536"}, "--listen 127.0.0.1:65536"},
      {"open plaintext", {"--model", kTiny, "--listen", "0.0.0.0:0"}, "--insecure"},
      {"unknown flag", {"--model", kTiny, "--frobnicate", "3"}, "--frobnicate"},
      {"bad number", {"--model", kTiny, "--max-batch-tokens", "0"}, "--max-batch-tokens"},
      {"long socket", {"--model", kTiny, "--listen", "unix:/" + std::string(200, 'x')}, "at most 107"},
      {"no such folder",
       {"--model", kTiny, "--http-listen", "off", "--listen", "unix:/no/such/folder/s"},
       "No such file or directory"},
      {"a file there",
       {"--model", kTiny, "--http-listen", "off", "--listen", "unix:" + dir.path() + "/noise.gguf"},
       "no socket"},
      {"given twice",
       {"--model", kTiny, "--http-listen", "off", "--listen", "unix:/tmp/x,unix:/tmp/x"},
       "more than once"},
      {"message too small",
       {"--model", dir.path() + "/wide.gguf", "--http-listen", "off", "--listen", "127.0.0.1:0", "--max-message-bytes",
        "4096"},
       "one token of this model takes up to"},
  };
  for (const Refused& c : cases) {
    std::vector<std::string> command = {ENGRAM_SERVER};
    command.insert(command.end(), c.args.begin(), c.args.end());
    const Finished finished = RunToEnd(command, 20);
    EXPECT_EQ(finished.exit_code, 2) << c.name << ": " << finished.err;
    EXPECT_THAT(finished.err, HasSubstr(c.says)) << c.name;
    EXPECT_EQ(finished.out, "") << c.name;
    // The last line is the refusal; the server's log may stand before it, gRPC's may not.
    EXPECT_THAT(finished.err, Not(HasSubstr("chttp2"))) << c.name;
    const std::string last = finished.err.substr(0, finished.err.size() - 1);
    EXPECT_EQ(last.substr(last.rfind('\n') + 1).rfind("engram-server: ", 0), 0) << c.name << ": " << finished.err;
  }
}

TEST(StartTest, ASecondServerOnTheSameSocketOrPortIsRefusedAndTheFirstLivesOn) {
  auto first = ServerProcess::Start(kTiny);
  ASSERT_TRUE(first.ok()) << first.status();
  for (const std::string& address : {(*first)->unix_address(), (*first)->tcp_address()}) {
    const Finished second =
        RunToEnd({ENGRAM_SERVER, "--model", kTiny, "--http-listen", "off", "--listen", address}, 20);
    EXPECT_EQ(second.exit_code, 2) << second.err;
    EXPECT_THAT(second.err, HasSubstr(address));
  }
  Rpc rpc((*first)->unix_address());
  EXPECT_GT(rpc.Model().layers_size(), 0);
}

TEST(StartTest, CheckConfigOpensTheModelAndServesNothing) {
  const Finished good = RunToEnd({ENGRAM_SERVER, "--model", kTiny, "--check-config"});
  EXPECT_EQ(good.exit_code, 0) << good.err;
  const Finished bad = RunToEnd({ENGRAM_SERVER, "--model", "missing.gguf", "--check-config"});
  EXPECT_EQ(bad.exit_code, 2);
}

TEST(StartTest, HelpTeachesAndVersionNamesItself) {
  const Finished help = RunToEnd({ENGRAM_SERVER, "--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* text : {"--model", "ENGRAM_MODEL", "--listen", "127.0.0.1:8001", "--session-window", "Example"}) {
    EXPECT_THAT(help.out, HasSubstr(text));
  }
  const Finished version = RunToEnd({ENGRAM_SERVER, "--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.out, HasSubstr("engram-server 0."));
}

}  // namespace
}  // namespace engram::e2e
