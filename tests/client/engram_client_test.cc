#include "client/engram_client.h"

#include <atomic>
#include <cstdint>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "client/error_details.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

class ClientTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& digest = "") {
    return Client::Connect(
        {.replicas = {.targets = {server_.target()}, .connect_timeout = absl::Seconds(10), .hash_digest = digest}});
  }

  std::unique_ptr<Client> ConnectOrDie() {
    server_.Start();
    auto client = Connect();
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  // Two tokens at start_pos through layer 1; the reply lands over the input.
  ApplyCall InPlaceCall(int64_t start_pos) {
    ApplyCall call;
    call.sequences = {SequenceRun{.history = &history_, .start_pos = start_pos, .token_ids = ids_}};
    call.layers = {LayerRun{.layer_id = 1, .highway = highway_, .out = absl::MakeSpan(highway_)}};
    return call;
  }

  FakeServer server_;
  SequenceHistory history_{4};
  const std::vector<int32_t> ids_ = {5, 6};
  std::string highway_ = std::string(64, 'i');
};

TEST_F(ClientTest, AppliesInPlaceAndRemembersTheTokensForTheNextCall) {
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(client->model().layers.size(), 2u);
  ASSERT_TRUE(client->Apply(InPlaceCall(0)).ok());
  EXPECT_EQ(highway_, std::string(64, 'r'));
  ASSERT_TRUE(client->Apply(InPlaceCall(2)).ok());
  ASSERT_TRUE(client->Apply(InPlaceCall(1)).ok()) << "a rollback is an ordinary call";
  EXPECT_EQ(history_.length(), 3);
  const auto requests = server_.requests();
  ASSERT_EQ(requests.size(), 3u);
  EXPECT_EQ(requests[0].layers(0).highway(), std::string(64, 'i'));
  EXPECT_THAT(requests[0].sequences(0).lookback_token_ids(), ElementsAre(-1, -1, -1));
  EXPECT_THAT(requests[1].sequences(0).lookback_token_ids(), ElementsAre(6, 5, -1));
  EXPECT_THAT(requests[2].sequences(0).lookback_token_ids(), ElementsAre(5, -1, -1));
}

TEST_F(ClientTest, KvComesBackWithoutAHighway) {
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  std::string kv(2 * 24, ' ');
  ApplyCall call = InPlaceCall(0);
  call.form = Form::kKv;
  call.layers = {LayerRun{.layer_id = 14, .highway = {}, .out = absl::MakeSpan(kv)}};
  ASSERT_TRUE(client->Apply(call).ok());
  EXPECT_EQ(kv, std::string(48, 'r'));
  EXPECT_EQ(server_.requests()[0].layers(0).highway(), "");
}

TEST_F(ClientTest, ARefusalKeepsReasonAndOffendersAndMovesNothing) {
  server_.apply = [](auto&, auto&, auto*) {
    google::rpc::ErrorInfo info;
    info.set_domain("engram");
    info.set_reason("TOKEN_OUT_OF_RANGE");
    google::rpc::BadRequest bad;
    // 64 offenders with long texts: the trailer is larger than gRPC's default limit.
    for (int i = 0; i < 64; ++i) {
      auto* violation = bad.add_field_violations();
      violation->set_field("sequences[0].token_ids[" + std::to_string(i) + "]");
      violation->set_description(std::string(150, 'x'));
    }
    google::rpc::Status details;
    details.add_details()->PackFrom(info);
    details.add_details()->PackFrom(bad);
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "64 offenders", details.SerializeAsString());
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  const absl::Status status = client->Apply(InPlaceCall(0));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "64 offenders");
  EXPECT_EQ(ErrorReason(status), "TOKEN_OUT_OF_RANGE");
  EXPECT_THAT(ErrorOffenders(status), SizeIs(64));
  EXPECT_EQ(history_.length(), 0);
  EXPECT_EQ(highway_, std::string(64, 'i'));
}

TEST_F(ClientTest, GarbageDetailsLeaveCodeAndMessage) {
  server_.apply = [](auto&, auto&, auto*) {
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "a gap", "\x01\x02garbage\xff");
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  const absl::Status status = client->Apply(InPlaceCall(0));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "a gap");
  EXPECT_EQ(ErrorReason(status), "");
}

TEST_F(ClientTest, RepliesOfWrongShapeAreErrorsThatMoveNothing) {
  std::atomic<int> fault = 0;
  server_.apply = [&fault](auto&, auto&, v1::ApplyResponse* response) {
    switch (fault.load()) {
      case 0:
        response->clear_layers();
        break;
      case 1:
        response->mutable_layers(0)->set_layer_id(14);
        break;
      case 2:
        response->mutable_layers(0)->set_highway(std::string(63, 'r'));
        break;
      case 3:
        response->mutable_layers(0)->set_highway(std::string(1 << 20, 'r'));
        break;
      case 4:
        response->mutable_layers(0)->clear_highway();
        response->mutable_layers(0)->set_kv(std::string(64, 'r'));
        break;
      case 5:
        *response->add_layers() = response->layers(0);
        break;
    }
    return grpc::Status::OK;
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  for (int i = 0; i <= 5; ++i) {
    fault = i;
    const absl::Status status = client->Apply(InPlaceCall(0));
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << "fault " << i << ": " << status;
    EXPECT_EQ(history_.length(), 0);
    EXPECT_EQ(highway_, std::string(64, 'i'));
  }
}

TEST_F(ClientTest, AReplyLargerThanTheModelsLimitIsNotReceived) {
  server_.model.mutable_limits()->set_max_message_bytes(1 << 20);
  server_.apply = [](auto&, auto&, v1::ApplyResponse* response) {
    response->mutable_layers(0)->set_highway(std::string(3 << 20, 'r'));
    return grpc::Status::OK;
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(client->Apply(InPlaceCall(0)).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ClientTest, TensorsAboveGrpcsFourMegabyteDefaultPass) {
  server_.model.mutable_geometry()->set_dim(1 << 20);
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  std::string highway(size_t{8} << 20, 'i');
  ApplyCall call;
  const std::vector<int32_t> one = {5};
  call.sequences = {SequenceRun{.history = &history_, .token_ids = one}};
  call.layers = {LayerRun{.layer_id = 1, .highway = highway, .out = absl::MakeSpan(highway)}};
  const absl::Status status = client->Apply(call);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(highway.front(), 'r');
  EXPECT_EQ(highway.back(), 'r');
}

TEST_F(ClientTest, ASlowServerMeetsTheDeadline) {
  server_.apply = [](grpc::ServerContext& context, auto&, auto*) {
    while (!context.IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
    return grpc::Status::OK;
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  ApplyCall call = InPlaceCall(0);
  call.timeout = absl::Milliseconds(100);
  const absl::Time start = absl::Now();
  const absl::Status status = client->Apply(call);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "no answer from " + server_.target() + " within 100ms");
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_EQ(history_.length(), 0);
}

TEST_F(ClientTest, AServerThatWentAwayIsNamedAndADrainingOneKeepsItsReason) {
  std::atomic<bool> draining = false;
  server_.apply = [&draining](auto&, auto&, auto*) {
    if (!draining) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
    google::rpc::ErrorInfo info;
    info.set_domain("engram");
    info.set_reason("DRAINING");
    google::rpc::Status details;
    details.add_details()->PackFrom(info);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "DRAINING: server", details.SerializeAsString());
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  EXPECT_EQ(client->Apply(InPlaceCall(0)).message(), server_.target() + ": gone");
  draining = true;
  const absl::Status status = client->Apply(InPlaceCall(0));
  EXPECT_EQ(ErrorReason(status), "DRAINING");
  EXPECT_EQ(status.message(), "DRAINING: server");
}

TEST_F(ClientTest, ManyThreadsShareAClient) {
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      SequenceHistory history(4);
      for (int i = 0; i < 20; ++i) {
        std::string highway(64, 'i');
        ApplyCall call;
        call.sequences = {SequenceRun{.history = &history, .start_pos = 2 * i, .token_ids = ids_}};
        call.layers = {LayerRun{.layer_id = 1, .highway = highway, .out = absl::MakeSpan(highway)}};
        if (client->Apply(call).ok() && highway == std::string(64, 'r')) ++good;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 160);
}

// A channel whose last holder was a callback ended on gRPC's own thread, which then waited for itself and aborted.
TEST_F(ClientTest, AClientMayEndRightBehindItsLastCall) {
  server_.apply = [](auto&, auto&, auto*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"); };
  server_.Start();
  for (int i = 0; i < 50; ++i) {
    auto client = Connect();
    ASSERT_TRUE(client.ok()) << client.status();
    EXPECT_EQ((*client)->Apply(InPlaceCall(0)).code(), absl::StatusCode::kUnavailable);
  }
}

// Such a call was known to nobody between two rounds: the client ended, and the call used it later.
TEST_F(ClientTest, TheEndCancelsACallThatPausesBetweenTwoRounds) {
  server_.apply = [](auto&, auto&, auto*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone"); };
  server_.Start();
  auto client = Client::Connect({.replicas = {.targets = {server_.target()}}, .retry = {.attempts = 1}});
  ASSERT_TRUE(client.ok()) << client.status();
  ApplyCall call = InPlaceCall(0);
  call.on_failure = OnFailure::kRetry;
  std::atomic<int> done = 0;
  absl::Status outcome;
  (*client)->ApplyAsync(call, [&](absl::Status status, const CallReport&) {
    outcome = std::move(status);
    ++done;
  });
  while (server_.requests().size() < 3) absl::SleepFor(absl::Milliseconds(1));
  client->reset();
  EXPECT_EQ(done, 1);
  EXPECT_EQ(outcome.code(), absl::StatusCode::kCancelled) << outcome;
}

TEST_F(ClientTest, TheEndCancelsACallThatMayBeSkipped) {
  server_.apply = [](grpc::ServerContext& context, auto&, auto*) {
    while (!context.IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::CANCELLED;
  };
  auto client = ConnectOrDie();
  ASSERT_NE(client, nullptr);
  ApplyCall call = InPlaceCall(0);
  call.on_failure = OnFailure::kSkip;
  std::future<absl::Status> outcome = client->ApplyFuture(call);
  while (server_.requests().empty()) absl::SleepFor(absl::Milliseconds(1));
  client.reset();
  EXPECT_EQ(outcome.get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(history_.length(), 0);
}

TEST_F(ClientTest, ACallIsCutToWhatTheSmallestServerTakes) {
  FakeServer small;
  small.model.mutable_limits()->set_max_call_tokens(8);
  server_.Start();
  small.Start();
  auto client = Client::Connect({.replicas = {.targets = {server_.target(), small.target()}}});
  ASSERT_TRUE(client.ok()) << client.status();
  const auto serving = [&] {
    int count = 0;
    for (const ReplicaStatus& replica : (*client)->Replicas()) count += replica.state == ReplicaState::kServing ? 1 : 0;
    return count;
  };
  while (serving() < 2) absl::SleepFor(absl::Milliseconds(1));
  const std::vector<int32_t> ids(40, 5);
  std::string highway(size_t{40} * 32, 'i');
  ApplyCall call;
  call.sequences = {SequenceRun{.history = &history_, .token_ids = ids}};
  call.layers = {LayerRun{.layer_id = 1, .highway = highway, .out = absl::MakeSpan(highway)}};
  ASSERT_TRUE((*client)->Apply(call).ok());
  for (FakeServer* server : {&server_, &small}) {
    for (const v1::ApplyRequest& request : server->requests()) EXPECT_LE(request.sequences(0).token_ids_size(), 8);
  }
}

TEST_F(ClientTest, ADigestThatDiffersNamesBoth) {
  server_.Start();
  const std::string mine(64, 'a');
  const absl::Status status = Connect(mine).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(status), "DIGEST_MISMATCH");
  EXPECT_THAT(std::string(status.message()), HasSubstr(mine));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1111111111111111"));
  EXPECT_TRUE(Connect(std::string(32, '\x11')).ok()) << "raw bytes";
  EXPECT_TRUE(Connect(std::string(64, '1')).ok()) << "hex";
  EXPECT_EQ(Connect("abc").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientTest, AModelThatCannotBeIsRefusedAtConnect) {
  server_.model.mutable_geometry()->set_dim(int64_t{1} << 60);
  server_.Start();
  const absl::Status status = Connect().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("geometry.dim"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(server_.target()));
}

TEST_F(ClientTest, NobodyThereIsOneErrorThatNamesTargetAndCause) {
  const absl::Status status =
      Client::Connect({.replicas = {.targets = {server_.target()}, .connect_timeout = absl::Milliseconds(300)}})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(server_.target()));
  EXPECT_THAT(std::string(status.message()), HasSubstr("No such file"));
}

TEST_F(ClientTest, AServerThatStartsLateIsWaitedFor) {
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(300));
    server_.Start();
  });
  EXPECT_TRUE(Connect().ok());
  late.join();
}

TEST_F(ClientTest, AServerThatAcceptsAndSaysNothingIsToldApart) {
  server_.get_model = [](grpc::ServerContext& context) {
    while (!context.IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
    return grpc::Status::OK;
  };
  server_.Start();
  const absl::Status status =
      Client::Connect({.replicas = {.targets = {server_.target()}, .connect_timeout = absl::Milliseconds(300)}})
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("GetModel was not answered"));
}

TEST(ClientTarget, RefusesWhatIsNoAddress) {
  for (const char* target : {"", "localhost", "localhost:", "localhost:99999", "unix:", ":8001"}) {
    EXPECT_EQ(Client::Connect({.replicas = {.targets = {target}}}).status().code(), absl::StatusCode::kInvalidArgument)
        << target;
  }
}

}  // namespace
}  // namespace engram::client
