// A real server, clients of it, and what a call of both layers reads and writes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/engram_client.h"
#include "client/highway_update.h"
#include "gtest/gtest.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::client {

inline const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
inline constexpr int64_t kDim = 64;
inline constexpr int64_t kCopies = 4;
inline constexpr int64_t kValues = kDim * kCopies;
inline constexpr int64_t kColumns = 24;
inline constexpr int32_t kLayers[] = {1, 14};

inline std::vector<int32_t> Tokens(int64_t count, int32_t seed = 3) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * 37 + seed * 101) % 512));
  return tokens;
}

// What a call of both layers reads and writes.
struct Tensors {
  Tensors(int64_t tokens, HighwayDtype dtype, int64_t first = 0) {
    for (int l = 0; l < 2; ++l) {
      highway[l] = e2e::HighwayOf(5 + l, first, tokens, kValues, WireDtype(dtype));
      out[l] = std::string(highway[l].size(), 'o');
      kv[l] = std::string(static_cast<size_t>(tokens * (kValues + kDim) * 2), 'o');
      gates[l] = std::vector<float>(static_cast<size_t>(tokens * kCopies), 77);
      value[l] = std::vector<uint16_t>(static_cast<size_t>(tokens * kDim), 77);
    }
  }

  std::vector<LayerRun> Layers(Form form) {
    std::vector<LayerRun> layers;
    for (int l = 0; l < 2; ++l) {
      LayerRun layer{.layer_id = kLayers[l]};
      if (form != Form::kKv) layer.highway = highway[l];
      if (form == Form::kHighway || form == Form::kAuto) layer.out = absl::MakeSpan(out[l]);
      if (form == Form::kKv) layer.out = absl::MakeSpan(kv[l]);
      if (form == Form::kUpdate || form == Form::kGate) layer.gates = absl::MakeSpan(gates[l]);
      if (form == Form::kUpdate) layer.value = absl::MakeSpan(value[l]);
      layers.push_back(layer);
    }
    return layers;
  }

  // Everything a call may have written.
  std::string All() const {
    std::string all;
    for (int l = 0; l < 2; ++l) {
      all += out[l] + kv[l];
      all.append(reinterpret_cast<const char*>(gates[l].data()), gates[l].size() * 4);
      all.append(reinterpret_cast<const char*>(value[l].data()), value[l].size() * 2);
    }
    return all;
  }

  // gates and value added to the highway.
  std::string Updated(int l, HighwayDtype dtype, const std::vector<uint8_t>& mask) const {
    std::string result(highway[l].size(), ' ');
    HighwayUpdate update{.dtype = dtype, .tokens = static_cast<int64_t>(gates[l].size()) / kCopies};
    update.hc = kCopies;
    update.dim = kDim;
    update.gates = gates[l].data();
    update.value = value[l].data();
    if (!mask.empty()) update.token_mask = mask.data();
    update.highway = highway[l].data();
    update.out = result.data();
    UpdateHighway(update);
    return result;
  }

  std::string highway[2], out[2], kv[2];
  std::vector<float> gates[2];
  std::vector<uint16_t> value[2];
};

class ClientCallsTest : public testing::Test {
 protected:
  void SetUp() override { server_ = Start({"--max-batch-tokens", "8", "--ticket-ttl-ms", "60000"}); }

  static std::unique_ptr<e2e::ServerProcess> Start(const std::vector<std::string>& args) {
    auto server = e2e::ServerProcess::Start(kTiny, args);
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }

  static std::unique_ptr<Client> Connect(const std::string& target, int64_t stripe_bytes = 0,
                                         int64_t max_message_bytes = 64 << 20) {
    auto client = Client::Connect(
        {.replicas = {.targets = {target}, .max_message_bytes = max_message_bytes}, .stripe_bytes = stripe_bytes});
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  static std::unique_ptr<Client> Connect(const e2e::ServerProcess& server) { return Connect(server.unix_address()); }

  // An Apply of both layers that must succeed.
  static Tensors Apply(Client& client, Form form, std::vector<SequenceRun> sequences, int64_t tokens,
                       HighwayDtype dtype = HighwayDtype::kF32, CallReport* report = nullptr) {
    Tensors tensors(tokens, dtype);
    ApplyCall call;
    call.sequences = std::move(sequences);
    call.form = form;
    call.dtype = dtype;
    call.layers = tensors.Layers(form);
    const absl::Status status = client.Apply(call, report);
    EXPECT_TRUE(status.ok()) << status;
    return tensors;
  }

  std::unique_ptr<e2e::ServerProcess> server_;
};

}  // namespace engram::client
