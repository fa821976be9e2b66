// What becomes of a part's tokens in the caller's memory, once the whole call is decided.
#pragma once

#include <vector>

#include "client/call_plan.h"
#include "client/checked_call.h"
#include "client/model_info.h"
#include "client/reply_reader.h"

namespace engram::client {

// Copies the payloads to their places, or adds the update to the highway where the call's form is kAuto by UPDATE. The
// reply has passed CheckReply. Sequences in `refused` (one flag per sequence of the call) are left untouched, those
// that this part served too.
void LandPart(const ModelInfo& model, const CheckedCall& call, const Part& part, const Reply& reply,
              const std::vector<bool>& refused);

// As if the engram were not there: the highway copied, gates and value 0. For the forms that can say so.
void SkipPart(const ModelInfo& model, const CheckedCall& call, const Part& part, const std::vector<bool>& refused);

}  // namespace engram::client
