// What a server says it serves, decoded from GetModelResponse and checked.
//
// A server is not trusted with the client's arithmetic: every size is bounded here so that products such as
// tokens * hc * dim * 4 fit int64 with room to spare, and a reply's size can be computed before it is believed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engram/v1/engram.pb.h"

namespace engram::client {

// What a reply holds, i.e. where the work is cut between server and worker (docs/api.md).
enum class Form {
  kHighway,
  kKv,
  kRowsNative,
  kRowsBf16,
  kUpdate,
  kGate,
  kAuto,  // never on the wire: what form_choice.h makes of it
};

// Of the highway on the wire, little endian.
enum class HighwayDtype { kF32, kBf16 };

int64_t BytesOf(HighwayDtype dtype);                     // 4 or 2
absl::string_view FormName(Form form);                   // "highway", "rows-native"
absl::string_view HighwayDtypeName(HighwayDtype dtype);  // "f32", "bf16"

v1::Form WireForm(Form form);  // kAuto has none: FORM_UNSPECIFIED
v1::HighwayDtype WireDtype(HighwayDtype dtype);

// The envelope of a message (names, ids, masks, tags): not counted in Limits.max_message_bytes, and at most this.
inline constexpr int64_t kMaxEnvelopeBytes = int64_t{1} << 20;

struct ModelInfo {
  struct Layer {
    int32_t layer_id = 0;
    int64_t rows = 0;      // of the table
    std::string row_type;  // "Q2_K"
    int32_t row_bytes = 0;
    std::string wkv_type;
  };

  struct Limits {
    int64_t max_call_tokens = 0;
    int64_t max_message_bytes = 0;  // of one message, its envelope not counted
    int64_t position_limit = 0;
    int64_t session_window = 0;
    int32_t max_session_bytes = 0;
    int64_t prepare_memory_bytes = 0;  // of all prepared results
    int64_t ticket_ttl_ms = 0;
  };

  // Bytes per token and layer, as the server states them: for people; the client computes its own.
  struct FormCost {
    Form form = Form::kHighway;
    std::optional<HighwayDtype> dtype = {};  // none where the form sends no highway
    int64_t request_bytes = 0;
    int64_t reply_bytes = 0;
  };

  int64_t dim = 0;
  int32_t hc = 0;
  int32_t head_dim = 0;
  int32_t max_ngram = 0;  // N
  int32_t heads = 0;
  int32_t n_hash_cols = 0;
  int64_t vocab = 0;
  int64_t compressed_vocab = 0;
  int32_t pad_id = 0;
  float rms_norm_eps = 0;
  std::vector<Layer> layers;  // ascending by layer_id
  Limits limits;
  std::vector<FormCost> form_costs;
  std::string hash_digest;     // 32 bytes
  std::string config_digest;   // 32 bytes
  std::string content_digest;  // 32 bytes; empty: not known
  std::string numerics_id;
  uint64_t server_epoch = 0;
  std::string backend;
  std::string isa;  // "avx512_bf16"
  std::string residency;
  std::string server_version;
  Form suggested_form = Form::kHighway;  // kHighway or kUpdate

  int lookback_length() const { return max_ngram - 1; }
  const Layer* FindLayer(int32_t layer_id) const;  // null: not one of this model's
  bool HasLayer(int32_t layer_id) const { return FindLayer(layer_id) != nullptr; }

  // Bytes a token takes of one layer, in the pieces that replies are made of. With the bounds of DecodeModelInfo none
  // passes 2^39.
  int64_t HighwayTokenBytes(HighwayDtype dtype) const { return hc * dim * BytesOf(dtype); }
  int64_t KvTokenBytes() const { return (hc + 1) * dim * 2; }
  int64_t GatesTokenBytes() const { return int64_t{hc} * 4; }
  int64_t ValueTokenBytes() const { return dim * 2; }
  int64_t RowBf16Bytes() const { return int64_t{head_dim} * 2; }  // of one of n_hash_cols rows
};

// INTERNAL, naming the field, its value and the bound, when the server's answer cannot be.
absl::StatusOr<ModelInfo> DecodeModelInfo(const v1::GetModelResponse& response);

}  // namespace engram::client
