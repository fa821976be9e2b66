// A server that computes on a device, whole: the module it opens is libengram_cuda.so built for the executor
// (tests/simt), so no GPU is needed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

const std::string kData = ENGRAM_TEST_DATA;
const std::string kTiny = kData + "/tiny/tiny.gguf";

// For the programs that are started while it stands.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
};

std::vector<std::string> OnDevice(std::vector<std::string> more = {}) {
  more.insert(more.end(), {"--backend", "cuda", "--cuda-module", ENGRAM_CUDA_TEST_MODULE, "--max-batch-tokens", "256",
                           "--prepare-memory-bytes", "16MiB"});
  return more;
}

Finished Refused(const std::vector<std::string>& args, const std::string& model = kTiny) {
  std::vector<std::string> command = {ENGRAM_SERVER, "--model",  model,        "--http-listen",
                                      "off",         "--listen", "127.0.0.1:0"};
  command.insert(command.end(), args.begin(), args.end());
  return RunToEnd(command);
}

struct Fixture {
  const char* name;
  const char* model;
  const char* expected;
};

class CudaServerTest : public ::testing::TestWithParam<Fixture> {};

TEST_P(CudaServerTest, EveryCaseHoldsWithTablesOnTheDeviceAndBesideIt) {
  for (const char* residency : {"device", "host"}) {
    auto server = ServerProcess::Start(kData + GetParam().model, OnDevice({"--residency", residency}));
    ASSERT_TRUE(server.ok()) << server.status();
    const Finished verify =
        RunToEnd({ENGRAM_CLI, "--target", (*server)->unix_address(), "verify", kData + GetParam().expected});
    EXPECT_EQ(verify.exit_code, 0) << verify.out << verify.err;
    Rpc rpc((*server)->unix_address());
    const v1::GetModelResponse model = rpc.Model();
    EXPECT_EQ(model.backend(), "cuda");
    EXPECT_EQ(model.residency(), residency);
    EXPECT_EQ(model.isa(), "sm_90");
    EXPECT_THAT(model.numerics_id(), MatchesRegex("cuda/[a-z0-9-]+/sm_90/cublasLt-none:ascending\\|descending"));
    const std::string metrics = HttpGet((*server)->metrics_address(), "/metrics");
    EXPECT_THAT(metrics, HasSubstr("engram_gpu_memory_bytes{kind=\"wkv_tiles\"}"));
    EXPECT_THAT(metrics, HasSubstr("residency=\"" + std::string(residency) + "\""));
    EXPECT_THAT(metrics, HasSubstr("engram_cuda_errors_total 0"));
    EXPECT_THAT(metrics, Not(HasSubstr("engram_stage_duration_seconds_count{stage=\"h2d\"} 0")));
    EXPECT_THAT((*server)->Log(), HasSubstr("device memory for=wkv_tiles"));
    EXPECT_EQ((*server)->Stop(SIGTERM), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, CudaServerTest,
                         ::testing::Values(Fixture{"tiny", "/tiny/tiny.gguf", "/tiny/expected.json"},
                                           Fixture{"split", "/split/split-00001-of-00002.gguf",
                                                   "/split/expected.json"}),
                         [](const auto& fixture) { return fixture.param.name; });

TEST(CudaStartTest, WhatIsMissingIsOneLineAndExitTwo) {
  struct Case {
    std::vector<std::string> args;
    std::pair<const char*, const char*> environment;
    std::string says;
  };
  const std::string module = ENGRAM_CUDA_TEST_MODULE;
  const std::vector<Case> cases = {
      {{"--backend", "cuda", "--cuda-module", "/nowhere/module.so"},
       {},
       "--backend cuda: CUDA module /nowhere/module.so"},
      {OnDevice(), {"SIMT_DRIVER", "0"}, "--backend cuda: no CUDA driver on this machine"},
      {OnDevice(), {"SIMT_DEVICES", "0"}, "no CUDA-capable device is detected"},
      {OnDevice({"--device", "3"}), {}, "--device 3: this machine has 1"},
      {OnDevice(), {"SIMT_COMPUTE_MAJOR", "7"}, "is sm_70; sm_80 or later is needed"},
      {{"--backend", "cuda", "--cuda-module", ENGRAM_OTHER_VERSION_MODULE},
       {},
       "is of version 99; this server expects 1"},
      {OnDevice(), {"SIMT_DEVICE_BYTES", "1000000"}, "what helps: --residency host"},
      {OnDevice({"--layers", "2"}), {}, "has no engram at layer 2, which --layers names; it has layers 1, 14"},
      {OnDevice({"--residency", "ram"}), {}, "--residency ram: --backend cuda takes device or host"},
      {{"--backend", "cpu", "--residency", "device"}, {}, "--residency device: --backend cpu takes ram or mmap"},
  };
  for (const Case& one : cases) {
    for (const bool check : {false, true}) {
      std::vector<std::string> args = one.args;
      if (check) args.push_back("--check-config");
      if (one.environment.first != nullptr) ::setenv(one.environment.first, one.environment.second, 1);
      const Finished server = Refused(args);
      if (one.environment.first != nullptr) ::unsetenv(one.environment.first);
      EXPECT_EQ(server.exit_code, 2) << one.says << server.err;
      EXPECT_THAT(server.err, HasSubstr(one.says));
      const std::string last = server.err.substr(server.err.rfind('\n', server.err.size() - 2) + 1);
      EXPECT_THAT(last, StartsWith("engram-server: ")) << "the reason is the last line";
    }
  }
}

TEST(CudaStartTest, AutoTakesTheDeviceThatCanServe) {
  auto server = ServerProcess::Start(
      kTiny, {"--cuda-module", ENGRAM_CUDA_TEST_MODULE, "--max-batch-tokens", "64", "--prepare-memory-bytes", "1MiB"});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(Rpc((*server)->unix_address()).Model().backend(), "cuda");
}

TEST(CudaStartTest, AutoGoesOnWithTheCpuAndSaysWhy) {
  for (const auto& [name, value, why] : {std::tuple{"SIMT_DRIVER", "0", "no CUDA driver on this machine"},
                                         {"SIMT_DEVICE_BYTES", "1000000", "device memory: "}}) {
    const Environment environment(name, value);
    auto server = ServerProcess::Start(kTiny, {"--cuda-module", ENGRAM_CUDA_TEST_MODULE});
    ASSERT_TRUE(server.ok()) << server.status();
    const v1::GetModelResponse model = Rpc((*server)->unix_address()).Model();
    EXPECT_EQ(model.backend(), "cpu");
    EXPECT_EQ(model.residency(), "ram");
    EXPECT_THAT((*server)->Log(), AllOf(HasSubstr("computing on the CPU"), HasSubstr(why)));
  }
}

TEST(CudaStartTest, SomeLayersAreServedUnderTheWholeModelsDigests) {
  auto all = ServerProcess::Start(kTiny, OnDevice());
  auto some = ServerProcess::Start(kTiny, OnDevice({"--layers", "14"}));
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_TRUE(some.ok()) << some.status();
  const v1::GetModelResponse whole = Rpc((*all)->unix_address()).Model();
  const v1::GetModelResponse part = Rpc((*some)->unix_address()).Model();
  ASSERT_EQ(whole.layers_size(), 2);
  ASSERT_EQ(part.layers_size(), 1);
  EXPECT_EQ(part.layers(0).layer_id(), 14);
  EXPECT_EQ(part.layers(0).rows(), whole.layers(1).rows());
  EXPECT_EQ(part.config_digest(), whole.config_digest());
  EXPECT_EQ(part.hash_digest(), whole.hash_digest());
}

TEST(CudaFaultTest, ABrokenContextIsNotServingAndEndsTheProcessWithThree) {
  const Environment environment("SIMT_FAIL_AFTER", "200");
  auto server = ServerProcess::Start(kTiny, OnDevice({"--probe-interval-secs", "0"}));
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  const v1::GetModelResponse model = rpc.Model();
  v1::ApplyRequest request;
  request.set_form(v1::FORM_KV);
  request.add_layers()->set_layer_id(1);
  v1::Sequence& sequence = *request.add_sequences();
  sequence.set_start_pos(0);
  for (int i = 0; i < 4; ++i) sequence.add_token_ids(i);
  Answer answer;
  for (int i = 0; i < 2000; ++i) {
    answer = rpc.Apply(request);
    if (!answer.status.ok()) break;
  }
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INTERNAL) << answer.status.error_message();
  EXPECT_THAT(answer.status.error_message(), HasSubstr("an illegal memory access was encountered"));
  EXPECT_EQ((*server)->Stop(0), 3) << "by itself";
  EXPECT_THAT((*server)->Log(), AllOf(HasSubstr("backend broken"), HasSubstr("drained")));
}

}  // namespace
}  // namespace engram::e2e
