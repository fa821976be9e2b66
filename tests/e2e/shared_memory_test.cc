// Workers that share memory with a real server process, byte by byte, honest and not.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"
#include "tests/regions/region_socket.h"

namespace engram::e2e {
namespace {

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
constexpr int64_t kValues = 256;  // hc * dim
constexpr int32_t kLayers[] = {1, 14};

// A region as a worker has it that knows the proto and nothing else.
struct Worker {
  RegionSocket socket;
  v1::OpenRegionResponse grant;
  char* memory = nullptr;

  explicit Worker(const v1::OpenRegionResponse& given) : socket(given.socket()), grant(given) {
    int fd = -1;
    if (!socket.Send(grant.token()) || socket.Receive(&fd) != 1) return;
    void* data = ::mmap(nullptr, static_cast<size_t>(grant.bytes()), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data != MAP_FAILED) memory = static_cast<char*>(data);
    ::close(fd);
  }
  ~Worker() {
    if (memory != nullptr) ::munmap(memory, static_cast<size_t>(grant.bytes()));
  }
};

class SharedMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override { Start({}); }

  void Start(std::vector<std::string> args) {
    args.insert(args.end(), {"--shm-listen", "unix:" + dir_.path() + "/m", "--max-batch-tokens", "4"});
    server_.reset();
    auto server = ServerProcess::Start(kTiny, args);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
  }

  grpc::Status Open(int64_t bytes, v1::OpenRegionResponse* response, Rpc* rpc = nullptr) {
    grpc::ClientContext context;
    v1::OpenRegionRequest request;
    request.set_bytes(bytes);
    return (rpc == nullptr ? *rpc_ : *rpc).stub().OpenRegion(&context, request, response);
  }

  std::unique_ptr<Worker> OpenWorker(int64_t bytes = 1 << 20) {
    v1::OpenRegionResponse grant;
    const grpc::Status status = Open(bytes, &grant);
    EXPECT_TRUE(status.ok()) << status.error_message();
    auto worker = std::make_unique<Worker>(grant);
    EXPECT_NE(worker->memory, nullptr);
    return worker;
  }

  // A call of both layers, its highways in the message.
  static v1::ApplyRequest Request(int64_t tokens, v1::Form form, v1::HighwayDtype dtype, bool masked = false) {
    v1::ApplyRequest request;
    Seq seq;
    for (int64_t t = 0; t < tokens; ++t) {
      seq.tokens.push_back(static_cast<int32_t>(t * 37 % 512));
      if (masked) seq.mask.push_back(t % 3 == 1 ? 0 : 1);
    }
    AddSequence(request, seq);
    request.set_form(form);
    request.set_highway_dtype(dtype);
    for (const int32_t layer : kLayers) {
      v1::LayerInput& input = *request.add_layers();
      input.set_layer_id(layer);
      input.set_highway(HighwayOf(layer, 0, tokens, kValues, dtype));
    }
    return request;
  }

  // The same with its highways in the worker's region, one layer after the other; results in place or after them.
  static v1::ApplyRequest Moved(const v1::ApplyRequest& request, const Worker& worker, bool in_place) {
    v1::ApplyRequest moved = request;
    moved.set_region(worker.grant.region());
    uint64_t at = 0;
    for (v1::LayerInput& layer : *moved.mutable_layers()) {
      const size_t bytes = layer.highway().size();
      std::memcpy(worker.memory + at, layer.highway().data(), bytes);
      layer.clear_highway();
      layer.mutable_highway_in_region()->set_offset(at);
      layer.mutable_highway_in_region()->set_bytes(bytes);
      if (request.form() == v1::FORM_HIGHWAY) {
        layer.mutable_out_in_region()->set_offset(in_place ? at : at + 2 * bytes);
        layer.mutable_out_in_region()->set_bytes(bytes);
      }
      at += bytes;
    }
    return moved;
  }

  static std::string OutOf(const v1::ApplyRequest& moved, int layer, const Worker& worker) {
    const v1::RegionSpan& out = moved.layers(layer).out_in_region();
    return {worker.memory + out.offset(), out.bytes()};
  }

  const TempDir dir_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
};

TEST_F(SharedMemoryTest, EveryFormGivesTheBitsOfTheMessage) {
  const auto worker = OpenWorker();
  for (const v1::HighwayDtype dtype : {v1::HIGHWAY_DTYPE_F32, v1::HIGHWAY_DTYPE_BF16}) {
    for (const v1::Form form : {v1::FORM_HIGHWAY, v1::FORM_UPDATE, v1::FORM_GATE}) {
      for (const bool in_place : {false, true}) {
        const v1::ApplyRequest request = Request(11, form, dtype, /*masked=*/true);
        const Answer expected = rpc_->Apply(request);
        ASSERT_TRUE(expected.status.ok()) << expected.status.error_message();
        const v1::ApplyRequest moved = Moved(request, *worker, in_place);
        const Answer answer = rpc_->Apply(moved);
        ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
        for (int l = 0; l < 2; ++l) {
          EXPECT_EQ(answer.response.layers(l).highway(), "");
          EXPECT_EQ(answer.response.layers(l).gates(), expected.response.layers(l).gates());
          EXPECT_EQ(answer.response.layers(l).value(), expected.response.layers(l).value());
          if (form != v1::FORM_HIGHWAY) continue;
          EXPECT_EQ(OutOf(moved, l, *worker), expected.response.layers(l).highway());
          if (in_place) continue;
          const v1::RegionSpan& in = moved.layers(l).highway_in_region();
          EXPECT_EQ(std::string(worker->memory + in.offset(), in.bytes()), request.layers(l).highway());
        }
      }
    }
  }
}

TEST_F(SharedMemoryTest, APartialCallLeavesRefusedTokensAsTheyAre) {
  const auto worker = OpenWorker();
  v1::ApplyRequest request = Request(3, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
  AddSequence(request, {"", 9, {1, 2}, {}, {}});  // no look-back
  AddSequence(request, {"", 0, {7, 8}, {}, {}});
  request.set_partial_ok(true);
  for (v1::LayerInput& layer : *request.mutable_layers()) {
    layer.set_highway(HighwayOf(layer.layer_id(), 0, 7, kValues, v1::HIGHWAY_DTYPE_F32));
  }
  const Answer expected = rpc_->Apply(request);
  ASSERT_TRUE(expected.status.ok()) << expected.status.error_message();
  const v1::ApplyRequest moved = Moved(request, *worker, /*in_place=*/true);
  const Answer answer = rpc_->Apply(moved);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_TRUE(answer.response.sequences(1).has_refused());
  const size_t token = kValues * 4;
  for (int l = 0; l < 2; ++l) {
    const std::string out = OutOf(moved, l, *worker);
    EXPECT_EQ(out.substr(0, 3 * token) + out.substr(5 * token), expected.response.layers(l).highway());
    EXPECT_EQ(out.substr(3 * token, 2 * token), request.layers(l).highway().substr(3 * token, 2 * token));
  }
}

TEST_F(SharedMemoryTest, ByTicketAndOnAStream) {
  const auto worker = OpenWorker();
  const v1::ApplyRequest request = Request(6, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
  const Answer expected = rpc_->Apply(request);
  v1::PrepareRequest prepare;
  *prepare.mutable_sequences() = request.sequences();
  for (const int32_t layer : kLayers) prepare.add_layer_ids(layer);
  v1::PrepareResponse prepared;
  grpc::ClientContext prepare_context;
  ASSERT_TRUE(rpc_->stub().Prepare(&prepare_context, prepare, &prepared).ok());
  v1::ApplyRequest moved = Moved(request, *worker, /*in_place=*/true);
  moved.clear_sequences();
  moved.set_ticket(prepared.ticket());
  ASSERT_TRUE(rpc_->Apply(moved).status.ok());
  for (int l = 0; l < 2; ++l) EXPECT_EQ(OutOf(moved, l, *worker), expected.response.layers(l).highway());

  moved = Moved(request, *worker, /*in_place=*/false);
  grpc::ClientContext context;
  auto stream = rpc_->stub().Stream(&context);
  v1::StreamRequest message;
  *message.mutable_apply() = moved;
  ASSERT_TRUE(stream->Write(message));
  v1::StreamResponse reply;
  for (int l = 0; l < 2; ++l) {
    ASSERT_TRUE(stream->Read(&reply));
    ASSERT_TRUE(reply.has_layer()) << reply.error().message();
    EXPECT_EQ(reply.layer().highway(), "");
    EXPECT_EQ(OutOf(moved, l, *worker), expected.response.layers(l).highway());
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(SharedMemoryTest, ATokenIsGoodOnceAndWhatIsNoneIsAnsweredByClosing) {
  const auto worker = OpenWorker();
  for (const std::string& token :
       {worker->grant.token(), std::string(32, 'x'), worker->grant.region(), std::string()}) {
    RegionSocket other(worker->grant.socket());
    ASSERT_TRUE(other.connected());
    other.Send(token);
    ::shutdown(other.fd(), SHUT_WR);
    EXPECT_TRUE(other.ClosedByServer());
  }
  EXPECT_TRUE(rpc_->Apply(Moved(Request(1, v1::FORM_GATE, v1::HIGHWAY_DTYPE_F32), *worker, true)).status.ok());
}

TEST_F(SharedMemoryTest, RegionsThatAreNotThereAreRefusedInOneWayWithoutTheirSizes) {
  auto worker = OpenWorker(1 << 20);
  v1::ApplyRequest moved = Moved(Request(2, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32), *worker, true);
  v1::ApplyRequest outside = moved;
  outside.mutable_layers(0)->mutable_highway_in_region()->set_offset(~uint64_t{0} - 3);
  const Answer span = rpc_->Apply(outside);
  EXPECT_EQ(span.error.reason(), "REGION_SPAN");
  EXPECT_EQ(span.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(span.status.error_message().find(absl::StrCat(1 << 20)), std::string::npos);
  v1::ApplyRequest unknown = moved;
  unknown.set_region(std::string(16, 'x'));
  const Answer never = rpc_->Apply(unknown);
  EXPECT_EQ(never.error.reason(), "REGION");
  EXPECT_EQ(never.status.error_code(), grpc::StatusCode::NOT_FOUND);
  v1::OpenRegionResponse unclaimed;
  ASSERT_TRUE(Open(1, &unclaimed).ok());
  unknown.set_region(unclaimed.region());
  EXPECT_EQ(rpc_->Apply(unknown).status.error_message(), never.status.error_message());
  worker.reset();
  ASSERT_TRUE(AwaitMetric(server_->metrics_address(), "engram_shm_regions", 0));
  EXPECT_EQ(rpc_->Apply(moved).status.error_message(), never.status.error_message());
}

TEST_F(SharedMemoryTest, MoreThanThereIsIsRefused) {
  Start({"--shm-memory-bytes", "1MiB"});
  v1::OpenRegionResponse grant;
  EXPECT_EQ(ReasonOf(Open((1 << 20) + 1, &grant)), "REGION_SPAN");
  EXPECT_EQ(ReasonOf(Open(0, &grant)), "REGION_SPAN");
  EXPECT_EQ(ReasonOf(Open(-1, &grant)), "REGION_SPAN");
  auto worker = OpenWorker(1 << 20);
  EXPECT_EQ(ReasonOf(Open(1, &grant)), "REGION_FULL");
  worker.reset();
  ASSERT_TRUE(AwaitMetric(server_->metrics_address(), "engram_shm_bytes", 0));
  EXPECT_TRUE(Open(1, &grant).ok());
}

TEST_F(SharedMemoryTest, AServerWithoutTheFlagSharesNone) {
  auto server = ServerProcess::Start(kTiny);
  ASSERT_TRUE(server.ok()) << server.status();
  Rpc rpc((*server)->unix_address());
  v1::OpenRegionResponse grant;
  const grpc::Status status = Open(1, &grant, &rpc);
  EXPECT_EQ(ReasonOf(status), "REGIONS_OFF");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

// The child makes system calls only: it is forked from a process with threads.
TEST_F(SharedMemoryTest, AWorkerThatIsKilledLeavesNothing) {
  v1::OpenRegionResponse grant;
  ASSERT_TRUE(Open(8 << 20, &grant).ok());
  const std::string path = grant.socket(), token = grant.token();
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RegionSocket socket(path);
    int fd = -1;
    char got = 0;
    if (socket.Send(token) && socket.Receive(&fd) == 1) {
      auto* data = static_cast<char*>(::mmap(nullptr, 8 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
      std::memset(data, 1, 8 << 20);
      got = 1;
    }
    if (::write(ready[1], &got, 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char got = 0;
  ASSERT_EQ(::read(ready[0], &got, 1), 1);
  EXPECT_EQ(got, 1);
  EXPECT_EQ(MetricOf(server_->metrics_address(), "engram_shm_regions"), 1);
  EXPECT_EQ(MetricOf(server_->metrics_address(), "engram_shm_bytes"), 8 << 20);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_TRUE(AwaitMetric(server_->metrics_address(), "engram_shm_regions", 0));
  EXPECT_TRUE(AwaitMetric(server_->metrics_address(), "engram_shm_bytes", 0));
}

// Whatever stands there, at any moment: offsets come from messages alone.
TEST_F(SharedMemoryTest, AWorkerThatScribblesHarmsOnlyItself) {
  const auto scribbler = OpenWorker();
  const auto honest = OpenWorker();
  const v1::ApplyRequest request = Request(16, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
  const Answer expected = rpc_->Apply(request);
  const v1::ApplyRequest garbled = Moved(request, *scribbler, true);
  std::atomic<bool> stop{false};
  std::thread scribbles([&] {
    for (uint64_t word = 1; !stop.load();) {
      for (int64_t i = 0; i + 8 <= scribbler->grant.bytes(); i += 8) {
        word = word * 6364136223846793005u + 1442695040888963407u;  // NaNs and infinities among them
        std::memcpy(scribbler->memory + i, &word, 8);
      }
    }
  });
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(rpc_->Apply(garbled).status.ok());
    const v1::ApplyRequest moved = Moved(request, *honest, true);
    ASSERT_TRUE(rpc_->Apply(moved).status.ok());
    for (int l = 0; l < 2; ++l) ASSERT_EQ(OutOf(moved, l, *honest), expected.response.layers(l).highway());
  }
  stop = true;
  scribbles.join();
}

// The region ends while its calls are in the queue and under way: they end well, or find it gone.
TEST_F(SharedMemoryTest, CallsUnderWayOutliveTheConnection) {
  const v1::ApplyRequest request = Request(64, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
  const Answer expected = rpc_->Apply(request);
  int served = 0;
  for (int round = 0; round < 10; ++round) {
    auto worker = OpenWorker();
    const v1::ApplyRequest moved = Moved(request, *worker, false);
    grpc::ClientContext context;
    auto stream = rpc_->stub().Stream(&context);
    v1::StreamRequest message;
    *message.mutable_apply() = moved;
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(stream->Write(message));
    v1::StreamResponse reply;
    int answered = 0;
    while (answered < 8 && stream->Read(&reply)) {
      if (answered == 0 && worker->socket.fd() >= 0) worker->socket.Close();
      if (!reply.last()) continue;
      ++answered;
      if (reply.has_error()) {
        EXPECT_EQ(reply.error().code(), static_cast<int>(grpc::StatusCode::NOT_FOUND)) << reply.error().message();
      } else {
        ++served;
      }
    }
    EXPECT_EQ(answered, 8);
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_GE(served, 10);
  EXPECT_TRUE(AwaitMetric(server_->metrics_address(), "engram_shm_bytes", 0));
  EXPECT_EQ(rpc_->Apply(request).response.layers(0).highway(), expected.response.layers(0).highway());
}

TEST_F(SharedMemoryTest, TheStopOfTheServerIsSeenByTheWorkerAndTheSocketGoes) {
  const auto worker = OpenWorker();
  EXPECT_EQ(server_->Stop(SIGTERM), 0);
  EXPECT_TRUE(worker->socket.ClosedByServer());
  EXPECT_NE(::access(worker->grant.socket().c_str(), F_OK), 0);
  std::memset(worker->memory, 1, 4096);  // the worker's mapping stays good
}

TEST_F(SharedMemoryTest, TwoListenersNeverShareAPath) {
  const auto twice = ServerProcess::Start(kTiny, {"--shm-listen", server_->unix_address()});
  EXPECT_NE(twice.status().message().find("--shm-listen " + server_->unix_address()), std::string::npos)
      << twice.status();
  const std::string path = "unix:" + dir_.path() + "/both";
  const auto both = ServerProcess::Start(kTiny, {"--listen", path, "--shm-listen", path});
  EXPECT_NE(both.status().message().find("given more than once"), std::string::npos) << both.status();
}

}  // namespace
}  // namespace engram::e2e
