// A channel to one server that carries RPCs of bytes (sender.h).
#pragma once

#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "client/sender.h"
#include "grpcpp/channel.h"
#include "grpcpp/generic/generic_stub.h"

namespace engram::client {

class OneConnection {
 public:
  OneConnection(std::shared_ptr<grpc::Channel> channel, std::string target);

  // Cancels what is under way and waits for its end. A channel must not end on one of gRPC's own threads, which would
  // wait for itself: so no call outlives its connection, and this is not for a `done` to run.
  ~OneConnection();

  // Whoever the call names, it goes here: a reply's replica is `target`. An error of gRPC's own names it too.
  // Thread-safe; `done` runs on a thread of gRPC's.
  void Send(RawCall raw, absl::AnyInvocable<void(RawReply)> done);

 private:
  struct Call;
  struct UnderWay;

  const std::string target_;
  const std::shared_ptr<UnderWay> under_way_;
  grpc::GenericStub stub_;
};

}  // namespace engram::client
