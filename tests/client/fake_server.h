// An EngramService in this process, on a unix socket in a directory of its own, that answers as a test tells it to.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engram/v1/engram.grpc.pb.h"
#include "grpcpp/server.h"
#include "grpcpp/server_context.h"

namespace engram::client {

// As it comes: SampleModelResponse(), and Apply answers with right sizes, every byte 'r'. Set the members before the
// first call; they run on gRPC's threads.
class FakeServer final : public v1::EngramService::Service {
 public:
  FakeServer();
  ~FakeServer() override;

  void Start();
  void Stop();  // as if killed: calls under way are cut off; Start brings it back at the same place
  void StartTcp(const std::string& host);  // instead of Start: on a free port; target() is "host:port" from then on

  const std::string& target() const { return target_; }  // "unix:/..."
  std::vector<v1::ApplyRequest> requests();              // that Apply received so far

  v1::GetModelResponse model;
  std::function<grpc::Status(grpc::ServerContext&)> get_model;
  std::function<grpc::Status(grpc::ServerContext&, const v1::ApplyRequest&, v1::ApplyResponse*)> apply;

 private:
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        v1::GetModelResponse* response) override;
  grpc::Status Apply(grpc::ServerContext* context, const v1::ApplyRequest* request,
                     v1::ApplyResponse* response) override;

  void Listen(const std::string& address);

  std::string directory_;
  std::string target_;
  std::mutex mutex_;
  std::vector<v1::ApplyRequest> requests_;  // under mutex_
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace engram::client
