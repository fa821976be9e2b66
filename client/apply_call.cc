#include "client/apply_call.h"

#include <algorithm>
#include <cstring>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace engram::client {
namespace {

// Tensors go to the wire as they lie in memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

int64_t TokensOf(const ApplyCall& call) {
  int64_t tokens = 0;
  for (const SequenceRun& run : call.sequences) tokens += static_cast<int64_t>(run.token_ids.size());
  return tokens;
}

absl::Status Prefixed(const absl::Status& status, absl::string_view prefix) {
  return absl::Status(status.code(), absl::StrCat(prefix, status.message()));
}

absl::Status CheckSequence(const ModelInfo& model, const SequenceRun& run) {
  const auto length = static_cast<int64_t>(run.token_ids.size());
  if (length == 0) return absl::InvalidArgumentError("token_ids is empty, expected at least one token");
  if (run.start_pos < 0 || run.start_pos > model.limits.position_limit - length) {
    return absl::OutOfRangeError(absl::StrCat("start_pos ", run.start_pos, " with ", length,
                                              " tokens: positions are [0, ", model.limits.position_limit, ")"));
  }
  if (!run.token_mask.empty() && run.token_mask.size() != run.token_ids.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_mask has ", run.token_mask.size(), " bytes, expected one per token: ", length));
  }
  if (static_cast<int64_t>(run.session.size()) > model.limits.max_session_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("session has ", run.session.size(), " bytes, at most ",
                                                   model.limits.max_session_bytes, " are allowed"));
  }
  if (run.history == nullptr) {
    if (!run.lookback.empty() && static_cast<int64_t>(run.lookback.size()) != model.lookback_length()) {
      return absl::InvalidArgumentError(absl::StrCat("lookback has ", run.lookback.size(), " ids, expected N-1 = ",
                                                     model.lookback_length(), ", newest first, -1 = dead"));
    }
    return absl::OkStatus();
  }
  if (!run.lookback.empty()) {
    return absl::InvalidArgumentError("both a history and a lookback are given: the history makes the look-back");
  }
  if (run.history->max_ngram() != model.max_ngram) {
    return absl::InvalidArgumentError(absl::StrCat("the history was made for ", run.history->max_ngram(),
                                                   "-grams, the model has ", model.max_ngram, "-grams"));
  }
  return run.history->CheckWrite(run.start_pos, run.token_ids, run.token_mask);
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
      return absl::InvalidArgumentError(
          absl::StrCat(at, ".layer_id is ", layer.layer_id, ", not a layer of the model"));
    }
    for (size_t j = 0; j < i; ++j) {
      if (call.layers[j].layer_id == layer.layer_id) {
        return absl::InvalidArgumentError(absl::StrCat(at, ".layer_id ", layer.layer_id, " is also layers[", j, "]"));
      }
    }
    if (static_cast<int64_t>(layer.highway.size()) != in_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          at, ".highway has ", layer.highway.size(), " bytes, expected ", in_bytes, " for ", tokens, " tokens, hc ",
          model.hc, ", dim ", model.dim, ", form ", FormName(call.form), ", ", HighwayDtypeName(call.dtype)));
    }
    if (static_cast<int64_t>(layer.out.size()) != out_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(at, ".out has room for ", layer.out.size(), " bytes, expected ",
                                                     out_bytes, " for ", tokens, " tokens, form ",
                                                     FormName(call.form)));
    }
  }
  return absl::OkStatus();
}

// A server would refuse the same (MESSAGE_BYTES), but only after the bytes went over the network.
absl::Status CheckMessageBytes(absl::string_view what, int64_t bytes, int64_t max_message_bytes) {
  if (bytes <= max_message_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the ", what, " would carry ", bytes,
                                                   " bytes of tensors, the limit of one message is ", max_message_bytes,
                                                   ": split the call"));
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

absl::StatusOr<v1::ApplyRequest> EncodeApply(const ModelInfo& model, int64_t max_message_bytes, const ApplyCall& call) {
  if (call.sequences.empty()) return absl::InvalidArgumentError("the call has no sequences, expected at least one");
  if (call.layers.empty()) return absl::InvalidArgumentError("the call has no layers, expected at least one");
  for (size_t i = 0; i < call.sequences.size(); ++i) {
    if (absl::Status status = CheckSequence(model, call.sequences[i]); !status.ok()) {
      return Prefixed(status, absl::StrCat("sequences[", i, "]: "));
    }
  }
  if (absl::Status status = CheckHistoriesDiffer(call); !status.ok()) return status;
  const int64_t tokens = TokensOf(call);
  if (tokens > model.limits.max_call_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the call has ", tokens, " tokens, the limit is ", model.limits.max_call_tokens, ": split it"));
  }
  if (absl::Status status = CheckLayers(model, call, tokens); !status.ok()) return status;
  const auto layers = static_cast<int64_t>(call.layers.size());
  const int64_t out_bytes = layers * OutputBytes(model, call.form, call.dtype, tokens);
  const int64_t in_bytes = call.form == Form::kKv ? 0 : out_bytes;
  if (absl::Status status = CheckMessageBytes("request", in_bytes, max_message_bytes); !status.ok()) return status;
  if (absl::Status status = CheckMessageBytes("reply", out_bytes, max_message_bytes); !status.ok()) return status;

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
    return absl::ResourceExhaustedError(absl::StrCat("ids, masks and names of the call take ", envelope,
                                                     " bytes, the limit is ", kMaxEnvelopeBytes, ": split the call"));
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
