// Keeps gRPC's callback threads awake.
//
// Those of gRPC 1.51 wait for an event for 1 s and then sleep for 100 ms, in which nobody looks: on a quiet server
// every tenth call or so would wait up to 100 ms for its handler. An event every 400 ms always finds one of the (at
// least two) threads awake, and keeps it so.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <thread>

#include "absl/synchronization/notification.h"

namespace engram {

// Asks the server for its own health, in process, until it is destroyed; which must be before the server's shutdown.
class Heartbeat {
 public:
  explicit Heartbeat(grpc::Server& server);
  ~Heartbeat();

 private:
  void Run();

  const std::shared_ptr<grpc::Channel> channel_;
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace engram
