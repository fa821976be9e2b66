// A request as it arrived: bytes in gRPC's slices, of which the small part is parsed as protobuf and the tensors are
// copied once, straight to where the step reads them.
//
// The wire stays ordinary protobuf: the same bytes parse to the same request, with the same merging and the same
// refusals of malformed ones (tests/transport/arrived_message_test.cc compares the two). Fields that this server's
// proto does not have are left out before anything is parsed, and elements of lists are counted first, so that a
// message costs about its own size in memory, not twenty times as much.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "google/protobuf/message.h"

namespace engram {

// What a request's lists may hold. Beyond, elements are counted and not parsed.
struct ListLimits {
  int64_t layers = 0;  // of an ApplyRequest: those of the model
  int64_t others = 0;  // sequences, tickets, sessions: tokens of a call
};

// Not thread-safe. May outlive the buffer it was made of.
class ArrivedMessage {
 public:
  explicit ArrivedMessage(const grpc::ByteBuffer& buffer);

  // Of the whole message.
  int64_t bytes() const { return bytes_; }

  // Fills `small`, one of the service's requests, with everything but LayerInput.highway. Called once.
  // CANCELLED where there is no message: the call ended before its message came. Refusals: MALFORMED; TOO_MANY_TOKENS,
  // LAYER_UNKNOWN or MESSAGE_BYTES for a list beyond the limits, or more than a million fields.
  absl::Status Parse(const ListLimits& limits, google::protobuf::Message& small);

  // For each of the ApplyRequest's layers, the length of its highway; empty for any other request.
  const std::vector<int64_t>& highway_bytes() const { return highway_bytes_; }

  // Copies the highway of layers[index], highway_bytes()[index] of them.
  void CopyHighway(size_t index, uint8_t* to) const;

 private:
  friend class MessageScan;

  // Where a highway begins.
  struct Place {
    size_t slice = 0;
    size_t offset = 0;
  };

  bool came_ = false;
  std::vector<grpc::Slice> slices_;
  int64_t bytes_ = 0;
  std::vector<Place> highways_;
  std::vector<int64_t> highway_bytes_;
};

}  // namespace engram
