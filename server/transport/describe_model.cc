#include "server/transport/describe_model.h"

#include <utility>

namespace engram {
namespace {

void AddCost(v1::GetModelResponse& reply, v1::Form form, v1::HighwayDtype dtype, int64_t request, int64_t response) {
  v1::FormCost& cost = *reply.add_form_costs();
  cost.set_form(form);
  cost.set_highway_dtype(dtype);
  cost.set_request_bytes(request);
  cost.set_reply_bytes(response);
}

std::string Bytes(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

}  // namespace

v1::GetModelResponse DescribeModel(const EngramModel& model, const CallLimits& limits, const ServerIdentity& identity) {
  v1::GetModelResponse reply;
  const EngramGeometry& g = model.geometry();
  v1::Geometry& geometry = *reply.mutable_geometry();
  geometry.set_dim(g.dim);
  geometry.set_hc(g.copies);
  geometry.set_head_dim(static_cast<int32_t>(g.head_dim));
  geometry.set_max_ngram(g.max_ngram);
  geometry.set_heads(g.heads);
  geometry.set_n_hash_cols(g.columns);
  geometry.set_vocab(g.vocab);
  geometry.set_compressed_vocab(g.compressed_vocab);
  geometry.set_pad_id(g.pad_id);
  geometry.set_rms_norm_eps(g.eps);
  for (const EngramLayer& layer : model.layers()) {
    v1::Layer& out = *reply.add_layers();
    out.set_layer_id(static_cast<int32_t>(layer.layer_id));
    out.set_rows(layer.table.rows);
    out.set_row_type(std::string(GgufTypeName(layer.table_type)));
    out.set_row_bytes(static_cast<int32_t>(kernels::kQ2KBlockBytes));
    out.set_wkv_type(std::string(GgufTypeName(layer.wkv_type)));
  }
  reply.set_hash_digest(Bytes(model.hash_digest()));
  reply.set_config_digest(Bytes(model.config_digest()));
  if (model.content_digest().has_value()) reply.set_content_digest(Bytes(*model.content_digest()));
  reply.set_numerics_id(identity.numerics_id);
  reply.set_server_epoch(identity.epoch);

  v1::Limits& out = *reply.mutable_limits();
  out.set_max_call_tokens(limits.max_call_tokens);
  out.set_max_message_bytes(limits.max_message_bytes);
  out.set_position_limit(limits.position_limit);
  out.set_session_window(limits.session_window);
  out.set_max_session_bytes(limits.max_session_bytes);
  out.set_prepare_memory_bytes(limits.prepare_memory_bytes);
  out.set_ticket_ttl_ms(limits.ticket_ttl_ms);

  const int64_t f32 = g.highway_values() * 4;
  const int64_t bf16 = g.highway_values() * 2;
  AddCost(reply, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32, f32, f32);
  AddCost(reply, v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_BF16, bf16, bf16);
  const int64_t gates = int64_t{g.copies} * 4;
  for (const auto& [dtype, up] : {std::pair{v1::HIGHWAY_DTYPE_F32, f32}, {v1::HIGHWAY_DTYPE_BF16, bf16}}) {
    AddCost(reply, v1::FORM_UPDATE, dtype, up, gates + g.dim * 2);
    AddCost(reply, v1::FORM_GATE, dtype, up, gates);
  }
  AddCost(reply, v1::FORM_KV, v1::HIGHWAY_DTYPE_UNSPECIFIED, 0, g.outputs() * 2);
  AddCost(reply, v1::FORM_ROWS_NATIVE, v1::HIGHWAY_DTYPE_UNSPECIFIED, 0, g.columns * kernels::kQ2KBlockBytes);
  AddCost(reply, v1::FORM_ROWS_BF16, v1::HIGHWAY_DTYPE_UNSPECIFIED, 0, g.inputs() * 2);
  reply.set_backend(identity.backend);
  reply.set_isa(identity.isa);
  reply.set_residency(identity.residency);
  reply.set_server_version(ENGRAM_VERSION);
  return reply;
}

}  // namespace engram
