// Where workers fetch their regions: a plain unix stream socket, since gRPC carries no file descriptors.
//
// A client connects and sends its token, 32 bytes and nothing else. It receives one byte: 1 with the region's
// descriptor (SCM_RIGHTS), 2 and the 64 bytes of a handle for a region on the device, or 0 where there is no memory for
// it. The connection then stays open and silent for as long as the client wants the region; its end, or any byte on it,
// drops the region. Whatever else comes in is answered by closing: a token that is unknown, used or too old, more
// bytes, or fewer for too long. No answer tells these apart.
//
// Whoever may connect is decided by the file: its mode is 0660 less the process's umask, so with the usual 022 the
// server's own user alone, and with 007 its group too. Others never.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/regions/region_store.h"

namespace engram {

struct RegionListenerOptions {
  std::string path;
  // Connections that have not shown a token: beyond, the oldest one goes. An honest client sends it at once.
  size_t max_waiting = 64;
  absl::Duration token_timeout = absl::Seconds(5);
};

// One thread, which also makes the regions and gives their memory back: a large one keeps other openers waiting, and
// no call.
class RegionListener {
 public:
  // A socket left behind at the path by a server that is gone is replaced; anything else there is an error that names
  // it. `store` outlives the listener.
  static absl::StatusOr<std::unique_ptr<RegionListener>> Start(const RegionListenerOptions& options,
                                                               RegionStore& store);

  // Drops every region that came by it, and removes the socket.
  ~RegionListener();

  RegionListener(const RegionListener&) = delete;
  RegionListener& operator=(const RegionListener&) = delete;

 private:
  struct Connection {
    int fd = -1;
    absl::Time until = absl::InfiniteFuture();  // to show its token
    std::string token;                          // what came of it so far
    std::string region;                         // its id; empty: not claimed yet
  };

  RegionListener(const RegionListenerOptions& options, RegionStore& store, int listening, int wake);

  void Run();
  void Accept();
  // False: the connection is over.
  bool Read(Connection& connection);
  bool Answer(Connection& connection);
  void Close(const Connection& connection);

  const RegionListenerOptions options_;
  RegionStore& store_;
  const int listening_;
  const int wake_;                               // an eventfd: the end
  absl::Time accept_at_ = absl::InfinitePast();  // no descriptors left: not before
  std::vector<Connection> connections_;          // the oldest first
  std::thread thread_;
};

}  // namespace engram
