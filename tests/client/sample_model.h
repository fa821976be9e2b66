// A small GetModel reply that a client accepts; tests spoil one field of it.
#pragma once

#include "client/model_info.h"
#include "engram/v1/engram.pb.h"

namespace engram::client {

// dim 4, hc 2, 4-grams, vocab 100, layers 1 and 14, 64 tokens a call.
v1::GetModelResponse SampleModelResponse();
ModelInfo SampleModel();

}  // namespace engram::client
