#include "client/model_info.h"

#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace engram::client {
namespace {

constexpr int64_t kMaxInt32 = 0x7fffffff;

// Bounds of what is believed. The widest product is tokens * (hc + 1) * dim * 4 <= 2^31 * 9 * 2^20 * 4 < 2^57.
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

}  // namespace

int64_t BytesOf(HighwayDtype dtype) { return dtype == HighwayDtype::kBf16 ? 2 : 4; }

absl::string_view FormName(Form form) { return form == Form::kKv ? "kv" : "highway"; }

absl::string_view HighwayDtypeName(HighwayDtype dtype) { return dtype == HighwayDtype::kBf16 ? "bf16" : "f32"; }

bool ModelInfo::HasLayer(int32_t layer_id) const {
  for (const Layer& layer : layers) {
    if (layer.layer_id == layer_id) return true;
  }
  return false;
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
  info.limits = {limits.max_call_tokens(), limits.max_message_bytes(), limits.position_limit(), limits.session_window(),
                 limits.max_session_bytes()};
  for (const v1::FormCost& cost : response.form_costs()) {
    // A newer server may offer forms this client does not know.
    if (cost.form() != v1::FORM_HIGHWAY && cost.form() != v1::FORM_KV) continue;
    info.form_costs.push_back(
        {cost.form() == v1::FORM_KV ? Form::kKv : Form::kHighway,
         cost.highway_dtype() == v1::HIGHWAY_DTYPE_BF16 ? HighwayDtype::kBf16 : HighwayDtype::kF32,
         cost.request_bytes(), cost.reply_bytes()});
  }
  info.hash_digest = response.hash_digest();
  info.config_digest = response.config_digest();
  info.content_digest = response.content_digest();
  info.numerics_id = response.numerics_id();
  info.server_epoch = response.server_epoch();
  info.backend = response.backend();
  info.residency = response.residency();
  info.server_version = response.server_version();
  return info;
}

}  // namespace engram::client
