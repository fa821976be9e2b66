// Calls whose highways lie in memory shared with a real server, through the library.
#include "client/shared_region.h"

#include <signal.h>
#include <sys/wait.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/engram_client.h"
#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/calls_through_a_server.h"
#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

using e2e::ServerProcess;
using testing::HasSubstr;

class SharedRegionTest : public ClientCallsTest {
 protected:
  void SetUp() override {
    server_ = Sharing({});
    client_ = Connect(*server_);
  }

  std::unique_ptr<ServerProcess> Sharing(std::vector<std::string> args) {
    args.insert(args.end(), {"--shm-listen", absl::StrCat("unix:", dir_.path(), "/m", servers_++)});
    args.insert(args.end(), {"--max-batch-tokens", "8", "--ticket-ttl-ms", "60000"});
    return Start(args);
  }

  static std::unique_ptr<SharedRegion> Open(Client& client, int64_t bytes = 4 << 20) {
    auto region = client.OpenRegion({.bytes = bytes});
    EXPECT_TRUE(region.ok()) << region.status();
    return region.ok() ? *std::move(region) : nullptr;
  }

  // The layers of `tensors` with their highways copied into the region, one after the other; `out` there too, in place
  // or after them all.
  static std::vector<LayerRun> Move(Tensors& tensors, Form form, const SharedRegion& region, bool in_place) {
    std::vector<LayerRun> layers = tensors.Layers(form);
    const size_t bytes = tensors.highway[0].size();
    for (size_t l = 0; l < 2; ++l) {
      const absl::Span<char> in = region.memory().subspan(l * bytes, bytes);
      std::memcpy(in.data(), tensors.highway[l].data(), bytes);
      layers[l].highway = in;
      if (!layers[l].out.empty()) layers[l].out = in_place ? in : region.memory().subspan((2 + l) * bytes, bytes);
    }
    return layers;
  }

  // An Apply of both layers in the region, which must succeed; its results in the Tensors, copied out of the region.
  static Tensors ApplyIn(Client& client, const SharedRegion& region, ApplyCall call, int64_t tokens, bool in_place,
                         CallReport* report = nullptr) {
    Tensors tensors(tokens, call.dtype);
    call.region = &region;
    call.layers = Move(tensors, call.form, region, in_place);
    const absl::Status status = client.Apply(call, report);
    EXPECT_TRUE(status.ok()) << status;
    for (size_t l = 0; l < 2; ++l) {
      if (!call.layers[l].out.empty()) tensors.out[l] = {call.layers[l].out.begin(), call.layers[l].out.end()};
    }
    return tensors;
  }

  const e2e::TempDir dir_;
  int servers_ = 0;
  std::unique_ptr<Client> client_;
};

TEST_F(SharedRegionTest, EveryFormGivesTheBitsOfAnOrdinaryCall) {
  const auto region = Open(*client_);
  ASSERT_NE(region, nullptr);
  const std::vector<int32_t> ids = Tokens(37);
  const std::vector<uint8_t> mask = [] {
    std::vector<uint8_t> live(37, 1);
    live[5] = live[36] = 0;
    return live;
  }();
  for (const Form form : {Form::kHighway, Form::kAuto, Form::kUpdate, Form::kGate}) {
    for (const HighwayDtype dtype : {HighwayDtype::kF32, HighwayDtype::kBf16}) {
      for (const bool in_place : {false, true}) {
        ApplyCall call;
        call.sequences = {{.token_ids = ids, .token_mask = mask}};
        call.form = form;
        call.dtype = dtype;
        CallReport report;
        const Tensors got = ApplyIn(*client_, *region, call, 37, in_place, &report);
        EXPECT_EQ(got.All(), Apply(*client_, form, call.sequences, 37, dtype).All());
        EXPECT_EQ(report.parts, 1);
      }
    }
  }
}

TEST_F(SharedRegionTest, ByAPreparedResultAndAPartOfIt) {
  const auto region = Open(*client_);
  const std::vector<int32_t> ids = Tokens(20);
  PrepareCall prepare;
  prepare.sequences = {{.token_ids = ids}};
  prepare.layer_ids = {1, 14};
  const absl::StatusOr<Prepared> prepared = client_->Prepare(prepare);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  ApplyCall call;
  call.prepared = &*prepared;
  const Tensors direct = Apply(*client_, Form::kHighway, {{.token_ids = ids}}, 20);
  EXPECT_EQ(ApplyIn(*client_, *region, call, 20, true).All(), direct.All());
  // Gone: the same by its ids.
  ASSERT_EQ(client_->Release(*prepared).value(), 1);
  EXPECT_EQ(ApplyIn(*client_, *region, call, 20, true).All(), direct.All());
}

TEST_F(SharedRegionTest, NoMessageLimitsTheHighwayAndACutCallIsOneToTheCaller) {
  const auto small = Sharing({"--max-queue-tokens", "64", "--max-message-bytes", "4096"});
  const auto client = Connect(*small);
  const auto region = Open(*client);
  ASSERT_NE(region, nullptr);
  const std::vector<int32_t> ids = Tokens(50), more = Tokens(150, 9);
  ApplyCall call;
  call.sequences = {{.token_ids = ids}};
  CallReport report;
  const Tensors whole = ApplyIn(*client, *region, call, 50, true, &report);
  EXPECT_EQ(report.parts, 1) << "a message of 4 KiB holds two tokens";
  EXPECT_EQ(whole.All(), Apply(*client_, Form::kHighway, call.sequences, 50).All());

  call.sequences.push_back({.token_ids = more});
  const Tensors cut = ApplyIn(*client, *region, call, 200, false, &report);
  EXPECT_GT(report.parts, 3);
  EXPECT_EQ(cut.All(), Apply(*client_, Form::kHighway, call.sequences, 200).All());
}

// What is refused here leaves a gap: the tokens behind it stay where the caller has them.
TEST_F(SharedRegionTest, APartialCallKeepsEveryTokensPlace) {
  const auto region = Open(*client_);
  const std::vector<int32_t> a = Tokens(5), outside = {3, 9999, 4}, last = Tokens(14, 8);
  const std::vector<int32_t> two = {1, 2}, three = {3, 4, 5};
  const Tensors full = Apply(*client_, Form::kHighway,
                             {{.token_ids = a}, {.token_ids = two}, {.token_ids = three}, {.token_ids = last}}, 24);
  ApplyCall call;
  call.sequences = {{.token_ids = a}, {.start_pos = 9, .token_ids = two}, {.token_ids = outside}, {.token_ids = last}};
  call.partial_ok = true;
  CallReport report;
  const Tensors got = ApplyIn(*client_, *region, call, 24, true, &report);
  ASSERT_EQ(report.sequences.size(), 4u);
  EXPECT_EQ(ErrorReason(report.sequences[1]), "LOOKBACK_LENGTH");
  EXPECT_EQ(report.parts, 2);
  EXPECT_EQ(ErrorReason(report.sequences[2]), "TOKEN_OUT_OF_RANGE");
  const size_t token = kValues * 4;
  for (int l = 0; l < 2; ++l) {
    EXPECT_EQ(got.out[l].substr(0, 5 * token), full.out[l].substr(0, 5 * token));
    EXPECT_EQ(got.out[l].substr(5 * token, 5 * token), got.highway[l].substr(5 * token, 5 * token));
    EXPECT_EQ(got.out[l].substr(10 * token), full.out[l].substr(10 * token));
  }
}

TEST_F(SharedRegionTest, SessionsWorkAsEver) {
  const auto region = Open(*client_);
  const std::vector<int32_t> ids = Tokens(20);
  const absl::Span<const int32_t> all(ids);
  ApplyCall call;
  call.sequences = {{.token_ids = all.subspan(0, 12), .session = "s"}};
  ApplyIn(*client_, *region, call, 12, true);
  call.sequences = {{.start_pos = 12, .token_ids = all.subspan(12), .session = "s"}};
  const std::vector<int32_t> lookback = {ids[11], ids[10], ids[9]};
  EXPECT_EQ(ApplyIn(*client_, *region, call, 8, true).All(),
            Apply(*client_, Form::kHighway, {{.start_pos = 12, .token_ids = all.subspan(12), .lookback = lookback}}, 8)
                .All());
}

TEST_F(SharedRegionTest, MisuseIsRefusedBeforeItIsSent) {
  const auto region = Open(*client_);
  const std::vector<int32_t> ids = Tokens(2);
  Tensors tensors(2, HighwayDtype::kF32);
  ApplyCall call;
  call.sequences = {{.token_ids = ids}};
  call.region = region.get();
  call.layers = tensors.Layers(Form::kHighway);
  EXPECT_THAT(std::string(client_->Apply(call).message()), HasSubstr("do not lie in the call's region"));
  call.layers = Move(tensors, Form::kHighway, *region, true);
  call.layers[1].out = absl::MakeSpan(tensors.out[1]);
  EXPECT_THAT(std::string(client_->Apply(call).message()), HasSubstr("layers[1]"));
  call.layers = Move(tensors, Form::kHighway, *region, true);
  call.on_failure = OnFailure::kSkip;
  EXPECT_THAT(std::string(client_->Apply(call).message()), HasSubstr("kSkip"));
  call.on_failure = OnFailure::kAbort;
  call.form = Form::kKv;
  call.layers = tensors.Layers(Form::kKv);
  EXPECT_EQ(ErrorReason(client_->Apply(call)), "FORM");
  // What only the server checks.
  call.form = Form::kHighway;
  call.layers = Move(tensors, Form::kHighway, *region, true);
  call.layers[0].out = region->memory().subspan(4, call.layers[0].highway.size());
  EXPECT_EQ(ErrorReason(client_->Apply(call)), "REGION_SPAN");
  call.layers = Move(tensors, Form::kHighway, *region, true);
  EXPECT_TRUE(client_->Apply(call).ok());
}

TEST_F(SharedRegionTest, SpansAtTheMemorysEdges) {
  const auto region = Open(*client_, 8192);
  const absl::Span<char> memory = region->memory();
  EXPECT_EQ(region->OffsetOf(memory), 0u);
  EXPECT_EQ(region->OffsetOf(memory.last(1)), memory.size() - 1);
  EXPECT_EQ(region->OffsetOf({memory.data() + 1, memory.size()}), std::nullopt);
  EXPECT_EQ(region->OffsetOf({memory.data() - 1, 1}), std::nullopt);
  EXPECT_EQ(region->OffsetOf({memory.data() + memory.size(), 1}), std::nullopt);
  EXPECT_EQ(region->OffsetOf({}), 0u);
}

TEST_F(SharedRegionTest, ItsEndIsSeenByTheServer) {
  auto region = Open(*client_);
  EXPECT_EQ(e2e::MetricOf(server_->metrics_address(), "engram_shm_regions"), 1);
  EXPECT_EQ(e2e::MetricOf(server_->metrics_address(), "engram_shm_bytes"), 4 << 20);
  region.reset();
  EXPECT_TRUE(e2e::AwaitMetric(server_->metrics_address(), "engram_shm_bytes", 0));
}

TEST_F(SharedRegionTest, AServerThatSharesNoneOrIsNotHereSaysSo) {
  const auto plain = Start({});
  EXPECT_EQ(ErrorReason(Connect(*plain)->OpenRegion({.bytes = 1}).status()), "REGIONS_OFF");
  EXPECT_EQ(ErrorReason(client_->OpenRegion({.bytes = 0}).status()), "REGION_SPAN");
  // As from another host, or another server's socket.
  const absl::Status missing = client_->OpenRegion({.bytes = 1, .socket = dir_.path() + "/none"}).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("/none: No such file"));
  const auto other = Sharing({});
  const absl::Status foreign = client_->OpenRegion({.bytes = 1, .socket = dir_.path() + "/m1"}).status();
  EXPECT_EQ(foreign.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(foreign.message()), HasSubstr("another server's"));
}

// With several servers the region's own is the one that is asked.
TEST_F(SharedRegionTest, CallsGoToTheRegionsServer) {
  const auto other = Sharing({});
  const auto client = *Client::Connect({.replicas = {.targets = {other->unix_address(), server_->unix_address()}}});
  const std::vector<int32_t> ids = Tokens(9);
  for (const std::string& replica : {server_->unix_address(), other->unix_address()}) {
    absl::StatusOr<std::unique_ptr<SharedRegion>> region = client->OpenRegion({.bytes = 1 << 20, .replica = replica});
    // The second server is asked for its model a little after the first.
    for (int i = 0; i < 1000 && !region.ok(); ++i) {
      absl::SleepFor(absl::Milliseconds(5));
      region = client->OpenRegion({.bytes = 1 << 20, .replica = replica});
    }
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ((*region)->replica(), replica);
    for (int i = 0; i < 4; ++i) {
      ApplyCall call;
      call.sequences = {{.token_ids = ids}};
      CallReport report;
      ApplyIn(*client, **region, call, 9, true, &report);
      EXPECT_EQ(report.replica, replica);
    }
  }
}

// Nobody knows whether a call without an answer was computed, or when: not repeated, and no second one in its memory.
TEST_F(SharedRegionTest, ACallWithoutAnAnswerSpoilsTheRegion) {
  auto region = Open(*client_);
  const std::vector<int32_t> ids = Tokens(4);
  Tensors tensors(4, HighwayDtype::kF32);
  ApplyCall call;
  call.sequences = {{.token_ids = ids}};
  call.region = region.get();
  call.layers = Move(tensors, Form::kHighway, *region, true);
  call.timeout = absl::Milliseconds(300);
  call.on_failure = OnFailure::kRetry;
  ::kill(server_->pid(), SIGSTOP);
  ASSERT_EQ(::waitpid(server_->pid(), nullptr, WUNTRACED), server_->pid());  // all its threads have stopped
  CallReport report;
  EXPECT_EQ(client_->Apply(call, &report).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(report.attempts, 1);
  ::kill(server_->pid(), SIGCONT);
  call.timeout = absl::Seconds(30);
  const absl::Status spoiled = client_->Apply(call);
  EXPECT_EQ(spoiled.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(spoiled.message()), HasSubstr("open another"));
  region = Open(*client_);
  call.region = region.get();
  call.layers = Move(tensors, Form::kHighway, *region, true);
  EXPECT_TRUE(client_->Apply(call).ok());
}

TEST_F(SharedRegionTest, AServerThatRestartedKnowsItNoMore) {
  const std::string socket = "unix:" + dir_.path() + "/s";
  auto first = Sharing({"--listen", socket});
  const auto client = Connect(socket);
  const auto region = Open(*client);
  ASSERT_NE(region, nullptr);
  const std::vector<int32_t> ids = Tokens(4);
  ApplyCall call;
  call.sequences = {{.token_ids = ids}};
  const Tensors expected = ApplyIn(*client, *region, call, 4, true);
  first->Stop(SIGKILL);
  const auto second = Sharing({"--listen", socket});
  Tensors tensors(4, HighwayDtype::kF32);
  call.region = region.get();
  call.layers = Move(tensors, Form::kHighway, *region, true);
  // The connection's end may be found first, or only by this call.
  absl::Status status = client->Apply(call);
  if (absl::IsUnavailable(status)) {
    EXPECT_EQ(ErrorReason(status), "");
  } else {
    EXPECT_EQ(ErrorReason(status), "REGION") << status;
  }
  const absl::Time end = absl::Now() + absl::Seconds(20);
  absl::StatusOr<std::unique_ptr<SharedRegion>> again = client->OpenRegion({.bytes = 1 << 20});
  while (!again.ok() && absl::Now() < end) again = client->OpenRegion({.bytes = 1 << 20});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ApplyIn(*client, **again, call, 4, true).All(), expected.All());
}

}  // namespace
}  // namespace engram::client
