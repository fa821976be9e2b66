#include "server/transport/heartbeat.h"

#include <grpcpp/generic/generic_stub.h>

#include <chrono>

#include "absl/time/time.h"

namespace engram {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(400);

}  // namespace

Heartbeat::Heartbeat(grpc::Server& server)
    : channel_(server.InProcessChannel(grpc::ChannelArguments())), thread_([this] { Run(); }) {}

Heartbeat::~Heartbeat() {
  stop_.Notify();
  thread_.join();
}

void Heartbeat::Run() {
  grpc::GenericStub stub(channel_);
  grpc::CompletionQueue queue;
  while (!stop_.WaitForNotificationWithTimeout(kInterval)) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
    grpc::Slice nothing;
    const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", {&nothing, 1}, &queue);
    grpc::ByteBuffer answer;
    grpc::Status status;
    call->StartCall();
    call->Finish(&answer, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);  // whatever it says: that it was handled is enough
  }
  queue.Shutdown();
}

}  // namespace engram
