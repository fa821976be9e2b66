#include "client/model_info.h"

#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace engram::client {
namespace {

constexpr int64_t kMaxInt32 = 0x7fffffff;

// Bounds of what is believed. The widest product is the native rows of a call: 2^24 tokens (checked_call.h) of
// 7 * 2^16 columns of 2^20 bytes, below 2^63.
constexpr int64_t kMaxDim = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kDigestBytes = 32;

// Collects the first fault; later ones would only follow from it.
class FieldCheck {
 public:
  void InRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
    if (!status_.ok() || (value >= low && value <= high)) return;
    Fail(absl::StrCat(field, " is ", value, ", expected [", low, ", ", high, "]"));
  }

  void Digest(absl::string_view field, const std::string& value) {
    InRange(absl::StrCat(field, ", in bytes,"), static_cast<int64_t>(value.size()), kDigestBytes, kDigestBytes);
  }

  void True(bool condition, absl::string_view text) {
    if (status_.ok() && !condition) Fail(text);
  }

  const absl::Status& status() const { return status_; }

 private:
  void Fail(absl::string_view text) {
    status_ = absl::InternalError(absl::StrCat("the server's GetModel reply: ", text));
  }

  absl::Status status_;
};

constexpr Form kWireForms[] = {Form::kHighway,  Form::kKv,     Form::kRowsNative,
                               Form::kRowsBf16, Form::kUpdate, Form::kGate};

// Null where this client does not know it: a newer server may offer more.
const Form* FormOf(v1::Form wire) {
  for (const Form& form : kWireForms) {
    if (WireForm(form) == wire) return &form;
  }
  return nullptr;
}

std::optional<HighwayDtype> DtypeOf(v1::HighwayDtype wire) {
  if (wire == v1::HIGHWAY_DTYPE_F32) return HighwayDtype::kF32;
  if (wire == v1::HIGHWAY_DTYPE_BF16) return HighwayDtype::kBf16;
  return std::nullopt;
}

}  // namespace

int64_t BytesOf(HighwayDtype dtype) { return dtype == HighwayDtype::kBf16 ? 2 : 4; }

absl::string_view FormName(Form form) {
  switch (form) {
    case Form::kHighway:
      return "highway";
    case Form::kKv:
      return "kv";
    case Form::kRowsNative:
      return "rows-native";
    case Form::kRowsBf16:
      return "rows-bf16";
    case Form::kUpdate:
      return "update";
    case Form::kGate:
      return "gate";
    case Form::kAuto:
      return "auto";
  }
  return "";
}

v1::Form WireForm(Form form) {
  switch (form) {
    case Form::kHighway:
      return v1::FORM_HIGHWAY;
    case Form::kKv:
      return v1::FORM_KV;
    case Form::kRowsNative:
      return v1::FORM_ROWS_NATIVE;
    case Form::kRowsBf16:
      return v1::FORM_ROWS_BF16;
    case Form::kUpdate:
      return v1::FORM_UPDATE;
    case Form::kGate:
      return v1::FORM_GATE;
    case Form::kAuto:
      break;
  }
  return v1::FORM_UNSPECIFIED;
}

v1::HighwayDtype WireDtype(HighwayDtype dtype) {
  return dtype == HighwayDtype::kBf16 ? v1::HIGHWAY_DTYPE_BF16 : v1::HIGHWAY_DTYPE_F32;
}

absl::string_view HighwayDtypeName(HighwayDtype dtype) { return dtype == HighwayDtype::kBf16 ? "bf16" : "f32"; }

const ModelInfo::Layer* ModelInfo::FindLayer(int32_t layer_id) const {
  for (const Layer& layer : layers) {
    if (layer.layer_id == layer_id) return &layer;
  }
  return nullptr;
}

absl::StatusOr<ModelInfo> DecodeModelInfo(const v1::GetModelResponse& response) {
  const v1::Geometry& geometry = response.geometry();
  const v1::Limits& limits = response.limits();
  FieldCheck check;
  check.InRange("geometry.dim", geometry.dim(), 1, kMaxDim);
  check.InRange("geometry.hc", geometry.hc(), 1, 8);
  check.InRange("geometry.head_dim", geometry.head_dim(), 1, 65536);
  check.InRange("geometry.max_ngram", geometry.max_ngram(), 2, 8);
  check.InRange("geometry.heads", geometry.heads(), 1, 65536);
  check.InRange("geometry.vocab", geometry.vocab(), 1, kMaxInt32);
  check.InRange("geometry.compressed_vocab", geometry.compressed_vocab(), 1, kMaxInt32);
  check.InRange("geometry.pad_id", geometry.pad_id(), 0, kMaxInt32);
  if (check.status().ok()) {
    const int64_t cols = (geometry.max_ngram() - 1) * int64_t{geometry.heads()};
    check.InRange("geometry.n_hash_cols", geometry.n_hash_cols(), cols, cols);
  }
  check.True(std::isfinite(geometry.rms_norm_eps()) && geometry.rms_norm_eps() >= 0,
             absl::StrCat("geometry.rms_norm_eps is ", geometry.rms_norm_eps(), ", expected a finite number >= 0"));
  check.InRange("the number of layers", response.layers_size(), 1, kMaxLayers);
  int64_t previous = -1;
  for (int i = 0; i < response.layers_size() && check.status().ok(); ++i) {
    const v1::Layer& layer = response.layers(i);
    const std::string at = absl::StrCat("layers[", i, "].");
    check.InRange(absl::StrCat(at, "layer_id"), layer.layer_id(), previous + 1, kMaxInt32);
    check.InRange(absl::StrCat(at, "rows"), layer.rows(), 1, int64_t{1} << 40);
    check.InRange(absl::StrCat(at, "row_bytes"), layer.row_bytes(), 1, int64_t{1} << 20);
    previous = layer.layer_id();
  }
  check.Digest("hash_digest", response.hash_digest());
  check.Digest("config_digest", response.config_digest());
  if (!response.content_digest().empty()) check.Digest("content_digest", response.content_digest());
  check.True(response.server_epoch() != 0, "server_epoch is 0, expected a random number");
  check.InRange("limits.max_call_tokens", limits.max_call_tokens(), 1, kMaxInt32);
  // A protobuf message ends at 2^31 - 1 bytes, envelope included.
  check.InRange("limits.max_message_bytes", limits.max_message_bytes(), 1, kMaxInt32 - kMaxEnvelopeBytes);
  check.InRange("limits.position_limit", limits.position_limit(), 1, int64_t{1} << 40);
  check.InRange("limits.session_window", limits.session_window(), 0, int64_t{1} << 40);
  check.InRange("limits.max_session_bytes", limits.max_session_bytes(), 0, 65536);
  check.InRange("limits.prepare_memory_bytes", limits.prepare_memory_bytes(), 0, int64_t{1} << 50);
  check.InRange("limits.ticket_ttl_ms", limits.ticket_ttl_ms(), 0, int64_t{1} << 40);
  if (!check.status().ok()) return check.status();

  ModelInfo info;
  info.dim = geometry.dim();
  info.hc = geometry.hc();
  info.head_dim = geometry.head_dim();
  info.max_ngram = geometry.max_ngram();
  info.heads = geometry.heads();
  info.n_hash_cols = geometry.n_hash_cols();
  info.vocab = geometry.vocab();
  info.compressed_vocab = geometry.compressed_vocab();
  info.pad_id = geometry.pad_id();
  info.rms_norm_eps = geometry.rms_norm_eps();
  for (const v1::Layer& layer : response.layers()) {
    info.layers.push_back({layer.layer_id(), layer.rows(), layer.row_type(), layer.row_bytes(), layer.wkv_type()});
  }
  info.limits = {limits.max_call_tokens(), limits.max_message_bytes(), limits.position_limit(),
                 limits.session_window(),  limits.max_session_bytes(), limits.prepare_memory_bytes(),
                 limits.ticket_ttl_ms()};
  for (const v1::FormCost& cost : response.form_costs()) {
    const Form* form = FormOf(cost.form());
    if (form == nullptr) continue;
    info.form_costs.push_back({*form, DtypeOf(cost.highway_dtype()), cost.request_bytes(), cost.reply_bytes()});
  }
  info.hash_digest = response.hash_digest();
  info.config_digest = response.config_digest();
  info.content_digest = response.content_digest();
  info.numerics_id = response.numerics_id();
  info.server_epoch = response.server_epoch();
  info.backend = response.backend();
  info.isa = response.isa();
  info.residency = response.residency();
  info.server_version = response.server_version();
  if (response.suggested_form() == v1::FORM_UPDATE) info.suggested_form = Form::kUpdate;
  return info;
}

}  // namespace engram::client
