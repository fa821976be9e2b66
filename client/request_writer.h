// A part of a call as the bytes of its request message: what protobuf would make of the same fields, in one allocation,
// each tensor copied into it once, straight from the caller's memory.
#pragma once

#include "client/call_plan.h"
#include "client/checked_call.h"
#include "client/model_info.h"
#include "grpcpp/support/byte_buffer.h"

namespace engram::client {

// `by_ids`: not by the part's ticket, but by the tokens that were prepared. model_key is the model's config_digest, so
// that a server restarted with another model refuses the call instead of answering from the wrong tables.
grpc::ByteBuffer WriteRequest(const ModelInfo& model, const CheckedCall& call, const CallPlan& plan, const Part& part,
                              bool by_ids);

}  // namespace engram::client
