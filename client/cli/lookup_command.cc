// engram-cli lookup: rows or kv of tokens, without a highway.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/cli/commands.h"
#include "client/cli/output_file.h"
#include "client/cli/tensor_text.h"
#include "client/cli/token_inputs.h"

namespace engram::client {
namespace {

Form FormOf(const std::string& name) {
  for (const Form form : {Form::kKv, Form::kRowsBf16}) {
    if (name == FormName(form)) return form;
  }
  return Form::kRowsNative;
}

int64_t TokenBytes(const ModelInfo& model, Form form, int32_t layer_id) {
  if (form == Form::kKv) return model.KvTokenBytes();
  if (form == Form::kRowsBf16) return model.n_hash_cols * model.RowBf16Bytes();
  const ModelInfo::Layer* layer = model.FindLayer(layer_id);
  return layer == nullptr ? 0 : int64_t{model.n_hash_cols} * layer->row_bytes;
}

void PrintLayer(const ModelInfo& model, Form form, int32_t layer_id, int64_t tokens, const std::string& out) {
  if (form == Form::kRowsNative) {
    const ModelInfo::Layer* layer = model.FindLayer(layer_id);
    absl::PrintF("layer %-4d rows [%d, %d, %d] bytes of %s  first", layer_id, tokens, model.n_hash_cols,
                 layer->row_bytes, Printable(layer->row_type));
    for (size_t i = 0; i < 8 && i < out.size(); ++i) absl::PrintF(" %02x", static_cast<uint8_t>(out[i]));
    absl::PrintF("\n");
    return;
  }
  const int64_t values = static_cast<int64_t>(out.size()) / 2;
  const double rms = Rms(values, [&](int64_t i) { return double{ValueAt(out, HighwayDtype::kBf16, i)}; });
  const std::string shape = form == Form::kKv
                                ? absl::StrFormat("kv [%d, %d]", tokens, model.dim * (model.hc + 1))
                                : absl::StrFormat("rows [%d, %d, %d]", tokens, model.n_hash_cols, model.head_dim);
  absl::PrintF("layer %-4d %s bf16  rms %.6g  first%s\n", layer_id, shape, rms, FirstValues(out, HighwayDtype::kBf16));
}

// Returns the exit code, having printed what was wrong.
int Lookup(Client& client, const ConnectionFlags& connection, const LookupFlags& flags, const TokenInputs& inputs,
           OutputFile& file) {
  const ModelInfo& model = client.model();
  LookupCall call;
  call.form = FormOf(flags.form);
  call.timeout = absl::Seconds(connection.timeout_secs);
  call.sequences = {inputs.Run(flags)};
  const std::vector<int32_t> layer_ids = inputs.LayersOf(model);
  std::vector<std::string> outputs(layer_ids.size());
  for (size_t i = 0; i < layer_ids.size(); ++i) {
    outputs[i].assign(static_cast<size_t>(inputs.count() * TokenBytes(model, call.form, layer_ids[i])), '\0');
    call.layers.push_back({.layer_id = layer_ids[i], .out = absl::MakeSpan(outputs[i])});
  }
  const absl::Time start = absl::Now();
  if (absl::Status status = client.Lookup(call); !status.ok()) return PrintError(status);
  const double milliseconds = absl::ToDoubleMilliseconds(absl::Now() - start);
  absl::PrintF("%s at position %d, %s, form %s: %.3f ms\n", Count(inputs.count(), "token"), flags.start_pos,
               Count(static_cast<int64_t>(layer_ids.size()), "layer"), FormName(call.form), milliseconds);
  for (size_t i = 0; i < layer_ids.size(); ++i) PrintLayer(model, call.form, layer_ids[i], inputs.count(), outputs[i]);
  if (flags.out_file.empty()) return kExitOk;
  if (absl::Status status = file.Write(outputs); !status.ok()) return PrintMistake(status.message());
  return kExitOk;
}

}  // namespace

int RunLookup(const ConnectionFlags& connection, const LookupFlags& flags) {
  absl::StatusOr<TokenInputs> inputs = ReadTokenInputs(flags);
  if (!inputs.ok()) return PrintMistake(inputs.status().message());
  OutputFile file;
  if (!flags.out_file.empty()) {
    if (absl::Status status = file.Open(flags.out_file); !status.ok()) return PrintMistake(status.message());
  }
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  PrintExcluded(**client);
  return Lookup(**client, connection, flags, *inputs, file);
}

}  // namespace engram::client
