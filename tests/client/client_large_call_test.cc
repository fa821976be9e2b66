// A prefill of 4096 tokens at the released model's width: 671 MB of f32 highway up and as much down, ten messages'
// worth.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "client/engram_client.h"
#include "gtest/gtest.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

using e2e::RunToEnd;
using e2e::ServerProcess;
using e2e::TempDir;

constexpr int64_t kTokens = 4096;
constexpr int64_t kDim = 5120;
constexpr int64_t kCopies = 4;
constexpr int64_t kValues = kDim * kCopies;

class LargeCallTest : public testing::Test {
 protected:
  // The released width, and one column instead of 24: what is tried here are messages.
  void SetUp() override {
    const std::string path = dir_.path() + "/wide.gguf";
    const e2e::Finished made =
        RunToEnd({ENGRAM_MODEL, "synth", "--out", path, "--dim", "5120", "--max-ngram", "2", "--heads", "1"});
    ASSERT_EQ(made.exit_code, 0) << made.err;
    auto server = ServerProcess::Start(path, {});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    for (int64_t i = 0; i < kTokens; ++i) ids_.push_back(static_cast<int32_t>(i * 37 % 512));
    for (std::vector<float>& highway : highways_) {
      highway.resize(kTokens * kValues);
      for (size_t i = 0; i < highway.size(); ++i) highway[i] = static_cast<float>(i % 1021) / 512 - 1;
    }
  }

  // In place: what comes back stands where the highway stood.
  absl::Status Apply(Client& client, int64_t first, int64_t tokens, std::vector<float>* highways, CallReport* report) {
    SequenceHistory history = SequenceHistory(2);
    if (first > 0) history = SequenceHistory::Seeded(2, first, {ids_[static_cast<size_t>(first - 1)]}).value();
    ApplyCall call;
    call.timeout = absl::Minutes(4);
    call.sequences = {
        {.history = &history,
         .start_pos = first,
         .token_ids = absl::MakeConstSpan(ids_).subspan(static_cast<size_t>(first), static_cast<size_t>(tokens))}};
    for (int l = 0; l < 2; ++l) {
      const auto bytes = absl::MakeSpan(reinterpret_cast<char*>(highways[l].data()), highways[l].size() * 4);
      call.layers.push_back({.layer_id = l == 0 ? 1 : 14, .highway = bytes, .out = bytes});
    }
    return client.Apply(call, report);
  }

  const TempDir dir_;
  std::unique_ptr<ServerProcess> server_;
  std::vector<int32_t> ids_;
  std::vector<float> highways_[2];
};

TEST_F(LargeCallTest, GoesThroughInParts) {
  // Striped over connections; and in as few messages as there can be, over TCP.
  for (const int64_t stripe_bytes : {int64_t{8} << 20, int64_t{0}}) {
    const std::string target = stripe_bytes > 0 ? server_->unix_address() : server_->tcp_address();
    auto client = Client::Connect({.replicas = {.targets = {target}}, .stripe_bytes = stripe_bytes});
    ASSERT_TRUE(client.ok()) << client.status();
    std::vector<float> whole[2] = {highways_[0], highways_[1]};
    CallReport report;
    const absl::Status status = Apply(**client, 0, kTokens, whole, &report);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_GT(report.parts, 9);
    for (const int64_t t : {int64_t{0}, int64_t{1}, kTokens / 2 + 1, kTokens - 1}) {
      const auto at = static_cast<size_t>(t * kValues);
      std::vector<float> alone[2];
      for (int l = 0; l < 2; ++l) alone[l] = {&highways_[l][at], &highways_[l][at] + kValues};
      ASSERT_TRUE(Apply(**client, t, 1, alone, nullptr).ok());
      for (int l = 0; l < 2; ++l) {
        EXPECT_EQ(std::memcmp(&whole[l][at], alone[l].data(), kValues * 4), 0) << "token " << t << ", layer " << l;
        EXPECT_NE(std::memcmp(&whole[l][at], &highways_[l][at], kValues * 4), 0) << "token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace engram::client
