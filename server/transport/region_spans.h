// The region of an Apply: which one it is, and where in it each layer's highway is read and written.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "engram/v1/engram.pb.h"
#include "server/engine/call.h"
#include "server/refusal/refusal.h"
#include "server/regions/region_store.h"

namespace engram {

struct RegionLayer {
  const void* highway = nullptr;
  void* out = nullptr;  // null unless the form is HIGHWAY
};

// Kept as long as the call: it pins the memory.
struct RegionHighways {
  std::shared_ptr<Region> region;   // null: highways travel in the message
  std::vector<RegionLayer> layers;  // with a region: in the request's order
};

// What spans are checked against.
struct RegionContext {
  const RegionStore* regions = nullptr;  // null: this server shares no memory
  absl::string_view principal;
  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  int64_t highway_bytes = 0;  // of one layer
};

// With `region` empty no layer may have spans. Else the form reads a highway, no layer has one in the message, and
// every span is of highway_bytes, aligned to a value, within the region; an `out` is its layer's highway itself or
// overlaps no other span of the call. Adds every offender; the result is to be used where there was none.
// `in_message`: of each layer, the bytes of its highway in the message.
RegionHighways ResolveRegion(absl::string_view region, const google::protobuf::RepeatedPtrField<v1::LayerInput>& layers,
                             const std::vector<int64_t>& in_message, const RegionContext& context, Refusals& refusals);

}  // namespace engram
