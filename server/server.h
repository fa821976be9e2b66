// The composition root: builds every part in the order of the data's flow, and owns them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/options.h"

namespace engram {

class Server {
 public:
  // Loads the model and serves. The error is one line for a person. `broken` is called at most once, on any thread,
  // when the backend can compute no more in this process (Backend::health) and health says NOT_SERVING; it must not
  // block.
  static absl::StatusOr<std::unique_ptr<Server>> BuildAndStart(const ServerOptions& options,
                                                               std::function<void()> broken);

  // Opens the model as BuildAndStart would, and serves nothing.
  static absl::Status CheckConfig(const ServerOptions& options);

  virtual ~Server() = default;

  // Where calls are taken, and where metrics are ("" when off).
  virtual std::vector<std::string> addresses() const = 0;
  virtual std::string http_address() const = 0;
  // Where workers fetch shared memory, "unix:/path"; "" when off.
  virtual std::string shm_address() const = 0;

  // Leaves service without failing a call: health says NOT_SERVING and replies carry `engram-draining`, while calls are
  // served for the drain delay; then GOAWAY, and calls in flight have the drain timeout. Blocks until all that is over.
  virtual void Drain() = 0;

  // Drain() without the delay: what could be served meanwhile?
  virtual void DrainNow() = 0;
};

}  // namespace engram
