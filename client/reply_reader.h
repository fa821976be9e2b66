// A reply message as it came: where its payloads lie, found without copying one, checked against what was asked for,
// and then copied into the caller's memory once.
//
// The bytes are hostile until checked: lengths never pass the message, nothing is allocated by a length that was only
// claimed, and what does not fit is INTERNAL, naming field, value and bound.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/call_plan.h"
#include "client/checked_call.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"

namespace engram::client {

// Bytes [offset, offset + bytes) of the message.
struct PayloadPlace {
  int64_t offset = 0;
  int64_t bytes = 0;
};

// By the payload's field number in LayerOutput, 2..6; absent ones are empty.
struct ReplyLayer {
  int32_t layer_id = 0;
  std::array<PayloadPlace, 7> payloads = {};
};

class Reply {
 public:
  // The message of `method` that answers `part`, whose layers and sequences it cannot outnumber. Unknown fields are
  // passed over; a known one twice, of another wire type, or longer than what holds it is refused.
  static absl::StatusOr<Reply> Parse(Method method, const Part& part, grpc::ByteBuffer body);

  const std::vector<ReplyLayer>& layers() const { return layers_; }
  const std::vector<absl::Status>& sequences() const { return sequences_; }  // OK = served
  const std::string& ticket() const { return ticket_; }
  uint64_t server_epoch() const { return server_epoch_; }

  // The range must lie in the message.
  void Copy(int64_t offset, int64_t bytes, char* out) const;
  // Null where it crosses two of the slices that the message came in.
  const char* Contiguous(int64_t offset, int64_t bytes) const;

 private:
  friend class ReplyParser;

  // The slice that holds the byte at `offset`.
  size_t SliceAt(int64_t offset) const;

  std::vector<grpc::Slice> slices_;
  std::vector<int64_t> starts_;  // of each slice in the message
  std::vector<ReplyLayer> layers_;
  std::vector<absl::Status> sequences_;
  std::string ticket_;
  uint64_t server_epoch_ = 0;
};

// Whether this is an answer to the part: its layers in its order, every payload as long as the tokens served ask for.
absl::Status CheckReply(const CheckedCall& call, const Part& part, const Reply& reply);

}  // namespace engram::client
