// engram-cli model: everything GetModel says.

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/cli/commands.h"
#include "nlohmann/json.hpp"

namespace engram::client {
namespace {

std::string FormLabel(const ModelInfo::FormCost& cost) {
  if (!cost.dtype.has_value()) return std::string(FormName(cost.form));
  return absl::StrCat(FormName(cost.form), " ", HighwayDtypeName(*cost.dtype));
}

void PrintJson(const ModelInfo& model) {
  nlohmann::ordered_json json;
  json["server_version"] = model.server_version;
  json["server_epoch"] = absl::StrCat(absl::Hex(model.server_epoch, absl::kZeroPad16));
  json["backend"] = model.backend;
  json["isa"] = model.isa;
  json["residency"] = model.residency;
  json["numerics_id"] = model.numerics_id;
  json["hash_digest"] = absl::BytesToHexString(model.hash_digest);
  json["config_digest"] = absl::BytesToHexString(model.config_digest);
  json["content_digest"] = absl::BytesToHexString(model.content_digest);
  json["geometry"] = {{"dim", model.dim},           {"hc", model.hc},
                      {"head_dim", model.head_dim}, {"max_ngram", model.max_ngram},
                      {"heads", model.heads},       {"n_hash_cols", model.n_hash_cols},
                      {"vocab", model.vocab},       {"compressed_vocab", model.compressed_vocab},
                      {"pad_id", model.pad_id},     {"rms_norm_eps", model.rms_norm_eps}};
  for (const ModelInfo::Layer& layer : model.layers) {
    json["layers"].push_back({{"layer_id", layer.layer_id},
                              {"rows", layer.rows},
                              {"row_type", layer.row_type},
                              {"row_bytes", layer.row_bytes},
                              {"table_bytes", layer.rows * layer.row_bytes},
                              {"wkv_type", layer.wkv_type}});
  }
  json["limits"] = {{"max_call_tokens", model.limits.max_call_tokens},
                    {"max_message_bytes", model.limits.max_message_bytes},
                    {"position_limit", model.limits.position_limit},
                    {"session_window", model.limits.session_window},
                    {"max_session_bytes", model.limits.max_session_bytes},
                    {"prepare_memory_bytes", model.limits.prepare_memory_bytes},
                    {"ticket_ttl_ms", model.limits.ticket_ttl_ms}};
  json["suggested_form"] = FormName(model.suggested_form);
  json["form_costs"] = nlohmann::ordered_json::array();
  for (const ModelInfo::FormCost& cost : model.form_costs) {
    nlohmann::ordered_json entry = {{"form", FormName(cost.form)}};
    if (cost.dtype.has_value()) entry["highway_dtype"] = HighwayDtypeName(*cost.dtype);
    entry["request_bytes"] = cost.request_bytes;
    entry["reply_bytes"] = cost.reply_bytes;
    json["form_costs"].push_back(std::move(entry));
  }
  // Replace, not throw, where a server sent bytes that are no text.
  const std::string text = json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  absl::PrintF("%s\n", text);
}

void PrintRow(absl::string_view name, absl::string_view value) { absl::PrintF("%-18s %s\n", name, value); }

void PrintTable(const std::string& target, const ModelInfo& model) {
  PrintRow("server", absl::StrCat(target, ", version ", Printable(model.server_version)));
  PrintRow("epoch", absl::StrCat(absl::Hex(model.server_epoch, absl::kZeroPad16)));
  PrintRow("backend", absl::StrCat(Printable(model.backend), " (", Printable(model.isa), "), tables in ",
                                   Printable(model.residency)));
  PrintRow("numerics id", Printable(model.numerics_id));
  PrintRow("hash digest", absl::BytesToHexString(model.hash_digest));
  PrintRow("config digest", absl::BytesToHexString(model.config_digest));
  PrintRow("content digest", model.content_digest.empty() ? "not known (tables are mapped, and have no sidecar)"
                                                          : absl::BytesToHexString(model.content_digest));
  absl::PrintF("\n");
  PrintRow("dim, hc", absl::StrCat(model.dim, ", ", model.hc));
  PrintRow("n-grams", absl::StrFormat("up to %d, %d heads each: %d rows of %d values per token and layer",
                                      model.max_ngram, model.heads, model.n_hash_cols, model.head_dim));
  PrintRow("vocab", absl::StrFormat("%d, %d compressed, pad %d", model.vocab, model.compressed_vocab, model.pad_id));
  PrintRow("rms norm eps", absl::StrFormat("%g", model.rms_norm_eps));
  absl::PrintF("\n%-8s %14s  %-10s %10s %12s  %s\n", "layer", "rows", "row type", "row bytes", "table", "wkv type");
  for (const ModelInfo::Layer& layer : model.layers) {
    absl::PrintF("%-8d %14d  %-10s %10d %12s  %s\n", layer.layer_id, layer.rows, Printable(layer.row_type),
                 layer.row_bytes, ByteSize(layer.rows * layer.row_bytes), Printable(layer.wkv_type));
  }
  if (!model.form_costs.empty()) {
    absl::PrintF("\n%-16s %16s %16s   per token and layer\n", "form", "request bytes", "reply bytes");
    for (const ModelInfo::FormCost& cost : model.form_costs) {
      absl::PrintF("%-16s %16d %16d\n", FormLabel(cost), cost.request_bytes, cost.reply_bytes);
    }
  }
  absl::PrintF("\n");
  PrintRow("tokens per call", absl::StrCat(model.limits.max_call_tokens));
  PrintRow("message", absl::StrFormat("%s of tensors", ByteSize(model.limits.max_message_bytes)));
  PrintRow("positions", absl::StrCat("below ", model.limits.position_limit));
  PrintRow("sessions", absl::StrFormat("the last %d positions, names of at most %d bytes", model.limits.session_window,
                                       model.limits.max_session_bytes));
  PrintRow("prepared results",
           absl::StrFormat("%s, tickets are good for %s", ByteSize(model.limits.prepare_memory_bytes),
                           absl::FormatDuration(absl::Milliseconds(model.limits.ticket_ttl_ms))));
  PrintRow("suggested form", FormName(model.suggested_form));
}

// Where there is more than one: which of them serve.
void PrintReplicas(const Client& client) {
  const std::vector<ReplicaStatus> replicas = ReplicasAsked(client);
  if (replicas.size() < 2) return;
  absl::PrintF("\n");
  for (const ReplicaStatus& replica : replicas) {
    const std::string error = replica.last_error.ok() ? "" : absl::StrCat(": ", replica.last_error.message());
    PrintRow("replica", absl::StrCat(replica.name, ", ", ReplicaStateName(replica.state), Printable(error)));
  }
}

}  // namespace

int RunModel(const ConnectionFlags& connection, const ModelFlags& flags) {
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  if (flags.json) {
    PrintJson((*client)->model());
    PrintExcluded(**client);
  } else {
    PrintTable(absl::StrJoin(connection.targets, ", "), (*client)->model());
    PrintReplicas(**client);
  }
  return kExitOk;
}

}  // namespace engram::client
