// A channel to one server, as a Sender.
#pragma once

#include <memory>
#include <string>

#include "client/sender.h"
#include "grpcpp/channel.h"

namespace engram::client {

// Calls go to `channel`, whoever they name; a reply's replica is `target`. An error that is gRPC's own names the
// target. What is under way keeps the channel alive.
Sender SendOver(std::shared_ptr<grpc::Channel> channel, std::string target);

}  // namespace engram::client
