#include "server/transport/apply_codec.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/kernels.h"
#include "server/engine/step.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

StepShape ShapeOf(const EngramModel& model) {
  const EngramGeometry& g = model.geometry();
  return {g.max_ngram, g.highway_values(), g.outputs()};
}

std::string AtMost(int64_t bound) { return absl::StrCat("<= ", bound); }

// Adds the refusals of one request; a method per part of the message.
class ApplyDecoder {
 public:
  ApplyDecoder(const v1::ApplyRequest& request, const EngramModel& model, const CallLimits& limits)
      : request_(request), model_(model), limits_(limits) {}

  absl::StatusOr<ApplyCall> Decode() {
    ModelKey();
    FormAndDtype();
    if (!TokenCount()) return refusals_.ToStatus();
    for (int i = 0; i < request_.sequences_size(); ++i) Sequence(i, request_.sequences(i));
    Layers();
    if (refusals_.empty()) ReplyBytes();
    if (!refusals_.empty()) return refusals_.ToStatus();
    return std::move(call_);
  }

 private:
  template <typename Value, typename Bound>
  void Add(Reason reason, std::string field, const Value& value, const Bound& bound, std::string text) {
    refusals_.Add({reason, std::move(field), absl::StrCat(value), absl::StrCat(bound), std::move(text)});
  }

  void ModelKey() {
    const std::string& key = request_.model_key();
    if (key.empty()) return;
    const Digest& digest = model_.config_digest();
    const bool right = key.size() >= 16 && key.size() <= digest.size() &&
                       std::equal(key.begin(), key.end(), digest.begin(),
                                  [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; });
    if (right) return;
    if (key.size() < 16 || key.size() > digest.size()) {
      Add(Reason::kDigestMismatch, "model_key", absl::StrCat(key.size(), " bytes"), "16 to 32 bytes",
          absl::StrCat("a model_key is the first 16 to 32 bytes of a config_digest, this one has ", key.size()));
      return;
    }
    const std::string served = DigestHex(digest);
    Add(Reason::kDigestMismatch, "model_key", absl::BytesToHexString(key), served,
        absl::StrCat("the model served here has config_digest ", served));
  }

  void FormAndDtype() {
    switch (request_.form()) {
      case v1::FORM_UNSPECIFIED:
      case v1::FORM_HIGHWAY:
        call_.form = Form::kHighway;
        break;
      case v1::FORM_KV:
        call_.form = Form::kKv;
        break;
      default:
        Add(Reason::kForm, "form", static_cast<int>(request_.form()), "FORM_HIGHWAY (1) or FORM_KV (2)",
            absl::StrCat("form ", static_cast<int>(request_.form()), " is not served by Apply"));
    }
    switch (request_.highway_dtype()) {
      case v1::HIGHWAY_DTYPE_UNSPECIFIED:
      case v1::HIGHWAY_DTYPE_F32:
        call_.highway_type = kernels::HighwayType::kF32;
        break;
      case v1::HIGHWAY_DTYPE_BF16:
        call_.highway_type = kernels::HighwayType::kBf16;
        break;
      default:
        Add(Reason::kDtype, "highway_dtype", static_cast<int>(request_.highway_dtype()),
            "HIGHWAY_DTYPE_F32 (1) or HIGHWAY_DTYPE_BF16 (2)",
            absl::StrCat("dtype ", static_cast<int>(request_.highway_dtype()), " is not known"));
    }
  }

  // T, which everything else is measured against. False: the call is beyond any further look.
  bool TokenCount() {
    if (request_.sequences().empty()) {
      Add(Reason::kEmptyCall, "sequences", 0, ">= 1", "a call needs at least one sequence");
    }
    if (request_.sequences_size() > limits_.max_call_tokens) {  // each has at least one token, or is refused anyway
      Add(Reason::kTooManyTokens, "sequences", request_.sequences_size(), AtMost(limits_.max_call_tokens),
          absl::StrCat("a call may have ", limits_.max_call_tokens, " tokens, this one has ", request_.sequences_size(),
                       " sequences"));
      return false;
    }
    const auto layers = static_cast<int>(model_.layers().size());
    if (request_.layers_size() > layers) {
      Add(Reason::kLayerUnknown, "layers", request_.layers_size(), AtMost(layers),
          absl::StrCat("the model has ", layers, " engram layers, the call names ", request_.layers_size()));
      return false;
    }
    bool masked = false;
    for (const v1::Sequence& sequence : request_.sequences()) {
      call_.tokens += sequence.token_ids_size();
      masked |= !sequence.token_mask().empty();
    }
    if (call_.tokens > limits_.max_call_tokens) {
      Add(Reason::kTooManyTokens, "sequences", call_.tokens, AtMost(limits_.max_call_tokens),
          absl::StrCat("a call may have ", limits_.max_call_tokens, " tokens, this one has ", call_.tokens));
      return false;
    }
    if (masked) call_.token_mask.reserve(static_cast<size_t>(call_.tokens));
    masked_ = masked;
    return true;
  }

  void Sequence(int index, const v1::Sequence& sequence) {
    const std::string path = absl::StrCat("sequences[", index, "]");
    const int64_t tokens = sequence.token_ids_size();
    SequenceClaim claim;
    claim.session = sequence.session();
    claim.start_pos = sequence.start_pos();
    if (tokens == 0) {
      Add(Reason::kEmptyCall, absl::StrCat(path, ".token_ids"), 0, ">= 1", "a sequence needs at least one token");
    }
    Session(path, sequence.session());
    Position(path, sequence.start_pos(), tokens);
    TokenIds(path, sequence, claim.ids);
    Lookback(path, sequence, claim.lookback);
    call_.claims.push_back(std::move(claim));
  }

  void Session(const std::string& path, const std::string& session) {
    if (session.size() > static_cast<size_t>(limits_.max_session_bytes)) {
      Add(Reason::kSessionLength, absl::StrCat(path, ".session"), session.size(), AtMost(limits_.max_session_bytes),
          absl::StrCat("a session's name has 1 to ", limits_.max_session_bytes, " bytes, this one has ",
                       session.size()));
    }
    if (!session.empty() && !sessions_.insert(session).second) {
      Add(Reason::kDuplicateSession, absl::StrCat(path, ".session"), absl::StrCat(session.size(), " bytes"),
          "each session once", "this session stands in the call more than once");
    }
  }

  void Position(const std::string& path, int64_t start_pos, int64_t tokens) {
    const std::string field = absl::StrCat(path, ".start_pos");
    if (start_pos < 0) {
      Add(Reason::kPositionGap, field, start_pos, ">= 0",
          absl::StrCat("position ", start_pos, " lies before the sequence's start, 0"));
    } else if (start_pos > limits_.position_limit - tokens) {
      Add(Reason::kPositionLimit, field, start_pos, AtMost(limits_.position_limit - tokens),
          absl::StrCat(tokens, " tokens from position ", start_pos, " pass the position limit of ",
                       limits_.position_limit));
    }
  }

  // The compressed id of a token, or kDead with a refusal where there is no such token.
  int32_t Compressed(int32_t token, const std::string& list, int index) {
    const absl::Span<const int32_t> map = model_.token_map();
    if (token < 0 || static_cast<size_t>(token) >= map.size()) {
      Add(Reason::kTokenOutOfRange, absl::StrCat(list, "[", index, "]"), token, absl::StrCat("[0, ", map.size(), ")"),
          absl::StrCat("token id ", token, " is outside [0, ", map.size(), ")"));
      return kernels::kDead;
    }
    return map[static_cast<size_t>(token)];
  }

  void TokenIds(const std::string& path, const v1::Sequence& sequence, std::vector<int32_t>& ids) {
    const int tokens = sequence.token_ids_size();
    const std::string& mask = sequence.token_mask();
    const bool has_mask = !mask.empty();
    if (has_mask && mask.size() != static_cast<size_t>(tokens)) {
      Add(Reason::kTokenMaskLength, absl::StrCat(path, ".token_mask"), mask.size(), tokens,
          absl::StrCat("token_mask has ", mask.size(), " bytes for ", tokens, " tokens"));
      return;
    }
    const std::string list = absl::StrCat(path, ".token_ids");
    ids.reserve(static_cast<size_t>(tokens));
    for (int t = 0; t < tokens; ++t) {
      // A masked token's id is checked too: a bad one is a fault of the caller's all the same.
      const int32_t id = Compressed(sequence.token_ids(t), list, t);
      const bool live = !has_mask || mask[static_cast<size_t>(t)] != 0;
      ids.push_back(live ? id : kernels::kDead);
      if (masked_) call_.token_mask.push_back(live ? 1 : 0);
    }
  }

  void Lookback(const std::string& path, const v1::Sequence& sequence, std::vector<int32_t>& lookback) {
    const int given = sequence.lookback_token_ids_size();
    if (given == 0) return;
    const int before = model_.geometry().max_ngram - 1;
    const std::string list = absl::StrCat(path, ".lookback_token_ids");
    if (given != before) {
      Add(Reason::kLookbackLength, list, given, before,
          absl::StrCat("look-back has exactly ", before, " ids, newest first (-1 = masked or before the start), got ",
                       given));
      return;
    }
    lookback.assign(static_cast<size_t>(before), kernels::kDead);
    for (int j = 0; j < before; ++j) {
      const int32_t token = sequence.lookback_token_ids(j);
      if (token == kernels::kDead) continue;
      if (sequence.start_pos() <= j) {  // position start_pos - 1 - j, which start_pos = INT64_MIN would wrap
        Add(Reason::kTokenOutOfRange, absl::StrCat(list, "[", j, "]"), token, -1,
            absl::StrCat("token id ", token, " stands before the sequence's start: send -1 there"));
        continue;
      }
      lookback[static_cast<size_t>(before - 1 - j)] = Compressed(token, list, j);
    }
  }

  void Layers() {
    if (request_.layers().empty()) {
      Add(Reason::kEmptyCall, "layers", 0, ">= 1", "a call needs at least one layer");
    }
    const absl::Span<const EngramLayer> layers = model_.layers();
    std::vector<bool> named(layers.size(), false);
    for (int i = 0; i < request_.layers_size(); ++i) {
      const v1::LayerInput& input = request_.layers(i);
      const std::string path = absl::StrCat("layers[", i, "]");
      const auto found = std::find_if(layers.begin(), layers.end(), [&input](const EngramLayer& layer) {
        return layer.layer_id == input.layer_id();
      });
      const auto index = static_cast<size_t>(found - layers.begin());
      if (found == layers.end()) {
        const std::string served = LayersServed();
        Add(Reason::kLayerUnknown, absl::StrCat(path, ".layer_id"), input.layer_id(), served,
            absl::StrCat("layer ", input.layer_id(), " is no engram layer of this model; those are ", served));
      } else if (named[index]) {
        Add(Reason::kLayerUnknown, absl::StrCat(path, ".layer_id"), input.layer_id(), "each layer once",
            absl::StrCat("layer ", input.layer_id(), " stands in the call more than once"));
      } else {
        named[index] = true;
        call_.layers.push_back(static_cast<int>(index));
      }
      Highway(absl::StrCat(path, ".highway"), input.highway());
    }
  }

  // The ids, or the first of very many: errors must fit a trailer.
  std::string LayersServed() const {
    constexpr size_t kMost = 16;
    const absl::Span<const EngramLayer> layers = model_.layers();
    std::string served = absl::StrJoin(layers.subspan(0, kMost), ", ", [](std::string* out, const EngramLayer& layer) {
      absl::StrAppend(out, layer.layer_id);
    });
    if (layers.size() > kMost) absl::StrAppend(&served, ", ... (", layers.size(), " layers)");
    return served;
  }

  void Highway(const std::string& field, const std::string& highway) {
    const int64_t expected =
        call_.form == Form::kHighway ? call_.tokens * HighwayBytes(ShapeOf(model_), call_.highway_type) : 0;
    call_.request_bytes += static_cast<int64_t>(highway.size());
    if (static_cast<int64_t>(highway.size()) == expected) return;
    const EngramGeometry& g = model_.geometry();
    Add(Reason::kHighwaySize, field, highway.size(), expected,
        call_.form == Form::kKv ? absl::StrCat("FORM_KV takes no highway, got ", highway.size(), " bytes")
                                : absl::StrCat("a highway of [", call_.tokens, ", ", g.copies, ", ", g.dim, "] ",
                                               call_.highway_type == kernels::HighwayType::kF32 ? "f32" : "bf16",
                                               " has ", expected, " bytes, got ", highway.size()));
  }

  void ReplyBytes() {
    call_.reply_bytes = static_cast<int64_t>(call_.layers.size()) * call_.tokens *
                        OutBytes(ShapeOf(model_), call_.form, call_.highway_type);
    for (const auto& [what, bytes] : {std::pair{"request", call_.request_bytes}, {"reply", call_.reply_bytes}}) {
      if (bytes <= limits_.max_message_bytes) continue;
      Add(Reason::kMessageBytes, "layers", bytes, AtMost(limits_.max_message_bytes),
          absl::StrCat("the ", what, " would have ", bytes, " bytes, a message may have ", limits_.max_message_bytes,
                       ": send fewer tokens or layers a call"));
    }
  }

  const v1::ApplyRequest& request_;
  const EngramModel& model_;
  const CallLimits& limits_;
  ApplyCall call_;
  bool masked_ = false;  // some sequence has a mask
  Refusals refusals_;
  absl::flat_hash_set<std::string> sessions_;
};

}  // namespace

absl::StatusOr<ApplyCall> DecodeApply(const v1::ApplyRequest& request, const EngramModel& model,
                                      const CallLimits& limits) {
  return ApplyDecoder(request, model, limits).Decode();
}

std::vector<CallLayer> LayOutReply(const ApplyCall& call, const EngramModel& model, const v1::ApplyRequest& request,
                                   v1::ApplyResponse& response) {
  const auto out_bytes = static_cast<size_t>(call.tokens * OutBytes(ShapeOf(model), call.form, call.highway_type));
  // All outputs first: adding one may move the messages, but not their strings' bytes, once those are on the heap.
  // Short payloads live inside the string itself, so pointers are taken only when nothing moves any more.
  for (int i = 0; i < request.layers_size(); ++i) {
    v1::LayerOutput& output = *response.add_layers();
    output.set_layer_id(request.layers(i).layer_id());
    (call.form == Form::kHighway ? output.mutable_highway() : output.mutable_kv())->resize(out_bytes);
  }
  std::vector<CallLayer> layers;
  for (int i = 0; i < request.layers_size(); ++i) {
    v1::LayerOutput& output = *response.mutable_layers(i);
    std::string& out = *(call.form == Form::kHighway ? output.mutable_highway() : output.mutable_kv());
    layers.push_back({.layer = call.layers[static_cast<size_t>(i)],
                      .highway = call.form == Form::kHighway ? request.layers(i).highway().data() : nullptr,
                      .out = out.data()});
  }
  return layers;
}

}  // namespace engram
