#include "client/bench/echo_server.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engram/v1/engram.grpc.pb.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

namespace engram::bench {
namespace {

constexpr int64_t kMostReplyBytes = int64_t{1} << 31;

// What answers are made of beyond their request. Written once, so that no page of it is the kernel's zero page.
constexpr size_t kFillerBytes = size_t{8} << 20;

const std::vector<char>& Filler() {
  static const auto* filler = new std::vector<char>(kFillerBytes, '\x5a');
  return *filler;
}

// The last 8 bytes; -1 where there are not as many.
int64_t AskedBytes(const std::vector<grpc::Slice>& slices) {
  std::array<unsigned char, 8> tail{};
  size_t found = 0;
  for (auto slice = slices.rbegin(); slice != slices.rend() && found < tail.size(); ++slice) {
    for (size_t i = slice->size(); i > 0 && found < tail.size(); --i)
      tail[tail.size() - ++found] = slice->begin()[i - 1];
  }
  int64_t bytes = 0;
  std::memcpy(&bytes, tail.data(), sizeof bytes);
  return found == tail.size() ? bytes : -1;
}

class EchoService final : public v1::EngramService::WithRawCallbackMethod_Apply<v1::EngramService::Service> {
  grpc::ServerUnaryReactor* Apply(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    std::vector<grpc::Slice> slices;
    int64_t left = request->Dump(&slices).ok() ? AskedBytes(slices) : -1;
    if (left < 0 || left > kMostReplyBytes) {
      reactor->Finish({grpc::StatusCode::INVALID_ARGUMENT,
                       absl::StrCat("the last 8 bytes ask for ", left, " bytes, expected [0, ", kMostReplyBytes, "]")});
      return reactor;
    }
    std::vector<grpc::Slice> answer;
    for (const grpc::Slice& slice : slices) {
      if (left == 0) break;
      const size_t some = std::min(slice.size(), static_cast<size_t>(left));
      answer.push_back(some == slice.size() ? slice : slice.sub(0, some));
      left -= static_cast<int64_t>(some);
    }
    while (left > 0) {
      const size_t some = std::min(Filler().size(), static_cast<size_t>(left));
      answer.emplace_back(Filler().data(), some, grpc::Slice::STATIC_SLICE);
      left -= static_cast<int64_t>(some);
    }
    *response = grpc::ByteBuffer(answer.data(), answer.size());
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

int RunEchoServer(const std::string& address) {
  const auto server = EchoServer::Start(address);
  if (!server.ok()) {
    std::fprintf(stderr, "engram-bench: %s\n", std::string(server.status().message()).c_str());
    return kExitError;
  }
  std::printf("listening on %s\n", (*server)->address().c_str());
  std::fflush(stdout);
  // Whoever started it holds the other end of stdin, and is gone when that ends.
  char ignored[256];
  while (::read(STDIN_FILENO, ignored, sizeof ignored) > 0) {
  }
  return kExitOk;
}

}  // namespace

struct EchoServer::Parts {
  EchoService service;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer() : parts_(std::make_unique<Parts>()) {}

EchoServer::~EchoServer() {
  if (parts_->server != nullptr) parts_->server->Shutdown();
}

absl::StatusOr<std::unique_ptr<EchoServer>> EchoServer::Start(const std::string& address) {
  std::unique_ptr<EchoServer> echo(new EchoServer);
  Filler();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&echo->parts_->service);
  echo->parts_->server = builder.BuildAndStart();
  if (echo->parts_->server == nullptr || port <= 0) {
    return absl::UnavailableError(absl::StrCat("echo-server: cannot listen on ", address));
  }
  echo->address_ =
      absl::StartsWith(address, "unix:") ? address : absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
  return echo;
}

Command AddEchoServerCommand(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "echo-server",
      "Answer raw messages with as many bytes as they ask for, until stdin ends: what --baseline echo "
      "compares with; for --echo-target on another machine");
  auto address = std::make_shared<std::string>("127.0.0.1:0");
  command->add_option("--listen", *address, "host:port (0: a free one) or unix:/path")
      ->type_name("ADDR")
      ->capture_default_str();
  command->group("");  // the bench starts it itself
  return {command, [address] { return RunEchoServer(*address); }};
}

}  // namespace engram::bench
