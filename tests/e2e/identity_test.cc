// What a server says it is, and how it notices that it is not any more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "server/model/inspect.h"
#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
const std::string kServing("\x08\x01", 2), kNotServing("\x08\x02", 2);

std::string Health(Rpc& rpc) { return RawCall(rpc.channel(), "/grpc.health.v1.Health/Check", ""); }

// Waits for what a probe a second brings about.
bool Comes(const std::function<bool()>& holds) {
  const absl::Time end = absl::Now() + absl::Seconds(60);
  while (!holds()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return true;
}

class IdentityTest : public ::testing::Test {
 protected:
  IdentityTest() : path_(dir_.path() + "/model.gguf") {
    std::ofstream(path_, std::ios::binary) << std::ifstream(kTiny, std::ios::binary).rdbuf();
  }

  std::string Metrics(const ServerProcess& server) { return HttpGet(server.metrics_address(), "/metrics"); }

  // How many have run.
  int Probes(const ServerProcess& server) {
    const std::string text = Metrics(server), name = "\nengram_probes_total ";
    const size_t at = text.find(name);
    return at == std::string::npos ? -1 : std::atoi(text.c_str() + at + name.size());
  }

  TempDir dir_;
  const std::string path_;
};

TEST_F(IdentityTest, AMappedModelKnowsItsContentOnlyByItsSidecar) {
  const std::string hex = "325a4dc75b9540a18c5f9f908712c3b6127c430f833372ece1004b52f1490a5b";  // docs/formats.md
  {
    auto server = ServerProcess::Start(path_, {"--residency", "mmap"});
    ASSERT_TRUE(server.ok()) << server.status();
    Rpc rpc((*server)->unix_address());
    EXPECT_EQ(rpc.Model().content_digest(), "");
    EXPECT_THAT(Metrics(**server), HasSubstr("content_digest=\"\""));
    const Finished cli = RunToEnd({ENGRAM_CLI, "--target", (*server)->unix_address(), "model"});
    EXPECT_THAT(cli.out, HasSubstr("content digest     not known")) << cli.err;
  }
  ASSERT_EQ(RunToEnd({ENGRAM_MODEL, "digest", path_, "--write"}).exit_code, 0);
  auto server = ServerProcess::Start(path_, {"--residency", "mmap"});
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  EXPECT_EQ(rpc.Model().content_digest().size(), 32u);
  EXPECT_THAT(Metrics(**server), HasSubstr("content_digest=\"" + hex + "\""));
  const Finished cli = RunToEnd({ENGRAM_CLI, "--target", (*server)->unix_address(), "model"});
  EXPECT_THAT(cli.out, HasSubstr("content digest     " + hex)) << cli.err;
}

TEST_F(IdentityTest, TheNumericsIdNamesBackendAlgorithmsMachineAndLibraries) {
  auto server = ServerProcess::Start(path_);
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  EXPECT_THAT(rpc.Model().numerics_id(), MatchesRegex("cpu/n16-g8/[a-z0-9_+-]+/glibc-[0-9.]+"));
}

TEST_F(IdentityTest, AModelThatIsNotWhatItsSidecarSaysIsOneLineAndExitCode2) {
  ASSERT_EQ(RunToEnd({ENGRAM_MODEL, "digest", path_, "--write"}).exit_code, 0);
  std::ifstream in(path_ + ".digest");
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  text.replace(text.find("325a4dc7"), 8, "00000000");
  std::ofstream(path_ + ".digest") << text;
  const Finished server =
      RunToEnd({ENGRAM_SERVER, "--model", path_, "--http-listen", "off", "--listen", "127.0.0.1:0"});
  EXPECT_EQ(server.exit_code, 2);
  EXPECT_EQ(server.out, "");
  EXPECT_THAT(server.err, HasSubstr("engram-server: " + path_ + ": the tables read have content_digest 325a4dc7"));
}

TEST_F(IdentityTest, ProbesPassWhileAllIsWell) {
  auto server = ServerProcess::Start(path_, {"--probe-interval-secs", "1"});
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  EXPECT_GE(Probes(**server), 1) << "one ran before the server was ready";
  ASSERT_TRUE(Comes([&] { return Probes(**server) >= 3; }));
  EXPECT_THAT(Metrics(**server), HasSubstr("engram_probe_failures_total 0"));
  EXPECT_EQ(Health(rpc), kServing);
  EXPECT_EQ((*server)->Stop(SIGTERM), 0) << (*server)->Log();
}

// A mapped file that somebody writes to: its answers are not the model's any more.
class WrittenInPlaceTest : public IdentityTest {
 protected:
  void Start(const std::vector<std::string>& more) {
    std::vector<std::string> args = {"--residency", "mmap", "--probe-interval-secs", "1"};
    args.insert(args.end(), more.begin(), more.end());
    auto server = ServerProcess::Start(path_, args);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    ASSERT_EQ(Health(*rpc_), kServing);
  }

  // Flips a bit of layer 14's first row, or flips it back.
  void Flip() {
    const auto inspection = InspectModel(path_);
    ASSERT_TRUE(inspection.ok()) << inspection.status();
    const int64_t at = inspection->header.layers[1].table.tensor.offset + 40;
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(at);
    const int byte = file.get();
    file.seekp(at).put(static_cast<char>(byte ^ 1));
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
};

TEST_F(WrittenInPlaceTest, IsNotServingUntilItIsRightAgain) {
  ASSERT_NO_FATAL_FAILURE(Start({}));
  ASSERT_NO_FATAL_FAILURE(Flip());
  ASSERT_TRUE(Comes([&] { return Health(*rpc_) == kNotServing; }));
  EXPECT_THAT(Metrics(*server_), Not(HasSubstr("engram_probe_failures_total 0")));
  EXPECT_THAT(server_->Log(), HasSubstr("model.gguf: probe: layer 14, row 0: byte 40 of the row is read as 0x"));
  ASSERT_NO_FATAL_FAILURE(Flip());
  ASSERT_TRUE(Comes([&] { return Health(*rpc_) == kServing; }));
  EXPECT_EQ(server_->Stop(SIGTERM), 0) << server_->Log();
}

TEST_F(WrittenInPlaceTest, AProbeThatPassesAgainWhileDrainingDoesNotBringHealthBack) {
  ASSERT_NO_FATAL_FAILURE(Start({"--drain-delay-secs", "600"}));
  ASSERT_NO_FATAL_FAILURE(Flip());
  ASSERT_TRUE(Comes([&] { return Health(*rpc_) == kNotServing; }));
  ::kill(server_->pid(), SIGTERM);
  ASSERT_TRUE(Comes([&] { return server_->Log().find("INFO draining") != std::string::npos; }));
  ASSERT_NO_FATAL_FAILURE(Flip());
  ASSERT_TRUE(Comes([&] { return server_->Log().find("INFO probe passed again") != std::string::npos; }));
  EXPECT_EQ(Health(*rpc_), kNotServing);
}

}  // namespace
}  // namespace engram::e2e
