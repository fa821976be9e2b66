// Where calls come in: addresses, their rules, and the gRPC server behind them.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/transport/heartbeat.h"

namespace engram {

struct ListenerOptions {
  std::vector<std::string> addresses;  // "host:port" (port 0: any free one) or "unix:/path"; at least one
  bool insecure = false;               // allow plaintext beyond loopback
  int64_t max_message_bytes = int64_t{64} << 20;
  // Of all messages that are arriving: beyond, gRPC resets the streams they arrive on.
  int64_t max_arriving_bytes = int64_t{1} << 30;
  // A connection older than that is closed with GOAWAY: the client opens a new one, which a balancer may send
  // elsewhere, so that load spreads to servers that came later. gRPC adds or takes up to a tenth. Zero: never.
  absl::Duration max_connection_age = absl::ZeroDuration();
  // Calls and streams on it may go on that long.
  absl::Duration max_connection_age_grace = absl::Seconds(60);
};

// Streams (calls) at a time on one connection; more of them wait at the client.
inline constexpr int kMaxConcurrentStreams = 1024;
// Of a call's headers. An id, a trace context and a token of some KiB fit.
inline constexpr int kMaxMetadataBytes = 16 << 10;

// Room in a message for what is not payload: ids, masks, names, field headers.
inline constexpr int64_t kEnvelopeBytes = int64_t{1} << 20;

// "host:port" or "unix:/path" in order? A refusal names the address. Plaintext is for loopback and unix sockets unless
// `insecure`.
absl::Status CheckAddress(const std::string& address, bool insecure);

// Can each address be listened on? Binds and lets go again, so that a server finds out before it loads a model; the
// refusal names the address and the system's reason. An address given twice is refused too.
absl::Status CheckFree(const std::vector<std::string>& addresses);

// Serves `service`, the standard health service and reflection on every address. Ready when Start() returns.
class Listeners {
 public:
  // `service` outlives the listeners.
  static absl::StatusOr<std::unique_ptr<Listeners>> Start(const ListenerOptions& options, grpc::Service& service);

  // As asked for, with the port that was chosen in place of 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // What the health service answers.
  void SetServing(bool serving);

  // Sends GOAWAY, waits for calls in flight, and cancels those that are left after `timeout`.
  void Shutdown(absl::Duration timeout);

 private:
  Listeners() = default;

  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Heartbeat> heartbeat_;
};

}  // namespace engram
