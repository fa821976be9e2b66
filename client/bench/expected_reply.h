// Replies compared with what they should hold.
//
// Rows are the same bits everywhere. So are kv, gates and highways where the server's numerics_id is that of whoever
// computed what is expected; else they may differ by what docs/numerics.md allows two twins, and the gate by what such
// a difference of keys makes of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/bench/step.h"
#include "client/model_info.h"
#include "engram/v1/engram.pb.h"

namespace engram::bench {

// The tensors of one layer as bytes of the wire; empty where the form has none.
struct ExpectedLayer {
  int32_t layer_id = 0;
  std::string out;    // the form's own: highway, kv or rows
  std::string gates;  // [T, hc] f32
  std::string value;  // [T, dim] bf16
  std::string kv;     // [T, (hc + 1) * dim] bf16, where tolerances follow from it; whatever the form
};

// What a step sent and what its answer is compared by.
struct ReplyRules {
  const client::ModelInfo* model = nullptr;
  client::HighwayDtype dtype = client::HighwayDtype::kF32;
  bool same_numerics = true;
  std::vector<const char*> highways;  // of each layer, [T, hc, dim] of dtype; null where the form sends none
};

// Empty where the reply is right; else where it is wrong first, in one line: session (or number of the sequence),
// position, layer, tensor and element, what came and what was expected.
std::string FirstMismatch(const ReplyRules& rules, const Step& step, const std::vector<ExpectedLayer>& expected,
                          const google::protobuf::RepeatedPtrField<v1::LayerOutput>& reply);

}  // namespace engram::bench
