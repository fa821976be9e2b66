#include "client/apply_call.h"

#include <algorithm>
#include <cstring>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/refusal.h"

namespace engram::client {
namespace {

// Tensors go to the wire as they lie in memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

int64_t TokensOf(const ApplyCall& call) {
  int64_t tokens = 0;
  for (const SequenceRun& run : call.sequences) tokens += static_cast<int64_t>(run.token_ids.size());
  return tokens;
}

absl::Status CheckSequence(const ModelInfo& model, const SequenceRun& run, const std::string& path) {
  const auto length = static_cast<int64_t>(run.token_ids.size());
  const int64_t limit = model.limits.position_limit;
  if (length == 0) {
    return Refuse(Reason::kEmptyCall, absl::StrCat(path, "token_ids"), "0", ">= 1",
                  "a sequence needs at least one token");
  }
  if (run.start_pos < 0) {
    return Refuse(Reason::kPositionGap, absl::StrCat(path, "start_pos"), absl::StrCat(run.start_pos), ">= 0",
                  absl::StrCat("position ", run.start_pos, " lies before the sequence's start, 0"));
  }
  if (run.start_pos > limit - length) {
    return Refuse(Reason::kPositionLimit, absl::StrCat(path, "start_pos"), absl::StrCat(run.start_pos),
                  absl::StrCat("<= ", limit - length),
                  absl::StrCat(length, " tokens from position ", run.start_pos, " pass the position limit of ", limit));
  }
  if (!run.token_mask.empty() && run.token_mask.size() != run.token_ids.size()) {
    return Refuse(Reason::kTokenMaskLength, absl::StrCat(path, "token_mask"), absl::StrCat(run.token_mask.size()),
                  absl::StrCat(length),
                  absl::StrCat("token_mask has ", run.token_mask.size(), " bytes for ", length, " tokens"));
  }
  if (static_cast<int64_t>(run.session.size()) > model.limits.max_session_bytes) {
    return Refuse(Reason::kSessionLength, absl::StrCat(path, "session"), absl::StrCat(run.session.size()),
                  absl::StrCat("<= ", model.limits.max_session_bytes),
                  absl::StrCat("a session's name has at most ", model.limits.max_session_bytes, " bytes, this one has ",
                               run.session.size()));
  }
  if (run.history == nullptr) {
    if (!run.lookback.empty() && static_cast<int64_t>(run.lookback.size()) != model.lookback_length()) {
      return Refuse(Reason::kLookbackLength, absl::StrCat(path, "lookback_token_ids"),
                    absl::StrCat(run.lookback.size()), absl::StrCat(model.lookback_length()),
                    absl::StrCat("look-back has exactly ", model.lookback_length(),
                                 " ids, newest first (-1 = masked or before the start), got ", run.lookback.size()));
    }
    return absl::OkStatus();
  }
  if (!run.lookback.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, "lookback: given besides a history, which makes the look-back"));
  }
  if (run.history->max_ngram() != model.max_ngram) {
    return absl::InvalidArgumentError(absl::StrCat(path, "history: made for ", run.history->max_ngram(),
                                                   "-grams, the model has ", model.max_ngram, "-grams"));
  }
  return run.history->CheckWrite(run.start_pos, run.token_ids, run.token_mask, path);
}

// Two runs over one history would each be checked against a state that the other changes.
absl::Status CheckHistoriesDiffer(const ApplyCall& call) {
  std::vector<const SequenceHistory*> histories;
  for (const SequenceRun& run : call.sequences) {
    if (run.history != nullptr) histories.push_back(run.history);
  }
  std::sort(histories.begin(), histories.end());
  if (std::adjacent_find(histories.begin(), histories.end()) != histories.end()) {
    return absl::InvalidArgumentError("two sequences of the call share one history: a history stands behind one run");
  }
  return absl::OkStatus();
}

absl::Status CheckLayers(const ModelInfo& model, const ApplyCall& call, int64_t tokens) {
  const auto in_bytes = call.form == Form::kKv ? 0 : OutputBytes(model, call.form, call.dtype, tokens);
  const auto out_bytes = OutputBytes(model, call.form, call.dtype, tokens);
  for (size_t i = 0; i < call.layers.size(); ++i) {
    const LayerRun& layer = call.layers[i];
    const std::string at = absl::StrCat("layers[", i, "]");
    if (!model.HasLayer(layer.layer_id)) {
      const std::string served = absl::StrJoin(
          model.layers, ", ", [](std::string* out, const ModelInfo::Layer& l) { absl::StrAppend(out, l.layer_id); });
      return Refuse(Reason::kLayerUnknown, absl::StrCat(at, ".layer_id"), absl::StrCat(layer.layer_id), served,
                    absl::StrCat("layer ", layer.layer_id, " is no engram layer of this model; those are ", served));
    }
    for (size_t j = 0; j < i; ++j) {
      if (call.layers[j].layer_id == layer.layer_id) {
        return Refuse(Reason::kLayerUnknown, absl::StrCat(at, ".layer_id"), absl::StrCat(layer.layer_id),
                      "each layer once", absl::StrCat("layer ", layer.layer_id, " is also layers[", j, "]"));
      }
    }
    if (static_cast<int64_t>(layer.highway.size()) != in_bytes) {
      return Refuse(
          Reason::kHighwaySize, absl::StrCat(at, ".highway"), absl::StrCat(layer.highway.size()),
          absl::StrCat(in_bytes),
          call.form == Form::kKv
              ? absl::StrCat("form kv takes no highway, got ", layer.highway.size(), " bytes")
              : absl::StrCat("a highway of [", tokens, ", ", model.hc, ", ", model.dim, "] ",
                             HighwayDtypeName(call.dtype), " has ", in_bytes, " bytes, got ", layer.highway.size()));
    }
    if (static_cast<int64_t>(layer.out.size()) != out_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(at, ".out: room for ", layer.out.size(), " bytes, expected ",
                                                     out_bytes, " for ", tokens, " tokens, form ",
                                                     FormName(call.form)));
    }
  }
  return absl::OkStatus();
}

// A server would refuse the same (MESSAGE_BYTES), but only after the bytes went over the network.
absl::Status CheckMessageBytes(absl::string_view what, int64_t bytes, int64_t max_message_bytes) {
  if (bytes <= max_message_bytes) return absl::OkStatus();
  return Refuse(Reason::kMessageBytes, "layers", absl::StrCat(bytes), absl::StrCat("<= ", max_message_bytes),
                absl::StrCat("the ", what, " would have ", bytes, " bytes of tensors, a message may have ",
                             max_message_bytes, ": send fewer tokens or layers a call"));
}

void EncodeSequence(const SequenceRun& run, absl::Span<const int32_t> lookback, v1::Sequence* out) {
  out->set_session(run.session);
  out->set_start_pos(run.start_pos);
  out->mutable_token_ids()->Add(run.token_ids.begin(), run.token_ids.end());
  if (!run.token_mask.empty()) out->set_token_mask(run.token_mask.data(), run.token_mask.size());
  out->mutable_lookback_token_ids()->Add(lookback.begin(), lookback.end());
}

}  // namespace

int64_t OutputBytes(const ModelInfo& model, Form form, HighwayDtype dtype, int64_t tokens) {
  return tokens * (form == Form::kKv ? model.KvTokenBytes() : model.HighwayTokenBytes(dtype));
}

absl::Status CheckTokens(const ModelInfo& model, int64_t tokens) {
  const int64_t limit = model.limits.max_call_tokens;
  if (tokens <= limit) return absl::OkStatus();
  return Refuse(Reason::kTooManyTokens, "sequences", absl::StrCat(tokens), absl::StrCat("<= ", limit),
                absl::StrCat("a call may have ", limit, " tokens, this one has ", tokens));
}

absl::Status CheckTensors(const ModelInfo& model, int64_t max_message_bytes, Form form, HighwayDtype dtype,
                          int64_t tokens, int64_t layers) {
  const int64_t out_bytes = layers * OutputBytes(model, form, dtype, tokens);
  const int64_t in_bytes = form == Form::kKv ? 0 : out_bytes;
  if (absl::Status status = CheckMessageBytes("request", in_bytes, max_message_bytes); !status.ok()) return status;
  return CheckMessageBytes("reply", out_bytes, max_message_bytes);
}

absl::StatusOr<v1::ApplyRequest> EncodeApply(const ModelInfo& model, int64_t max_message_bytes, const ApplyCall& call) {
  if (call.sequences.empty()) {
    return Refuse(Reason::kEmptyCall, "sequences", "0", ">= 1", "a call needs at least one sequence");
  }
  if (call.layers.empty()) return Refuse(Reason::kEmptyCall, "layers", "0", ">= 1", "a call needs at least one layer");
  for (size_t i = 0; i < call.sequences.size(); ++i) {
    absl::Status status = CheckSequence(model, call.sequences[i], absl::StrCat("sequences[", i, "]."));
    if (!status.ok()) return status;
  }
  if (absl::Status status = CheckHistoriesDiffer(call); !status.ok()) return status;
  const int64_t tokens = TokensOf(call);
  if (absl::Status status = CheckTokens(model, tokens); !status.ok()) return status;
  if (absl::Status status = CheckLayers(model, call, tokens); !status.ok()) return status;
  const auto layers = static_cast<int64_t>(call.layers.size());
  const int64_t in_bytes = call.form == Form::kKv ? 0 : layers * OutputBytes(model, call.form, call.dtype, tokens);
  if (absl::Status status = CheckTensors(model, max_message_bytes, call.form, call.dtype, tokens, layers);
      !status.ok()) {
    return status;
  }

  v1::ApplyRequest request;
  request.set_form(call.form == Form::kKv ? v1::FORM_KV : v1::FORM_HIGHWAY);
  request.set_highway_dtype(call.dtype == HighwayDtype::kBf16 ? v1::HIGHWAY_DTYPE_BF16 : v1::HIGHWAY_DTYPE_F32);
  request.set_model_key(model.config_digest);
  for (const SequenceRun& run : call.sequences) {
    if (run.history == nullptr) {
      EncodeSequence(run, run.lookback, request.add_sequences());
      continue;
    }
    absl::StatusOr<std::vector<int32_t>> lookback = run.history->Lookback(run.start_pos);
    if (!lookback.ok()) return lookback.status();
    EncodeSequence(run, *lookback, request.add_sequences());
  }
  for (const LayerRun& layer : call.layers) {
    v1::LayerInput* input = request.add_layers();
    input->set_layer_id(layer.layer_id);
    if (call.form == Form::kHighway) input->set_highway(layer.highway.data(), layer.highway.size());
  }
  const auto envelope = static_cast<int64_t>(request.ByteSizeLong()) - in_bytes;
  if (envelope > kMaxEnvelopeBytes) {
    return Refuse(Reason::kMessageBytes, "sequences", absl::StrCat(envelope), absl::StrCat("<= ", kMaxEnvelopeBytes),
                  absl::StrCat("ids, masks and names of the call take ", envelope, " bytes, a message may have ",
                               kMaxEnvelopeBytes, ": split the call"));
  }
  return request;
}

absl::Status DecodeApply(const ModelInfo& model, const v1::ApplyResponse& response, const ApplyCall& call) {
  if (static_cast<size_t>(response.layers_size()) != call.layers.size()) {
    return absl::InternalError(absl::StrCat("the server's Apply reply has ", response.layers_size(), " layers, ",
                                            call.layers.size(), " were asked for"));
  }
  const int64_t expected = OutputBytes(model, call.form, call.dtype, TokensOf(call));
  const auto data = [&call](const v1::LayerOutput& output) -> const std::string& {
    return call.form == Form::kKv ? output.kv() : output.highway();
  };
  for (int i = 0; i < response.layers_size(); ++i) {
    const v1::LayerOutput& output = response.layers(i);
    if (output.layer_id() != call.layers[i].layer_id) {
      return absl::InternalError(absl::StrCat("the server's Apply reply has layers[", i, "].layer_id ",
                                              output.layer_id(), ", expected ", call.layers[i].layer_id));
    }
    if (static_cast<int64_t>(data(output).size()) != expected) {
      return absl::InternalError(absl::StrCat("the server's Apply reply has ", data(output).size(), " bytes in layers[",
                                              i, "].", FormName(call.form), ", expected ", expected));
    }
  }
  for (int i = 0; i < response.layers_size(); ++i) {
    std::memcpy(call.layers[i].out.data(), data(response.layers(i)).data(), expected);
  }
  return absl::OkStatus();
}

}  // namespace engram::client
