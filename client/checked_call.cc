#include "client/checked_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/checked_sequences.h"
#include "client/form_choice.h"
#include "client/refusal.h"
#include "engram/v1/engram.pb.h"

namespace engram::client {
namespace {

// Tensors go to the wire as they lie in memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

absl::Status CheckLayerId(const ModelInfo& model, absl::Span<const int32_t> ids, size_t i, const std::string& field) {
  if (!model.HasLayer(ids[i])) {
    const std::string served = absl::StrJoin(
        model.layers, ", ", [](std::string* out, const ModelInfo::Layer& l) { absl::StrAppend(out, l.layer_id); });
    return Refuse(Reason::kLayerUnknown, field, absl::StrCat(ids[i]), served,
                  absl::StrCat("layer ", ids[i], " is no engram layer of this model; those are ", served));
  }
  for (size_t j = 0; j < i; ++j) {
    if (ids[j] == ids[i]) {
      return Refuse(Reason::kLayerUnknown, field, absl::StrCat(ids[i]), "each layer once",
                    absl::StrCat("layer ", ids[i], " stands in the call more than once"));
    }
  }
  return absl::OkStatus();
}

// `list` and `member` name the field: "layers" ".layer_id".
absl::Status CheckLayerIds(const ModelInfo& model, absl::Span<const int32_t> ids, const std::string& list,
                           const std::string& member) {
  if (ids.empty()) return Refuse(Reason::kEmptyCall, list, "0", ">= 1", "a call needs at least one layer");
  for (size_t i = 0; i < ids.size(); ++i) {
    absl::Status status = CheckLayerId(model, ids, i, absl::StrCat(list, "[", i, "]", member));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckForm(Form form, absl::Span<const Form> allowed, const char* method) {
  for (const Form one : allowed) {
    if (one == form) return absl::OkStatus();
  }
  const std::string forms =
      absl::StrJoin(allowed, ", ", [](std::string* out, Form f) { absl::StrAppend(out, FormName(f)); });
  return Refuse(Reason::kForm, "form", FormName(form), forms,
                absl::StrCat(method, " has no form ", FormName(form), "; those are ", forms));
}

absl::Status CheckSkip(OnFailure on_failure, absl::string_view what) {
  if (on_failure != OnFailure::kSkip) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("on_failure: kSkip, but ", what, " cannot say \"nothing\""));
}

// A result span of the caller's, in bytes.
absl::Status CheckRoom(const std::string& field, int64_t room, int64_t expected, int64_t tokens, Form form) {
  if (room == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": room for ", room, " bytes, expected ", expected, " for ",
                                                 tokens, " tokens, form ", FormName(form)));
}

absl::Status CheckHighway(const ModelInfo& model, const ApplyCall& call, int64_t tokens, const LayerRun& layer,
                          const std::string& at) {
  const int64_t expected = call.form == Form::kKv ? 0 : tokens * model.HighwayTokenBytes(call.dtype);
  if (static_cast<int64_t>(layer.highway.size()) == expected) return absl::OkStatus();
  return Refuse(
      Reason::kHighwaySize, absl::StrCat(at, ".highway"), absl::StrCat(layer.highway.size()), absl::StrCat(expected),
      call.form == Form::kKv
          ? absl::StrCat("form kv takes no highway, got ", layer.highway.size(), " bytes")
          : absl::StrCat("a highway of [", tokens, ", ", model.hc, ", ", model.dim, "] ", HighwayDtypeName(call.dtype),
                         " has ", expected, " bytes, got ", layer.highway.size()));
}

Landing Gates(const ModelInfo& model, absl::Span<float> out) {
  return {v1::LayerOutput::kGatesFieldNumber, model.GatesTokenBytes(), reinterpret_cast<char*>(out.data())};
}

Landing Value(const ModelInfo& model, absl::Span<uint16_t> out) {
  return {v1::LayerOutput::kValueFieldNumber, model.ValueTokenBytes(), reinterpret_cast<char*>(out.data())};
}

// The layer of an Apply in the wire's form `form`; the spans have been measured against call.form.
CheckedLayer ApplyLayer(const ModelInfo& model, const ApplyCall& call, Form form, const LayerRun& run) {
  CheckedLayer layer{.layer_id = run.layer_id, .highway = nullptr, .landings = {}, .updated = nullptr};
  if (form != Form::kKv) layer.highway = run.highway.data();
  if (call.region != nullptr && form == Form::kHighway) {
    layer.updated = run.out.data();
    return layer;
  }
  switch (form) {
    case Form::kKv:
      layer.landings = {{v1::LayerOutput::kKvFieldNumber, model.KvTokenBytes(), run.out.data()}};
      break;
    case Form::kUpdate:
      layer.landings = {Gates(model, run.gates), Value(model, run.value)};
      if (call.form == Form::kAuto) layer.updated = run.out.data();
      break;
    case Form::kGate:
      layer.landings = {Gates(model, run.gates)};
      break;
    default:
      layer.landings = {{v1::LayerOutput::kHighwayFieldNumber, model.HighwayTokenBytes(call.dtype), run.out.data()}};
      break;
  }
  return layer;
}

absl::Status CheckApplyLayer(const ModelInfo& model, const ApplyCall& call, int64_t tokens, size_t index) {
  const LayerRun& layer = call.layers[index];
  const std::string at = absl::StrCat("layers[", index, "]");
  if (absl::Status status = CheckHighway(model, call, tokens, layer, at); !status.ok()) return status;
  const bool gated = call.form == Form::kUpdate || call.form == Form::kGate;
  int64_t out = 0;
  if (call.form == Form::kKv) out = tokens * model.KvTokenBytes();
  if (!gated && call.form != Form::kKv) out = tokens * model.HighwayTokenBytes(call.dtype);
  const int64_t gates = gated ? tokens * model.GatesTokenBytes() : 0;
  const int64_t value = call.form == Form::kUpdate ? tokens * model.ValueTokenBytes() : 0;
  const auto room = [&](const char* name, size_t bytes, int64_t expected) {
    return CheckRoom(absl::StrCat(at, name), static_cast<int64_t>(bytes), expected, tokens, call.form);
  };
  absl::Status status = room(".out", layer.out.size(), out);
  if (status.ok()) status = room(".gates", layer.gates.size() * sizeof(float), gates);
  if (status.ok()) status = room(".value", layer.value.size() * sizeof(uint16_t), value);
  return status;
}

absl::Status CheckRegion(const ApplyCall& call) {
  if (call.form == Form::kKv) {
    return Refuse(Reason::kForm, "region", "set", "absent", "a region holds highways, and form kv takes none");
  }
  if (call.on_failure == OnFailure::kSkip) {
    return absl::InvalidArgumentError(
        "on_failure: kSkip, but after a failure the server may still write to the call's region: skip the engram by "
        "going on with the highway from elsewhere");
  }
  return call.region->Usable();
}

absl::Status CheckInRegion(const ApplyCall& call, size_t index) {
  const LayerRun& layer = call.layers[index];
  const bool inside = call.region->OffsetOf(layer.highway).has_value() && call.region->OffsetOf(layer.out).has_value();
  if (inside || layer.highway.empty()) return absl::OkStatus();  // another size than T's is told of by name
  return absl::InvalidArgumentError(
      absl::StrCat("layers[", index, "]: highway and out do not lie in the call's region"));
}

// Bytes of one column or output, and how many there are.
struct SliceUnit {
  int64_t bytes = 0;
  int64_t count = 0;
};

SliceUnit UnitOf(const ModelInfo& model, Form form, int32_t layer_id) {
  if (form == Form::kKv) return {2, model.KvTokenBytes() / 2};
  if (form == Form::kRowsBf16) return {model.RowBf16Bytes(), model.n_hash_cols};
  return {model.FindLayer(layer_id)->row_bytes, model.n_hash_cols};
}

absl::Status CheckSlice(const Range& slice, int64_t all) {
  if (slice.begin >= 0 && slice.begin < slice.end && slice.end <= all) return absl::OkStatus();
  const std::string text = absl::StrCat("[", slice.begin, ", ", slice.end, ")");
  return Refuse(Reason::kSlice, "slice", text, absl::StrCat("within [0, ", all, ")"),
                absl::StrCat(text, " is no part of [0, ", all, ")"));
}

absl::Status TakeRowIds(const ModelInfo& model, const LookupCall& call, CheckedCall* checked) {
  const int64_t per_token = static_cast<int64_t>(call.layers.size()) * model.n_hash_cols;
  const auto given = static_cast<int64_t>(call.row_ids.size());
  if (given % per_token != 0) {
    return Refuse(
        Reason::kRowOutOfRange, "row_ids", absl::StrCat(given), absl::StrCat("a multiple of ", per_token),
        absl::StrCat("row_ids is [T, ", call.layers.size(), ", ", model.n_hash_cols, "], got ", given, " ids"));
  }
  checked->tokens = given / per_token;
  if (checked->tokens > kMaxCallTokens) {
    return Refuse(Reason::kTooManyTokens, "row_ids", absl::StrCat(checked->tokens), absl::StrCat("<= ", kMaxCallTokens),
                  absl::StrCat("a call may have ", kMaxCallTokens, " tokens, this one has ", checked->tokens));
  }
  for (int64_t i = 0; i < given; ++i) {
    const LookupLayer& layer = call.layers[static_cast<size_t>(i % per_token / model.n_hash_cols)];
    const int64_t rows = model.FindLayer(layer.layer_id)->rows;
    const int32_t id = call.row_ids[static_cast<size_t>(i)];
    if (id < -1 || id >= rows) {
      return Refuse(Reason::kRowOutOfRange, absl::StrCat("row_ids[", i, "]"), absl::StrCat(id),
                    absl::StrCat("[-1, ", rows, ")"),
                    absl::StrCat("row ", id, " is outside [-1, ", rows, ") of layer ", layer.layer_id));
    }
  }
  checked->row_ids = call.row_ids.data();
  checked->sequences.emplace_back();
  checked->sequences.back().tokens = checked->tokens;
  return absl::OkStatus();
}

// Sequences or a prepared result, never both.
absl::Status TakeTokens(const ModelInfo& model, const std::vector<SequenceRun>& sequences, const Prepared* prepared,
                        const std::optional<Range>& token_slice, CheckedCall* checked) {
  if (prepared == nullptr) {
    if (token_slice.has_value()) {
      return Refuse(Reason::kSlice, "token_slice", "set", "absent", "a slice of tokens goes with a prepared result");
    }
    return CheckSequences(model, sequences, checked);
  }
  if (!sequences.empty()) {
    return Refuse(Reason::kForm, "prepared", "set", "alone",
                  "a prepared result stands for its tokens: give no sequences with it");
  }
  checked->partial_ok = false;  // its sequences have been served
  return TakePrepared(*prepared, token_slice, checked);
}

}  // namespace

const char* MethodPath(Method method) {
  switch (method) {
    case Method::kApply:
      return "/engram.v1.EngramService/Apply";
    case Method::kPrepare:
      return "/engram.v1.EngramService/Prepare";
    case Method::kLookup:
      return "/engram.v1.EngramService/Lookup";
  }
  return "";
}

absl::StatusOr<CheckedCall> CheckApply(const ModelInfo& model, const ApplyCall& call) {
  CheckedCall checked;
  checked.method = Method::kApply;
  checked.form = ChooseForm(model, call.form);
  checked.region = call.region;
  // What does not travel is cheapest.
  if (call.region != nullptr && call.form == Form::kAuto) checked.form = Form::kHighway;
  checked.dtype = call.dtype;
  checked.priority = call.priority;
  checked.on_failure = call.on_failure;
  checked.partial_ok = call.partial_ok;
  checked.timeout = call.timeout;
  absl::Status status =
      CheckForm(call.form, {Form::kHighway, Form::kKv, Form::kUpdate, Form::kGate, Form::kAuto}, "Apply");
  if (status.ok() && call.form == Form::kKv) status = CheckSkip(call.on_failure, "form kv");
  if (status.ok() && call.region != nullptr) status = CheckRegion(call);
  if (!status.ok()) return status;
  std::vector<int32_t> ids;
  for (const LayerRun& layer : call.layers) ids.push_back(layer.layer_id);
  status = TakeTokens(model, call.sequences, call.prepared, call.token_slice, &checked);
  if (!status.ok()) return status;
  if (status = CheckLayerIds(model, ids, "layers", ".layer_id"); !status.ok()) return status;
  for (size_t i = 0; i < call.layers.size(); ++i) {
    if (status = CheckApplyLayer(model, call, checked.tokens, i); !status.ok()) return status;
    if (call.region != nullptr) status = CheckInRegion(call, i);
    if (!status.ok()) return status;
    checked.layers.push_back(ApplyLayer(model, call, checked.form, call.layers[i]));
  }
  return checked;
}

absl::StatusOr<CheckedCall> CheckPrepare(const ModelInfo& model, const PrepareCall& call) {
  CheckedCall checked;
  checked.method = Method::kPrepare;
  checked.priority = call.priority;
  checked.on_failure = call.on_failure;
  checked.timeout = call.timeout;
  checked.return_values = !call.values.empty();
  absl::Status status = CheckSkip(call.on_failure, "a prepared result");
  if (status.ok()) status = CheckSequences(model, call.sequences, &checked);
  if (status.ok()) status = CheckLayerIds(model, call.layer_ids, "layer_ids", "");
  if (!status.ok()) return status;
  if (checked.return_values && call.values.size() != call.layer_ids.size()) {
    return absl::InvalidArgumentError(absl::StrCat("values: ", call.values.size(), " spans for ", call.layer_ids.size(),
                                                   " layers, expected none or one each"));
  }
  for (size_t i = 0; i < call.layer_ids.size(); ++i) {
    CheckedLayer layer{.layer_id = call.layer_ids[i], .highway = nullptr, .landings = {}, .updated = nullptr};
    if (checked.return_values) {
      const auto room = static_cast<int64_t>(call.values[i].size() * sizeof(uint16_t));
      const int64_t expected = checked.tokens * model.ValueTokenBytes();
      if (room != expected) {
        return absl::InvalidArgumentError(absl::StrCat("values[", i, "]: room for ", room, " bytes, expected ",
                                                       expected, " for ", checked.tokens, " tokens"));
      }
      layer.landings = {Value(model, call.values[i])};
    }
    checked.layers.push_back(std::move(layer));
  }
  return checked;
}

absl::StatusOr<CheckedCall> CheckLookup(const ModelInfo& model, const LookupCall& call) {
  CheckedCall checked;
  checked.method = Method::kLookup;
  checked.form = call.form;
  checked.priority = call.priority;
  checked.on_failure = call.on_failure;
  checked.partial_ok = call.partial_ok;
  checked.timeout = call.timeout;
  checked.slice = call.slice;
  absl::Status status = CheckForm(call.form, {Form::kRowsNative, Form::kRowsBf16, Form::kKv}, "Lookup");
  if (status.ok()) status = CheckSkip(call.on_failure, "a row");
  std::vector<int32_t> ids;
  for (const LookupLayer& layer : call.layers) ids.push_back(layer.layer_id);
  if (status.ok()) status = CheckLayerIds(model, ids, "layers", ".layer_id");
  if (!status.ok()) return status;
  if (call.row_ids.empty()) {
    status = TakeTokens(model, call.sequences, call.prepared, std::nullopt, &checked);
  } else if (!call.sequences.empty() || call.prepared != nullptr) {
    status = Refuse(Reason::kForm, "row_ids", "set", "alone", "row ids stand for their tokens: give nothing else");
  } else {
    checked.partial_ok = false;
    status = TakeRowIds(model, call, &checked);
  }
  if (!status.ok()) return status;
  const bool kv = call.form == Form::kKv;
  for (size_t i = 0; i < call.layers.size(); ++i) {
    const LookupLayer& run = call.layers[i];
    const SliceUnit unit = UnitOf(model, call.form, run.layer_id);
    const Range slice = call.slice.value_or(Range{0, unit.count});
    if (status = CheckSlice(slice, unit.count); !status.ok()) return status;
    const int64_t token_bytes = (slice.end - slice.begin) * unit.bytes;
    status = CheckRoom(absl::StrCat("layers[", i, "].out"), static_cast<int64_t>(run.out.size()),
                       checked.tokens * token_bytes, checked.tokens, call.form);
    if (!status.ok()) return status;
    CheckedLayer layer{.layer_id = run.layer_id, .highway = nullptr, .landings = {}, .updated = nullptr};
    layer.landings = {
        {kv ? v1::LayerOutput::kKvFieldNumber : v1::LayerOutput::kRowsFieldNumber, token_bytes, run.out.data()}};
    checked.layers.push_back(std::move(layer));
  }
  return checked;
}

}  // namespace engram::client
