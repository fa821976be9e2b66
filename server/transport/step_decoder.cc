// Apply, Prepare and Lookup, from the wire.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/refusal/refusal.h"
#include "server/transport/sequence_decoder.h"
#include "server/transport/step_call.h"

namespace engram {
namespace {

std::string AtMost(int64_t bound) { return absl::StrCat("<= ", bound); }

// What the three requests have in common; a method per part.
class StepDecoder {
 public:
  explicit StepDecoder(const DecodeContext& context) : context_(context) {}

  absl::StatusOr<StepCall> Apply(const v1::ApplyRequest& request, const std::vector<int64_t>& highway_bytes) {
    call_.partial_ok = request.partial_ok();
    ModelKey(request.model_key());
    ApplyForm(request.form());
    Dtype(request.highway_dtype());
    const bool by_ticket = !request.ticket().empty();
    if (by_ticket) {
      Ticket(request.ticket(), request.sequences_size());
      if (request.has_token_slice()) TokenSlice(request.token_slice());
    } else {
      if (request.has_token_slice())
        Add(Reason::kSlice, "token_slice", "set", "absent", "a slice of tokens goes with a ticket");
      if (!Sequences(request.sequences())) return refusals_.ToStatus();
    }
    if (!FewLayers(request.layers_size(), "layers")) return refusals_.ToStatus();
    std::vector<int32_t> ids;
    for (const v1::LayerInput& layer : request.layers()) ids.push_back(layer.layer_id());
    Layers(ids, "layers", ".layer_id");
    InRegion(request, highway_bytes);
    for (int i = 0; request.region().empty() && i < request.layers_size(); ++i) {
      Highway(absl::StrCat("layers[", i, "].highway"), highway_bytes[static_cast<size_t>(i)]);
    }
    Prioritise(request.priority());
    return Finish();
  }

  absl::StatusOr<StepCall> Prepare(const v1::PrepareRequest& request) {
    call_.form = Form::kPrepare;
    call_.return_values = request.return_values();
    ModelKey(request.model_key());
    if (!Sequences(request.sequences())) return refusals_.ToStatus();
    if (!FewLayers(request.layer_ids_size(), "layer_ids")) return refusals_.ToStatus();
    Layers({request.layer_ids().begin(), request.layer_ids().end()}, "layer_ids", "");
    Prioritise(request.priority());
    const int64_t bytes = PreparedBytes(call_, context_.shape);
    if (bytes > context_.limits.prepare_memory_bytes) {
      Add(Reason::kTooManyTokens, "sequences", absl::StrCat(bytes), AtMost(context_.limits.prepare_memory_bytes),
          absl::StrCat("the result of ", call_.tokens, " tokens takes ", bytes,
                       " bytes, all prepared results together ", "may take ", context_.limits.prepare_memory_bytes));
    }
    return Finish();
  }

  absl::StatusOr<StepCall> Lookup(const v1::LookupRequest& request) {
    call_.partial_ok = request.partial_ok();
    ModelKey(request.model_key());
    LookupForm(request.form());
    const bool by_ticket = !request.ticket().empty();
    const bool by_rows = !request.row_ids().empty();
    if (!FewLayers(request.layer_ids_size(), "layer_ids")) return refusals_.ToStatus();
    Layers({request.layer_ids().begin(), request.layer_ids().end()}, "layer_ids", "");
    if (by_ticket) {
      Ticket(request.ticket(), request.sequences_size() + request.row_ids_size());
    } else if (by_rows) {
      RowIds(request);
    } else if (!Sequences(request.sequences())) {
      return refusals_.ToStatus();
    }
    if (request.has_slice()) Slice(request.slice());
    Prioritise(request.priority());
    return Finish();
  }

 private:
  void Add(Reason reason, std::string field, std::string value, std::string bound, std::string text) {
    refusals_.Add({reason, std::move(field), std::move(value), std::move(bound), std::move(text)});
  }

  void ModelKey(const std::string& key) {
    if (key.empty()) return;
    const Digest& config = context_.model.config_digest();
    const std::optional<Digest>& content = context_.model.content_digest();
    if (key.size() < 16 || key.size() > config.size()) {
      Add(Reason::kDigestMismatch, "model_key", absl::StrCat(key.size(), " bytes"), "16 to 32 bytes",
          absl::StrCat("a model_key is the first 16 to 32 bytes of a digest, this one has ", key.size()));
      return;
    }
    const auto begins = [&key](const Digest& digest) {
      return std::memcmp(key.data(), digest.data(), key.size()) == 0;
    };
    if (begins(config) || (content.has_value() && begins(*content))) return;
    const std::string served = DigestHex(config);
    Add(Reason::kDigestMismatch, "model_key", absl::BytesToHexString(key), served,
        absl::StrCat("the model served here has config_digest ", served,
                     content.has_value() ? absl::StrCat(", content_digest ", DigestHex(*content)) : ""));
  }

  void UnknownForm(int form, std::string bound) {
    const std::string text = absl::StrCat("form ", form, " is not one of ", bound);
    Add(Reason::kForm, "form", absl::StrCat(form), std::move(bound), text);
  }

  void ApplyForm(v1::Form form) {
    switch (form) {
      case v1::FORM_UNSPECIFIED:
      case v1::FORM_HIGHWAY:
        call_.form = Form::kHighway;
        return;
      case v1::FORM_KV:
        call_.form = Form::kKv;
        return;
      case v1::FORM_UPDATE:
        call_.form = Form::kUpdate;
        return;
      case v1::FORM_GATE:
        call_.form = Form::kGate;
        return;
      default:
        UnknownForm(form, "FORM_HIGHWAY (1), FORM_KV (2), FORM_UPDATE (5), FORM_GATE (6)");
    }
  }

  void LookupForm(v1::Form form) {
    switch (form) {
      case v1::FORM_UNSPECIFIED:
      case v1::FORM_ROWS_NATIVE:
        call_.form = Form::kRowsNative;
        return;
      case v1::FORM_ROWS_BF16:
        call_.form = Form::kRowsBf16;
        return;
      case v1::FORM_KV:
        call_.form = Form::kKv;
        return;
      default:
        UnknownForm(form, "FORM_KV (2), FORM_ROWS_NATIVE (3), FORM_ROWS_BF16 (4)");
    }
  }

  void Dtype(v1::HighwayDtype dtype) {
    switch (dtype) {
      case v1::HIGHWAY_DTYPE_UNSPECIFIED:
      case v1::HIGHWAY_DTYPE_F32:
        call_.highway_type = kernels::HighwayType::kF32;
        return;
      case v1::HIGHWAY_DTYPE_BF16:
        call_.highway_type = kernels::HighwayType::kBf16;
        return;
      default:
        Add(Reason::kDtype, "highway_dtype", absl::StrCat(static_cast<int>(dtype)),
            "HIGHWAY_DTYPE_F32 (1) or HIGHWAY_DTYPE_BF16 (2)",
            absl::StrCat("dtype ", static_cast<int>(dtype), " is not known"));
    }
  }

  void Prioritise(v1::Priority priority) {
    switch (priority) {
      case v1::PRIORITY_UNSPECIFIED:
        return;  // by the sequences' lengths
      case v1::PRIORITY_DECODE:
        call_.priority = Priority::kDecode;
        return;
      case v1::PRIORITY_PREFILL:
        call_.priority = Priority::kPrefill;
        return;
      default:
        Add(Reason::kForm, "priority", absl::StrCat(static_cast<int>(priority)),
            "PRIORITY_DECODE (1) or PRIORITY_PREFILL (2)",
            absl::StrCat("priority ", static_cast<int>(priority), " is not known"));
    }
  }

  // False: the call is beyond any further look.
  bool Sequences(const google::protobuf::RepeatedPtrField<v1::Sequence>& sequences) {
    call_.source = StepCall::Source::kSequences;
    return SequenceDecoder(context_, refusals_, call_).Decode(sequences);
  }

  // T and the mask are those of the prepared result. Nothing is held: the commit asks for the ticket again.
  void Ticket(const std::string& ticket, int others) {
    call_.source = StepCall::Source::kTicket;
    call_.ticket = ticket;
    if (others > 0) {
      Add(Reason::kForm, "ticket", "set", "alone",
          "a ticket stands for its tokens: send no sequences or row ids with it");
      return;
    }
    const absl::StatusOr<std::shared_ptr<const Prepared>> prepared = context_.tickets.Get(context_.principal, ticket);
    if (!prepared.ok()) {
      for (const Offender& offender : DetailOf(prepared.status()).offenders) refusals_.Add(offender);
      return;
    }
    call_.tokens = (*prepared)->tokens;
    call_.token_mask = (*prepared)->token_mask;
    call_.sequences = {{.tokens = call_.tokens, .refused = false}};
  }

  void TokenSlice(const v1::Slice& slice) {
    if (!Within(slice, "token_slice", call_.tokens)) return;
    call_.prepared_first = slice.begin();
    call_.tokens = slice.end() - slice.begin();
    call_.sequences = {{.tokens = call_.tokens, .refused = false}};
    if (call_.token_mask.empty()) return;
    call_.token_mask = {call_.token_mask.begin() + slice.begin(), call_.token_mask.begin() + slice.end()};
  }

  void Slice(const v1::Slice& slice) {
    const int64_t all = call_.form == Form::kKv ? context_.shape.kv_values() : context_.shape.columns;
    if (Within(slice, "slice", all)) call_.slice = {slice.begin(), slice.end()};
  }

  bool Within(const v1::Slice& slice, const std::string& field, int64_t all) {
    if (slice.begin() >= 0 && slice.begin() < slice.end() && slice.end() <= all) return true;
    const std::string range = absl::StrCat("[", slice.begin(), ", ", slice.end(), ")");
    Add(Reason::kSlice, field, range, absl::StrCat("within [0, ", all, ")"),
        absl::StrCat(range, " is no part of [0, ", all, ")"));
    return false;
  }

  // Millions of empty messages fit few bytes: their number is looked at before any of them is.
  bool FewLayers(int given, const std::string& list) {
    const auto layers = static_cast<int>(context_.model.layers().size());
    if (given <= layers) return true;
    Add(Reason::kLayerUnknown, list, absl::StrCat(given), AtMost(layers),
        absl::StrCat("the model has ", layers, " engram layers, the call names ", given));
    return false;
  }

  // The ids, or the first of very many: errors must fit a trailer.
  std::string LayersServed() const {
    constexpr size_t kMost = 16;
    const absl::Span<const EngramLayer> layers = context_.model.layers();
    std::string served = absl::StrJoin(layers.subspan(0, kMost), ", ", [](std::string* out, const EngramLayer& layer) {
      absl::StrAppend(out, layer.layer_id);
    });
    if (layers.size() > kMost) absl::StrAppend(&served, ", ... (", layers.size(), " layers)");
    return served;
  }

  void Layers(const std::vector<int32_t>& ids, const std::string& list, const std::string& member) {
    if (ids.empty()) Add(Reason::kEmptyCall, list, "0", ">= 1", "a call needs at least one layer");
    const absl::Span<const EngramLayer> layers = context_.model.layers();
    std::vector<bool> named(layers.size(), false);
    for (size_t i = 0; i < ids.size(); ++i) {
      const std::string field = absl::StrCat(list, "[", i, "]", member);
      const auto found = std::find_if(layers.begin(), layers.end(),
                                      [&](const EngramLayer& layer) { return layer.layer_id == ids[i]; });
      const auto index = static_cast<size_t>(found - layers.begin());
      if (found == layers.end()) {
        const std::string served = LayersServed();
        Add(Reason::kLayerUnknown, field, absl::StrCat(ids[i]), served,
            absl::StrCat("layer ", ids[i], " is no engram layer of this model; those are ", served));
      } else if (named[index]) {
        Add(Reason::kLayerUnknown, field, absl::StrCat(ids[i]), "each layer once",
            absl::StrCat("layer ", ids[i], " stands in the call more than once"));
      } else {
        named[index] = true;
        call_.layers.push_back(static_cast<int>(index));
      }
    }
  }

  void Highway(const std::string& field, int64_t given) {
    const bool reads = ReadsHighway(call_.form);
    const int64_t expected = reads ? call_.tokens * HighwayBytes(context_.shape, call_.highway_type) : 0;
    call_.request_bytes += given;
    if (given == expected) return;
    Add(Reason::kHighwaySize, field, absl::StrCat(given), absl::StrCat(expected),
        reads ? absl::StrCat("a highway of [", call_.tokens, ", ", context_.shape.copies, ", ", context_.shape.dim,
                             "] ", call_.highway_type == kernels::HighwayType::kF32 ? "f32" : "bf16", " has ", expected,
                             " bytes, got ", given)
              : absl::StrCat("FORM_KV takes no highway, got ", given, " bytes"));
  }

  void InRegion(const v1::ApplyRequest& request, const std::vector<int64_t>& highway_bytes) {
    const RegionContext region{context_.regions, context_.principal, call_.form, call_.highway_type,
                               call_.tokens * HighwayBytes(context_.shape, call_.highway_type)};
    call_.in_region = ResolveRegion(request.region(), request.layers(), highway_bytes, region, refusals_);
  }

  void RowIds(const v1::LookupRequest& request) {
    call_.source = StepCall::Source::kRowIds;
    if (!request.sequences().empty()) {
      Add(Reason::kForm, "row_ids", "set", "alone", "row ids stand for their tokens: send no sequences with them");
      return;
    }
    if (call_.layers.size() != static_cast<size_t>(request.layer_ids_size())) return;  // told already
    const int64_t columns = context_.shape.columns;
    const int64_t per_token = static_cast<int64_t>(call_.layers.size()) * columns;
    if (per_token == 0 || request.row_ids_size() % per_token != 0) {
      Add(Reason::kRowOutOfRange, "row_ids", absl::StrCat(request.row_ids_size()),
          absl::StrCat("a multiple of ", per_token),
          absl::StrCat("row_ids is [T, ", call_.layers.size(), ", ", columns, "], got ", request.row_ids_size(),
                       " ids"));
      return;
    }
    call_.tokens = request.row_ids_size() / per_token;
    if (call_.tokens > context_.limits.max_call_tokens) {
      Add(Reason::kTooManyTokens, "row_ids", absl::StrCat(call_.tokens), AtMost(context_.limits.max_call_tokens),
          absl::StrCat("a call may have ", context_.limits.max_call_tokens, " tokens, this one has ", call_.tokens));
      return;
    }
    call_.sequences = {{.tokens = call_.tokens, .refused = false}};
    call_.row_ids.reserve(static_cast<size_t>(request.row_ids_size()));
    for (int i = 0; i < request.row_ids_size(); ++i) {
      const auto layer = static_cast<size_t>(i % per_token / columns);
      const int64_t rows = context_.model.layers()[static_cast<size_t>(call_.layers[layer])].table.rows;
      const int32_t id = request.row_ids(i);
      if (id < -1 || id >= rows) {
        Add(Reason::kRowOutOfRange, absl::StrCat("row_ids[", i, "]"), absl::StrCat(id),
            absl::StrCat("[-1, ", rows, ")"),
            absl::StrCat("row ", id, " is outside [-1, ", rows, ") of layer ",
                         request.layer_ids(static_cast<int>(layer))));
      }
      call_.row_ids.push_back(id);
    }
  }

  void Bytes(const char* what, int64_t bytes) {
    const int64_t most = context_.limits.max_message_bytes;
    if (bytes <= most) return;
    Add(Reason::kMessageBytes, "layers", absl::StrCat(bytes), AtMost(most),
        absl::StrCat("the ", what, " would have ", bytes, " bytes, a message may have ", most,
                     ": send fewer tokens or layers a call"));
  }

  int64_t ReplyBytesPerToken() const {
    const StepShape& shape = context_.shape;
    const int64_t value = shape.dim * static_cast<int64_t>(sizeof(kernels::Bf16));
    const int64_t gates = shape.copies * static_cast<int64_t>(sizeof(float));
    switch (call_.form) {
      case Form::kHighway:
        return call_.in_region.region != nullptr ? 0 : HighwayBytes(shape, call_.highway_type);
      case Form::kUpdate:
        return gates + value;
      case Form::kGate:
        return gates;
      case Form::kPrepare:
        return call_.return_values ? value : 0;
      default:
        return OutBytes(shape, call_.form, call_.highway_type, call_.slice);
    }
  }

  absl::StatusOr<StepCall> Finish() {
    if (refusals_.empty()) {
      call_.reply_bytes = static_cast<int64_t>(call_.layers.size()) * call_.tokens * ReplyBytesPerToken();
      Bytes("request", call_.request_bytes);
      Bytes("reply", call_.reply_bytes);
    }
    if (!refusals_.empty()) return refusals_.ToStatus();
    return std::move(call_);
  }

  const DecodeContext& context_;
  Refusals refusals_;
  StepCall call_;
};

}  // namespace

absl::StatusOr<StepCall> DecodeApply(const v1::ApplyRequest& request, const std::vector<int64_t>& highway_bytes,
                                     const DecodeContext& context) {
  return StepDecoder(context).Apply(request, highway_bytes);
}

absl::StatusOr<StepCall> DecodePrepare(const v1::PrepareRequest& request, const DecodeContext& context) {
  return StepDecoder(context).Prepare(request);
}

absl::StatusOr<StepCall> DecodeLookup(const v1::LookupRequest& request, const DecodeContext& context) {
  return StepDecoder(context).Lookup(request);
}

int64_t PreparedBytes(const StepCall& call, const StepShape& shape) {
  const int64_t kv = static_cast<int64_t>(call.layers.size()) * shape.kv_values() * 2;
  const int64_t ids = int64_t{shape.layers} * shape.columns * 8;
  return call.tokens * (kv + ids);
}

}  // namespace engram
