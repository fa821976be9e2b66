#include "tests/client/fake_server.h"

#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <system_error>

#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {

FakeServer::FakeServer() : model(SampleModelResponse()) {
  std::string pattern = (std::filesystem::temp_directory_path() / "engram-client-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) ADD_FAILURE() << "no temporary directory " << pattern;
  directory_ = pattern;
  target_ = "unix:" + directory_ + "/s";
}

FakeServer::~FakeServer() {
  Stop();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

void FakeServer::Start() { Listen(target_); }

void FakeServer::StartTcp(const std::string& host) {
  target_ = host + ":0";
  Listen(target_);
}

void FakeServer::Listen(const std::string& address) {
  grpc::ServerBuilder builder;
  int port = 0;
  // Two servers on one port would share its calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(64 << 20);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  ASSERT_NE(server_, nullptr);
  if (address.back() == '0' && address[address.size() - 2] == ':') {
    target_ = address.substr(0, address.size() - 1) + std::to_string(port);
  }
}

void FakeServer::Stop() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  server_ = nullptr;
}

std::vector<v1::ApplyRequest> FakeServer::requests() {
  std::lock_guard<std::mutex> lock(mutex_);
  return requests_;
}

grpc::Status FakeServer::GetModel(grpc::ServerContext* context, const v1::GetModelRequest*,
                                  v1::GetModelResponse* response) {
  *response = model;
  return get_model ? get_model(*context) : grpc::Status::OK;
}

grpc::Status FakeServer::Apply(grpc::ServerContext* context, const v1::ApplyRequest* request,
                               v1::ApplyResponse* response) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    requests_.push_back(*request);
  }
  const ModelInfo info = SampleModel();
  int64_t tokens = 0;
  for (const auto& sequence : request->sequences()) tokens += sequence.token_ids_size();
  for (const auto& layer : request->layers()) {
    v1::LayerOutput* output = response->add_layers();
    output->set_layer_id(layer.layer_id());
    if (request->form() == v1::FORM_KV) {
      output->set_kv(std::string(tokens * info.KvTokenBytes(), 'r'));
    } else {
      output->set_highway(std::string(layer.highway().size(), 'r'));
    }
  }
  response->set_server_epoch(model.server_epoch());
  return apply ? apply(*context, *request, response) : grpc::Status::OK;
}

}  // namespace engram::client
