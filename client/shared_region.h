// Memory shared with one server on this host (docs/shared-memory.md): highways in it are updated where they lie, and
// only offsets travel.
//
//   auto region = client->OpenRegion({.bytes = layers * tokens * model.HighwayTokenBytes(dtype)});
//   if (!region.ok()) return region.status();   // REGIONS_OFF, another host, ...: go on without
//   call.region = region->get();
//   call.layers = {{.layer_id = 1, .highway = part, .out = part}};   // part of (*region)->memory()
//
// The memory is the caller's to divide, and zeros at first. It is the server's as well: while a call is under way its
// spans are left alone, and a call that ended without an answer (DEADLINE_EXCEEDED, UNAVAILABLE without a reason) may
// be computed still, as may the other parts of a cut call of which one failed. The region is spoiled then: calls with
// it are FAILED_PRECONDITION, and another one is to be opened. Such a call is not repeated by the library either, in
// place it could be applied twice; a refusal with a reason (QUEUE_FULL, DRAINING) is, as RetryOptions say. A server
// that has restarted knows no region of before: REGION.
//
// A worker on the server's GPU asks for a region on the device. The library opens no CUDA: the worker gives
// ipc_handle() to cudaIpcOpenMemHandle on the GPU of device_uuid(), and says with MapAt() where that put it. Its stream
// must have written a highway before the call is made, and may read the result when the call has returned. It closes
// its mapping before the region goes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace engram::client {

struct RegionOptions {
  int64_t bytes = 0;  // >= 1
  // On the server's GPU: REGIONS_OFF where it shares none of that.
  bool on_device = false;
  // Which of the client's servers, as Replicas() names it: one on this host. Empty: any.
  std::string replica = {};
  // Where the server's socket is here, if not at the path that the server gives (another container's mounts).
  std::string socket = {};
  absl::Duration timeout = absl::Seconds(30);
};

// What OpenRegion's answer is good for.
struct RegionClaim {
  std::string token;
  std::string id;
  std::string socket;
  int64_t bytes = 0;
  std::string replica;
  bool on_device = false;
  std::string device_uuid;
};

// Thread-safe but for the memory, which is the caller's. Outlives the calls that borrow it; need not outlive the
// client.
class SharedRegion {
 public:
  // Presents the token and maps what comes. Blocks, `timeout` at the most.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Fetch(const RegionClaim& claim, absl::Duration timeout);

  // Ends the region: the server forgets it.
  ~SharedRegion();

  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Page-aligned; at least as long as was asked for. On the device: its address there, empty before MapAt().
  absl::Span<char> memory() const { return {data_, data_ == nullptr ? 0 : bytes_}; }

  // Of a region on the device: 64 bytes for cudaIpcOpenMemHandle, and the 16 of the GPU's UUID. Empty for others.
  const std::string& ipc_handle() const { return ipc_handle_; }
  const std::string& device_uuid() const { return device_uuid_; }
  // Where the handle was opened in this process. Once, before any call with the region. Of a region on the device.
  void MapAt(void* data) { data_ = static_cast<char*>(data); }

  const std::string& id() const { return id_; }
  const std::string& replica() const { return replica_; }  // that calls with it go to

  // Of bytes that all lie in the memory; those of an empty span do.
  std::optional<uint64_t> OffsetOf(absl::Span<const char> bytes) const;

  // FAILED_PRECONDITION once it is spoiled.
  absl::Status Usable() const;
  // For the library: a call's end is not known.
  void Spoil() const { spoiled_.store(true); }

 private:
  SharedRegion(const RegionClaim& claim, int connection, char* data, std::string ipc_handle)
      : id_(claim.id),
        replica_(claim.replica),
        device_uuid_(claim.device_uuid),
        ipc_handle_(std::move(ipc_handle)),
        connection_(connection),
        data_(data),
        bytes_(static_cast<size_t>(claim.bytes)) {}

  const std::string id_;
  const std::string replica_;
  const std::string device_uuid_, ipc_handle_;
  const int connection_;  // the region lives as long as it
  char* data_;
  const size_t bytes_;
  mutable std::atomic<bool> spoiled_{false};
};

}  // namespace engram::client
