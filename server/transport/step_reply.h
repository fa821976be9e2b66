// What a step's results are on their way from the engine to the wire: staging memory, and a message around it.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engram/v1/engram.pb.h"
#include "google/protobuf/message_lite.h"
#include "server/engine/call.h"
#include "server/engine/staging.h"
#include "server/engine/step.h"
#include "server/model/engram_model.h"
#include "server/transport/step_call.h"

namespace engram {

// A tensor: the first `bytes` of its memory.
struct Payload {
  StagingMemory memory;
  int64_t bytes = 0;
};

// A layer's results; those that its form names are set.
struct LayerResult {
  int32_t layer_id = 0;
  int out_field = 0;  // of v1::LayerOutput: highway, kv or rows
  Payload out;
  Payload gates;
  Payload value;
};

// Where a call's results go. Must live until the call is done.
struct StepReply {
  StepCall call;
  std::vector<StagingMemory> highways;  // one per call.layers, or none where the form reads none
  std::vector<LayerResult> results;     // one per call.layers
  std::string ticket;                   // of a Prepare, once it is done
  std::vector<absl::Status> statuses;   // partial_ok: one per sequence, once committed
};

// Takes memory for the results of layers[index], and tells the engine where to read and write. A highway is updated in
// place: `highway`, which is null where the form reads none, becomes `result.out`; one in the call's region is read and
// written there. A Prepare's kv has no place yet.
// Errors: OutOfMemory().
absl::StatusOr<CallLayer> LayOut(const StepCall& call, size_t index, const EngramModel& model, const StepShape& shape,
                                 StagingPool& staging, const StagingMemory& highway, LayerResult& result);

// RESOURCE_EXHAUSTED: the system has no memory for so much, whatever the limits allow.
absl::Status OutOfMemory(int64_t bytes);

// Takes the tokens of refused sequences out of a layer's results.
void DropRefused(const StepCall& call, const std::vector<CallSequence>& sequences, const StepShape& shape,
                 LayerResult& result);

// Composes a message: small fields are copied, tensors are handed to gRPC where they stand and go back to the pool when
// they are sent. Fields in the order of the calls. Not thread-safe; Take() or Nest() ends it.
class ReplyWriter {
 public:
  // All fields that are set in it.
  void Fields(const google::protobuf::MessageLite& fields);
  void Layer(int field, LayerResult result);
  // A message in this one.
  void Nest(int field, ReplyWriter message);

  // So far.
  int64_t bytes() const { return slice_bytes_ + static_cast<int64_t>(small_.size()); }
  grpc::ByteBuffer Take();

 private:
  void Head(int field, int64_t length);
  void Tensor(int field, Payload payload);
  void EndSlice();

  std::string small_;  // that no slice holds yet
  std::vector<grpc::Slice> slices_;
  int64_t slice_bytes_ = 0;
};

// An ApplyResponse, LookupResponse or PrepareResponse, by the call's form. Takes the results.
ReplyWriter WriteReply(StepReply& reply, uint64_t server_epoch);

// `refused` absent where it is OK.
void AddSequenceStatus(const absl::Status& status, v1::SequenceStatus& out);

}  // namespace engram
