#include "tests/client/sample_model.h"

#include <string>

namespace engram::client {

v1::GetModelResponse SampleModelResponse() {
  v1::GetModelResponse response;
  v1::Geometry* geometry = response.mutable_geometry();
  geometry->set_dim(4);
  geometry->set_hc(2);
  geometry->set_head_dim(256);
  geometry->set_max_ngram(4);
  geometry->set_heads(8);
  geometry->set_n_hash_cols(24);
  geometry->set_vocab(100);
  geometry->set_compressed_vocab(90);
  geometry->set_pad_id(2);
  geometry->set_rms_norm_eps(1e-20f);
  for (int layer_id : {1, 14}) {
    v1::Layer* layer = response.add_layers();
    layer->set_layer_id(layer_id);
    layer->set_rows(1000);
    layer->set_row_type("Q2_K");
    layer->set_row_bytes(84);
    layer->set_wkv_type("Q2_K");
  }
  v1::Limits* limits = response.mutable_limits();
  limits->set_max_call_tokens(64);
  limits->set_max_message_bytes(64 << 20);
  limits->set_position_limit(1 << 20);
  limits->set_session_window(8192);
  limits->set_max_session_bytes(64);
  limits->set_prepare_memory_bytes(1 << 30);
  limits->set_ticket_ttl_ms(10000);
  response.set_hash_digest(std::string(32, '\x11'));
  response.set_config_digest(std::string(32, '\x22'));
  response.set_numerics_id("test");
  response.set_server_epoch(7);
  return response;
}

ModelInfo SampleModel() { return *DecodeModelInfo(SampleModelResponse()); }

}  // namespace engram::client
