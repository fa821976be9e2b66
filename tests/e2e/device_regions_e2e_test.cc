// Workers that share the memory of a server's device, through the client library and byte by byte.
//
// The module is one that needs no GPU, and its memory can be opened in its own process alone. So the server is in this
// process wherever a worker looks into a region; that another process can, only a GPU shows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/error_details.h"
#include "server/engine/cuda_module.h"
#include "server/regions/region.h"
#include "server/server.h"
#include "tests/client/calls_through_a_server.h"
#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"
#include "tests/regions/region_socket.h"

namespace engram::client {
namespace {

using e2e::AwaitMetric;
using e2e::MetricOf;
using e2e::ServerProcess;
using testing::HasSubstr;

class DeviceRegionsTest : public ClientCallsTest {
 protected:
  static constexpr int64_t kMost = 4 * kDeviceBlockBytes;

  void SetUp() override {
    ::setenv("SIMT_DEVICE_BYTES", "268435456", 1);
    ServerOptions options;
    options.model = kTiny;
    options.listen = {"unix:" + dir_.path() + "/s"};
    options.http_listen = "127.0.0.1:0";
    options.shm_listen = "unix:" + dir_.path() + "/m";
    options.backend = BackendKind::kCuda;
    options.cuda_module = ENGRAM_CUDA_TEST_MODULE;
    options.max_batch_tokens = 8;
    options.prepare_memory_bytes = 4 << 20;
    options.device_region_bytes = kMost;
    auto server = Server::BuildAndStart(options, [] {});
    ASSERT_TRUE(server.ok()) << server.status();
    in_process_ = *std::move(server);
    client_ = Connect(options.listen.front());
    auto device = CudaDevice::Open(options.cuda_module, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *device;
  }

  void TearDown() override {
    client_.reset();
    if (in_process_ != nullptr) in_process_->DrainNow();
  }

  std::string metrics() const { return in_process_->http_address(); }

  // As cudaIpcOpenMemHandle does it.
  char* Opened(const std::string& handle) const {
    void* memory = nullptr;
    EXPECT_EQ(handle.size(), static_cast<size_t>(kDeviceHandleBytes));
    EXPECT_EQ(device_->module().open_memory(reinterpret_cast<const uint8_t*>(handle.data()), &memory), 0);
    return static_cast<char*>(memory);
  }

  std::unique_ptr<SharedRegion> Open(int64_t bytes) {
    auto region = client_->OpenRegion({.bytes = bytes, .on_device = true});
    EXPECT_TRUE(region.ok()) << region.status();
    if (!region.ok()) return nullptr;
    EXPECT_TRUE((*region)->memory().empty()) << "nobody has said where it is";
    (*region)->MapAt(Opened((*region)->ipc_handle()));
    return *std::move(region);
  }

  void Copy(char* to, const char* from, size_t bytes) const {
    CUstream_st* stream = nullptr;
    ASSERT_EQ(device_->module().create_stream(&stream), 0);
    EXPECT_EQ(device_->module().copy(to, from, static_cast<int64_t>(bytes), stream), 0);
    EXPECT_EQ(device_->module().wait_stream(stream), 0);
    EXPECT_EQ(device_->module().destroy_stream(stream), 0);
  }

  const e2e::TempDir dir_;
  std::unique_ptr<Server> in_process_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<const CudaDevice> device_;
};

TEST_F(DeviceRegionsTest, EveryFormGivesTheBitsOfAnOrdinaryCall) {
  const auto region = Open(1 << 20);
  ASSERT_NE(region, nullptr);
  constexpr int64_t kTokens = 9;  // two batches
  const std::vector<int32_t> ids = Tokens(kTokens);
  std::vector<uint8_t> mask(kTokens, 1);
  mask[5] = mask[8] = 0;
  for (const HighwayDtype dtype : {HighwayDtype::kF32, HighwayDtype::kBf16}) {
    for (const Form form : {Form::kHighway, Form::kAuto, Form::kUpdate, Form::kGate}) {
      const Tensors expected = Apply(*client_, form, {{.token_ids = ids, .token_mask = mask}}, kTokens, dtype);
      for (const bool in_place : {false, true}) {
        ApplyCall call;
        call.sequences = {{.token_ids = ids, .token_mask = mask}};
        call.form = form;
        call.dtype = dtype;
        call.region = region.get();
        Tensors tensors(kTokens, dtype);
        call.layers = tensors.Layers(form);
        const size_t bytes = tensors.highway[0].size();
        for (size_t l = 0; l < 2; ++l) {
          const absl::Span<char> in = region->memory().subspan(l * bytes, bytes);
          Copy(in.data(), tensors.highway[l].data(), bytes);
          call.layers[l].highway = in;
          if (call.layers[l].out.empty()) continue;
          call.layers[l].out = in_place ? in : region->memory().subspan((2 + l) * bytes, bytes);
        }
        const absl::Status status = client_->Apply(call);
        ASSERT_TRUE(status.ok()) << status;
        for (size_t l = 0; l < 2; ++l) {
          if (!call.layers[l].out.empty()) Copy(tensors.out[l].data(), call.layers[l].out.data(), bytes);
        }
        EXPECT_EQ(tensors.All(), expected.All());
      }
    }
  }
}

TEST_F(DeviceRegionsTest, AWorkerLearnsWhichDeviceAndTheOperatorHowMuch) {
  auto region = Open(kDeviceBlockBytes + 1);
  ASSERT_NE(region, nullptr);
  const auto& uuid = device_->info().uuid;
  EXPECT_EQ(region->device_uuid(), std::string(reinterpret_cast<const char*>(uuid), sizeof uuid));
  EXPECT_EQ(region->memory().size(), static_cast<size_t>(2 * kDeviceBlockBytes));
  EXPECT_EQ(MetricOf(metrics(), "engram_shm_regions"), 1);
  EXPECT_EQ(MetricOf(metrics(), "engram_shm_device_bytes"), 2 * kDeviceBlockBytes);
  EXPECT_EQ(MetricOf(metrics(), "engram_shm_bytes"), 0);
  EXPECT_EQ(MetricOf(metrics(), "engram_gpu_memory_bytes{kind=\"device_regions\"}"), kMost);
  const auto on_host = client_->OpenRegion({.bytes = 1});
  ASSERT_TRUE(on_host.ok()) << on_host.status();
  EXPECT_EQ((*on_host)->device_uuid(), "");
  region.reset();
  EXPECT_TRUE(AwaitMetric(metrics(), "engram_shm_device_bytes", 0));
}

TEST_F(DeviceRegionsTest, TheFlagBoundsThemAll) {
  const auto refused = [this](int64_t bytes) {
    return ErrorReason(client_->OpenRegion({.bytes = bytes, .on_device = true}).status());
  };
  EXPECT_EQ(refused(kMost + 1), "REGION_SPAN");
  EXPECT_EQ(refused(0), "REGION_SPAN");
  const auto first = Open(kMost - 1);
  EXPECT_EQ(refused(1), "REGION_FULL");
}

TEST_F(DeviceRegionsTest, ADeviceThatIsFullSaysSoAndIsAskedAgain) {
  const auto free_bytes = device_->FreeBytes();
  ASSERT_TRUE(free_bytes.ok()) << free_bytes.status();
  void* another = nullptr;
  ASSERT_EQ(device_->module().allocate(*free_bytes - kDeviceBlockBytes, &another), 0);
  const auto full = client_->OpenRegion({.bytes = 2 * kDeviceBlockBytes, .on_device = true});
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted) << full.status();
  EXPECT_THAT(std::string(full.status().message()), HasSubstr("no device memory"));
  ASSERT_EQ(device_->module().free(another), 0);
  EXPECT_NE(Open(kMost), nullptr) << "what did not come is not counted";
}

// The region ends while its calls are in the queue and under way: they end well, or find it gone. Memory that is freed
// under a step's feet is AddressSanitizer's to find.
TEST_F(DeviceRegionsTest, CallsUnderWayOutliveTheConnection) {
  e2e::Rpc rpc(in_process_->addresses().front());
  constexpr int64_t kTokens = 16;  // two batches
  v1::ApplyRequest request;
  e2e::AddSequence(request, {"", 0, Tokens(kTokens), {}, {}});
  request.set_form(v1::FORM_HIGHWAY);
  request.set_highway_dtype(v1::HIGHWAY_DTYPE_F32);
  uint64_t at = 0;
  for (const int32_t layer_id : kLayers) {
    v1::LayerInput& layer = *request.add_layers();
    layer.set_layer_id(layer_id);
    for (v1::RegionSpan* span : {layer.mutable_highway_in_region(), layer.mutable_out_in_region()}) {
      span->set_offset(at);
      span->set_bytes(kTokens * kValues * 4);
    }
    at += kTokens * kValues * 4;
  }
  int served = 0;
  for (int round = 0; round < 4; ++round) {
    v1::OpenRegionRequest open;
    open.set_bytes(kDeviceBlockBytes);
    open.set_on_device(true);
    v1::OpenRegionResponse grant;
    grpc::ClientContext opening;
    ASSERT_TRUE(rpc.stub().OpenRegion(&opening, open, &grant).ok());
    RegionSocket worker(grant.socket());
    ASSERT_TRUE(worker.Send(grant.token()));
    int fd = -1;
    ASSERT_EQ(worker.Receive(&fd), 2);
    std::string handle(kDeviceHandleBytes, '\0');
    ASSERT_EQ(::recv(worker.fd(), handle.data(), handle.size(), MSG_WAITALL), kDeviceHandleBytes);
    EXPECT_NE(Opened(handle), nullptr);

    request.set_region(grant.region());
    grpc::ClientContext context;
    auto stream = rpc.stub().Stream(&context);
    v1::StreamRequest message;
    *message.mutable_apply() = request;
    for (int i = 0; i < 4; ++i) ASSERT_TRUE(stream->Write(message));
    v1::StreamResponse reply;
    int answered = 0;
    while (answered < 4 && stream->Read(&reply)) {
      if (answered == 0) worker.Close();
      if (!reply.last()) continue;
      ++answered;
      if (!reply.has_error()) ++served;
      if (reply.has_error()) {
        EXPECT_EQ(reply.error().code(), static_cast<int>(grpc::StatusCode::NOT_FOUND)) << reply.error().message();
      }
    }
    EXPECT_EQ(answered, 4);
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_GE(served, 4);
  EXPECT_TRUE(AwaitMetric(metrics(), "engram_shm_device_bytes", 0));
}

class DeviceRegionsStartTest : public ClientCallsTest {
 protected:
  void SetUp() override {}

  absl::StatusOr<std::unique_ptr<ServerProcess>> Sharing(std::vector<std::string> args) {
    args.insert(args.end(), {"--shm-listen", "unix:" + dir_.path() + "/m", "--max-batch-tokens", "8"});
    args.insert(args.end(), {"--prepare-memory-bytes", "4MiB", "--cuda-module", ENGRAM_CUDA_TEST_MODULE});
    return ServerProcess::Start(kTiny, args);
  }

  const e2e::TempDir dir_;
};

TEST_F(DeviceRegionsStartTest, AServerWithoutThemRefusesByNameAndSharesTheHostsMemoryAllTheSame) {
  for (const char* backend : {"cpu", "cuda"}) {
    const auto server = Sharing({"--backend", backend});
    ASSERT_TRUE(server.ok()) << server.status();
    const auto client = Connect(**server);
    const absl::Status refused = client->OpenRegion({.bytes = 1, .on_device = true}).status();
    EXPECT_EQ(ErrorReason(refused), "REGIONS_OFF") << refused;
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("--device-region-bytes"));
    EXPECT_TRUE(client->OpenRegion({.bytes = 1}).ok());
  }
}

TEST_F(DeviceRegionsStartTest, AutoThatComesToTheCpuSaysThatThereAreNone) {
  ::setenv("SIMT_DRIVER", "0", 1);
  const auto server = Sharing({"--backend", "auto", "--device-region-bytes", "2MiB"});
  ::unsetenv("SIMT_DRIVER");
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT((*server)->Log(), HasSubstr("no device regions"));
  EXPECT_EQ(ErrorReason(Connect(**server)->OpenRegion({.bytes = 1, .on_device = true}).status()), "REGIONS_OFF");
}

TEST_F(DeviceRegionsStartTest, ADeviceThatExportsNoMemoryIsOneLineAtTheStart) {
  ::setenv("SIMT_IPC", "0", 1);
  const auto server = Sharing({"--backend", "cuda", "--device-region-bytes", "2MiB"});
  const auto without = Sharing({"--backend", "cuda"});
  ::unsetenv("SIMT_IPC");
  EXPECT_THAT(std::string(server.status().message()),
              HasSubstr("--device-region-bytes 2097152: the device shares no memory with other processes: cuda "
                        "export_memory: operation not supported"));
  EXPECT_TRUE(without.ok()) << without.status();
}

}  // namespace
}  // namespace engram::client
