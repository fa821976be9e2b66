// What a reply must hold, computed one token at a time from the model's own tables: the yardstick of every bit.
//
// The arithmetic is the server's kernels', run on a batch of one token. That kv and gates of any batch are these bits
// is the promise under test; that the kernels are right is tests/kernels' business.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "engram/v1/engram.pb.h"
#include "kernels/kernels.h"
#include "server/engine/call.h"
#include "server/engine/step.h"
#include "server/model/engram_model.h"

namespace engram {

struct PlainToken {
  std::vector<int64_t> ids;  // [layers of the model][columns], -1 = a row of zeros
  bool live = true;          // token_mask
};

// The form asked for, and of it the range of columns or outputs.
struct PlainForm {
  Form form = Form::kHighway;
  kernels::HighwayType type = kernels::HighwayType::kF32;
  OutputSlice slice;
};

// Not thread-safe.
class PlainCompute {
 public:
  explicit PlainCompute(std::shared_ptr<const EngramModel> model);

  const EngramModel& model() const { return *model_; }
  const StepShape& shape() const { return shape_; }

  // Of the token at the end of a window of N compressed ids, oldest first.
  PlainToken TokenAt(absl::Span<const int32_t> window, bool live);

  // Appends what one layer (an index) answers for one token. `highway`: the token's, empty where the form reads none.
  // kPrepare appends the value.
  void Append(const PlainToken& token, int layer, const PlainForm& form, absl::string_view highway,
              v1::LayerOutput& output);

 private:
  using Kv = std::vector<kernels::Bf16>;
  const Kv& KvOf(const PlainToken& token, int layer);
  void AppendGate(const PlainToken& token, int layer, const PlainForm& form, absl::string_view highway,
                  v1::LayerOutput& output);
  void AppendRows(const int64_t* ids, int layer, const PlainForm& form, std::string& rows);

  const std::shared_ptr<const EngramModel> model_;
  const StepShape shape_;
  kernels::Workers workers_{1};
  std::map<std::vector<int32_t>, std::vector<int64_t>> ids_;  // by window
  std::map<std::pair<int, std::vector<int64_t>>, Kv> kv_;     // by layer and its ids
};

}  // namespace engram
