// The Stream RPC: order, bits, tickets that end with it, back pressure, and clients that go away.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
constexpr int64_t kValues = 256;

class StreamTest : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& args = {}) {
    auto server = ServerProcess::Start(kTiny, args);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    ASSERT_GT(rpc_->Model().layers_size(), 0);
    Open();
  }

  void Open() {
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream_ = rpc_->stub().Stream(context_.get());
  }

  static v1::ApplyRequest ApplyOf(const Seq& seq, v1::Form form) {
    v1::ApplyRequest request;
    request.set_form(form);
    AddSequence(request, seq);
    const auto tokens = static_cast<int64_t>(seq.tokens.size());
    for (const int32_t layer : {14, 1}) {
      v1::LayerInput& input = *request.add_layers();
      input.set_layer_id(layer);
      if (form != v1::FORM_KV) input.set_highway(HighwayOf(1, 0, tokens, kValues, v1::HIGHWAY_DTYPE_F32));
    }
    return request;
  }

  v1::StreamResponse Next() {
    v1::StreamResponse response;
    EXPECT_TRUE(stream_->Read(&response)) << "the stream ended";
    return response;
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StreamRequest, v1::StreamResponse>> stream_;
};

TEST_F(StreamTest, PipelinedRequestsAnswerPerLayerLowerLayersFirstWithUnaryBits) {
  Start({"--max-batch-tokens", "4"});
  constexpr int kRequests = 30;
  std::vector<v1::ApplyRequest> requests;
  for (int i = 0; i < kRequests; ++i) {
    const std::vector<int32_t> tokens(static_cast<size_t>(1 + i % 7), i);
    requests.push_back(ApplyOf({"", 0, tokens, {}, {}}, i % 2 == 0 ? v1::FORM_HIGHWAY : v1::FORM_KV));
  }
  for (int i = 0; i < kRequests; ++i) {
    v1::StreamRequest message;
    message.set_request_id(static_cast<uint64_t>(100 + i));
    *message.mutable_apply() = requests[static_cast<size_t>(i)];
    ASSERT_TRUE(stream_->Write(message));
  }
  stream_->WritesDone();
  std::map<uint64_t, std::vector<v1::LayerOutput>> replies;
  v1::StreamResponse response;
  while (stream_->Read(&response)) {
    ASSERT_TRUE(response.has_layer()) << response.ShortDebugString();
    std::vector<v1::LayerOutput>& layers = replies[response.request_id()];
    layers.push_back(response.layer());
    EXPECT_EQ(response.last(), layers.size() == 2);
  }
  EXPECT_TRUE(stream_->Finish().ok());
  ASSERT_EQ(replies.size(), kRequests);
  for (int i = 0; i < kRequests; ++i) {
    const std::vector<v1::LayerOutput>& layers = replies[static_cast<uint64_t>(100 + i)];
    ASSERT_EQ(layers.size(), 2);
    EXPECT_EQ(layers[0].layer_id(), 1) << "lower layers first, whatever the request's order";
    const Answer unary = rpc_->Apply(requests[static_cast<size_t>(i)]);
    EXPECT_EQ(layers[0].SerializeAsString(), unary.response.layers(1).SerializeAsString());
    EXPECT_EQ(layers[1].SerializeAsString(), unary.response.layers(0).SerializeAsString());
  }
}

TEST_F(StreamTest, CallsOfOneSessionKeepTheirOrder) {
  Start();
  for (int64_t p = 0; p < 50; ++p) {
    v1::StreamRequest message;
    message.set_request_id(static_cast<uint64_t>(p));
    *message.mutable_apply() = ApplyOf({"s", p, {static_cast<int32_t>(p)}, {}, {}}, v1::FORM_KV);
    // PREFILL and DECODE take turns: the later DECODE must not overtake.
    message.mutable_apply()->set_priority(p % 2 == 0 ? v1::PRIORITY_PREFILL : v1::PRIORITY_DECODE);
    ASSERT_TRUE(stream_->Write(message));
  }
  stream_->WritesDone();
  v1::StreamResponse response;
  int last = 0;
  while (stream_->Read(&response)) {
    EXPECT_FALSE(response.has_error()) << response.error().message();
    last += response.last() ? 1 : 0;
  }
  EXPECT_EQ(last, 50);
}

TEST_F(StreamTest, ARefusedRequestIsAnErrorMessageAndTheStreamGoesOn) {
  Start();
  v1::StreamRequest message;
  message.set_request_id(1);
  *message.mutable_apply() = ApplyOf({"", 0, {9999}, {}, {}}, v1::FORM_KV);
  ASSERT_TRUE(stream_->Write(message));
  v1::StreamResponse response = Next();
  ASSERT_TRUE(response.has_error());
  EXPECT_TRUE(response.last());
  EXPECT_EQ(response.error().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(response.error().details_size(), 2);
  message.Clear();
  message.set_request_id(2);
  ASSERT_TRUE(stream_->Write(message));
  EXPECT_EQ(Next().error().code(), grpc::StatusCode::INVALID_ARGUMENT) << "an empty request";
  message.set_request_id(3);
  *message.mutable_apply() = ApplyOf({"", 0, {7}, {}, {}}, v1::FORM_KV);
  ASSERT_TRUE(stream_->Write(message));
  EXPECT_EQ(Next().request_id(), 3);
  EXPECT_TRUE(Next().last());
}

TEST_F(StreamTest, UnknownEnumValuesAreRefusedByName) {
  Start();
  const v1::ApplyRequest good = ApplyOf({"", 0, {7}, {}, {}}, v1::FORM_KV);
  v1::LookupRequest rows;
  *rows.mutable_sequences() = good.sequences();
  rows.add_layer_ids(1);
  v1::PrepareRequest prepare;
  *prepare.mutable_sequences() = good.sequences();
  prepare.add_layer_ids(1);
  std::vector<v1::StreamRequest> messages(5);
  *messages[0].mutable_apply() = ApplyOf({"", 0, {7}, {}, {}}, v1::FORM_HIGHWAY);
  messages[0].mutable_apply()->set_form(static_cast<v1::Form>(99));
  *messages[1].mutable_apply() = good;
  messages[1].mutable_apply()->set_highway_dtype(static_cast<v1::HighwayDtype>(99));
  *messages[2].mutable_apply() = good;
  messages[2].mutable_apply()->set_priority(static_cast<v1::Priority>(99));
  *messages[3].mutable_lookup() = rows;
  messages[3].mutable_lookup()->set_form(static_cast<v1::Form>(99));
  *messages[4].mutable_prepare() = prepare;
  messages[4].mutable_prepare()->set_priority(static_cast<v1::Priority>(99));
  const std::vector<std::string> fields = {"form", "highway_dtype", "priority", "form", "priority"};
  for (size_t i = 0; i < messages.size(); ++i) {
    messages[i].set_request_id(i + 1);
    ASSERT_TRUE(stream_->Write(messages[i]));
    const v1::StreamResponse response = Next();
    EXPECT_EQ(response.request_id(), i + 1);
    ASSERT_TRUE(response.has_error());
    google::rpc::ErrorInfo info;
    for (const google::protobuf::Any& any : response.error().details()) any.UnpackTo(&info);
    EXPECT_EQ(info.reason(), fields[i] == "highway_dtype" ? "DTYPE" : "FORM");
    EXPECT_EQ(info.metadata().at("field"), fields[i]);
    EXPECT_EQ(info.metadata().at("value"), "99");
  }
}

TEST_F(StreamTest, TicketsMadeOnAStreamEndWithIt) {
  Start();
  v1::StreamRequest message;
  v1::ApplyRequest apply = ApplyOf({"", 0, {4, 5}, {}, {}}, v1::FORM_KV);
  *message.mutable_prepare()->add_sequences() = apply.sequences(0);
  message.mutable_prepare()->add_layer_ids(1);
  message.mutable_prepare()->set_return_values(true);
  ASSERT_TRUE(stream_->Write(message));
  const v1::StreamResponse prepared = Next();
  ASSERT_TRUE(prepared.has_prepare()) << prepared.ShortDebugString();
  EXPECT_TRUE(prepared.last());
  EXPECT_EQ(prepared.prepare().layers(0).value().size(), 2 * 64 * 2);
  apply.clear_sequences();
  apply.set_ticket(prepared.prepare().ticket());
  EXPECT_TRUE(rpc_->Apply(apply).status.ok()) << "good on other connections while the stream lives";
  stream_->WritesDone();
  EXPECT_TRUE(stream_->Finish().ok());
  std::string reason;
  for (int i = 0; i < 200 && reason.empty(); ++i) {
    reason = rpc_->Apply(apply).error.reason();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(reason, "TICKET_EXPIRED");
}

// The server's memory, from /proc.
int64_t ResidentKiB(pid_t pid) {
  const Finished status = RunToEnd({"/bin/grep", "VmRSS", "/proc/" + std::to_string(pid) + "/status"});
  return std::stoll(status.out.substr(status.out.find_first_of("0123456789")));
}

TEST_F(StreamTest, AClientThatStopsReadingDoesNotGrowTheServer) {
  Start({"--max-message-bytes", "1MiB"});
  const Seq seq{"", 0, std::vector<int32_t>(500, 3), {}, {}};
  v1::StreamRequest message;
  *message.mutable_apply() = ApplyOf(seq, v1::FORM_KV);  // 640 KB of reply for 2 KB of request
  const int64_t before = ResidentKiB(server_->pid());
  std::thread writer([&] {
    for (uint64_t i = 0; i < 2000; ++i) {
      message.set_request_id(i);
      if (!stream_->Write(message)) break;
    }
    stream_->WritesDone();
  });
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_LT(ResidentKiB(server_->pid()) - before, 64 * 1024) << "1.2 GB of replies are owed";
  EXPECT_TRUE(rpc_->Apply(ApplyOf({"", 0, {1}, {}, {}}, v1::FORM_KV)).status.ok()) << "others are served meanwhile";
  context_->TryCancel();
  writer.join();
}

// A refused request holds its own bytes until its error is taken.
TEST_F(StreamTest, AClientThatReadsNoRefusalsDoesNotGrowTheServer) {
  Start({"--max-message-bytes", "1MiB"});
  v1::StreamRequest message;
  *message.mutable_apply() = ApplyOf({"", 0, {9999}, {}, {}}, v1::FORM_KV);
  message.mutable_apply()->mutable_layers(0)->set_highway(std::string(256 * 1024, 'h'));
  const int64_t before = ResidentKiB(server_->pid());
  std::thread writer([&] {
    for (uint64_t i = 0; i < 4000; ++i) {
      message.set_request_id(i);
      if (!stream_->Write(message)) break;
    }
    stream_->WritesDone();
  });
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_LT(ResidentKiB(server_->pid()) - before, 64 * 1024) << "1 GB of requests is on its way";
  context_->TryCancel();
  writer.join();
}

// A message read as its stream ended began a step that came back to freed memory: the server died within seconds.
TEST_F(StreamTest, StreamsThatEndWhileMessagesArriveDoTheServerNoHarm) {
  Start();
  v1::StreamRequest request;
  *request.mutable_apply() = ApplyOf({"", 0, std::vector<int32_t>(16, 7), {}, {}}, v1::FORM_HIGHWAY);
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
      for (int i = c; std::chrono::steady_clock::now() < end; ++i) {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::microseconds(1000 + 700 * (i % 40)));
        const auto stream = rpc_->stub().Stream(&context);
        for (int n = 0; n < 40 && stream->Write(request); ++n) continue;
        if (i % 2 == 0) context.TryCancel();
        stream->Finish();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(rpc_->Apply(request.apply()).status.ok());
  EXPECT_TRUE(AwaitMetric(server_->metrics_address(), "engram_inflight_requests", 1)) << "the one that Start() opened";
}

TEST_F(StreamTest, AStreamThatVanishesFreesEverything) {
  Start();
  for (int round = 0; round < 20; ++round) {
    Open();
    v1::StreamRequest message;
    *message.mutable_apply() = ApplyOf({"", 0, std::vector<int32_t>(300, 3), {}, {}}, v1::FORM_KV);
    for (int i = 0; i < 10; ++i) stream_->Write(message);
    context_->TryCancel();
    v1::StreamResponse response;
    while (stream_->Read(&response)) {
    }
    stream_->Finish();
  }
  // The whole queue is free again.
  Answer whole;
  for (int i = 0; i < 300 && !whole.response.layers_size(); ++i) {
    whole = rpc_->Apply(ApplyOf({"", 0, std::vector<int32_t>(50000, 1), {}, {}}, v1::FORM_KV));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(whole.status.ok()) << whole.status.error_message();
  EXPECT_EQ(server_->Stop(SIGTERM), 0) << server_->Log();
}

TEST_F(StreamTest, AnIdleStreamDoesNotHoldADrainUp) {
  Start({"--drain-delay-secs", "1", "--drain-timeout-secs", "60"});
  auto end = std::async(std::launch::async, [this] {
    v1::StreamResponse response;
    EXPECT_FALSE(stream_->Read(&response));
    return stream_->Finish();
  });
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(server_->Stop(SIGTERM), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  const grpc::Status status = end.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(status), "DRAINING");
}

}  // namespace
}  // namespace engram::e2e
