// The way to a real server over its socket: unary calls and streams of one connection. Used by one thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/api_model/walk.h"
#include "tests/e2e/rpc.h"

namespace engram {

class NetworkDriver final : public ApiDriver {
 public:
  explicit NetworkDriver(const std::string& address) : rpc_(address) {}
  ~NetworkDriver() override;

  std::vector<Reply> Run(const std::vector<Planned>& calls) override;
  void EndStream(uint64_t stream, const std::string& ticket) override;

  // One call by itself.
  Reply Unary(const v1::StreamRequest& request);

  e2e::Rpc& rpc() { return rpc_; }

 private:
  struct OpenStream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::StreamRequest, v1::StreamResponse>> calls;
  };
  OpenStream& StreamOf(uint64_t stream);

  e2e::Rpc rpc_;
  std::map<uint64_t, std::unique_ptr<OpenStream>> streams_;
  uint64_t next_id_ = 1;
};

}  // namespace engram
