// engram-cli apply: one call by hand.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/bf16.h"
#include "client/cli/commands.h"
#include "client/cli/output_file.h"
#include "client/cli/tensor_text.h"
#include "client/cli/token_inputs.h"

namespace engram::client {
namespace {

void AppendValue(float value, HighwayDtype dtype, std::string* bytes) {
  if (dtype == HighwayDtype::kBf16) {
    const uint16_t bits = FloatToBf16(value);
    bytes->append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  } else {
    bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
}

// The highway of every layer, each `layer_bytes`: from the file, which holds one for all or one per layer, or filled.
absl::StatusOr<std::vector<std::string>> ReadHighways(const ApplyFlags& flags, HighwayDtype dtype, size_t layers,
                                                      int64_t layer_bytes) {
  if (flags.highway_file.empty()) {
    std::string filled;
    filled.reserve(layer_bytes);
    while (static_cast<int64_t>(filled.size()) < layer_bytes) {
      AppendValue(static_cast<float>(flags.highway_fill), dtype, &filled);
    }
    return std::vector<std::string>(layers, filled);
  }
  const int64_t most = layer_bytes * static_cast<int64_t>(layers);
  absl::StatusOr<std::string> bytes = ReadFile(flags.highway_file, most);
  if (!bytes.ok()) return bytes.status();
  const auto size = static_cast<int64_t>(bytes->size());
  if (size == layer_bytes) return std::vector<std::string>(layers, *bytes);
  if (size == most) {
    std::vector<std::string> highways;
    for (size_t i = 0; i < layers; ++i) highways.push_back(bytes->substr(i * layer_bytes, layer_bytes));
    return highways;
  }
  const std::string has = size > most ? absl::StrCat("more than ", most) : absl::StrCat(size);
  return absl::InvalidArgumentError(absl::StrCat(flags.highway_file, " has ", has, " bytes, expected ", layer_bytes,
                                                 " (one highway for all layers) or ", layers, " times that"));
}

void PrintKv(const ModelInfo& model, const LayerRun& layer, int64_t tokens) {
  const absl::string_view out(layer.out.data(), layer.out.size());
  const int64_t width = model.dim * (model.hc + 1);
  const int64_t keys = model.dim * model.hc;
  const auto rms = [&](int64_t low, int64_t high) {
    const int64_t span = high - low;
    return Rms(tokens * span,
               [&](int64_t i) { return double{ValueAt(out, HighwayDtype::kBf16, i / span * width + low + i % span)}; });
  };
  absl::PrintF("layer %-4d kv [%d, %d] bf16  rms of keys %.6g, of values %.6g  first%s\n", layer.layer_id, tokens,
               width, rms(0, keys), rms(keys, width), FirstValues(out, HighwayDtype::kBf16));
}

void PrintGates(const ModelInfo& model, const LayerRun& layer, int64_t tokens) {
  const absl::string_view gates(reinterpret_cast<const char*>(layer.gates.data()), layer.gates.size() * sizeof(float));
  const auto gate = [&](int64_t i) { return double{layer.gates[static_cast<size_t>(i)]}; };
  absl::PrintF("layer %-4d gates [%d, %d] f32  rms %.6g  first%s\n", layer.layer_id, tokens, model.hc,
               Rms(tokens * model.hc, gate), FirstValues(gates, HighwayDtype::kF32));
  if (layer.value.empty()) return;
  const absl::string_view value(reinterpret_cast<const char*>(layer.value.data()),
                                layer.value.size() * sizeof(uint16_t));
  const double rms = Rms(tokens * model.dim, [&](int64_t i) { return double{ValueAt(value, HighwayDtype::kBf16, i)}; });
  absl::PrintF("layer %-4d value [%d, %d] bf16  rms %.6g  first%s\n", layer.layer_id, tokens, model.dim, rms,
               FirstValues(value, HighwayDtype::kBf16));
}

void PrintHighway(const ModelInfo& model, HighwayDtype dtype, const LayerRun& layer, int64_t tokens) {
  const absl::string_view out(layer.out.data(), layer.out.size());
  const absl::string_view in(layer.highway.data(), layer.highway.size());
  const int64_t count = tokens * model.hc * model.dim;
  const double rms = Rms(count, [&](int64_t i) { return double{ValueAt(out, dtype, i)}; });
  const double change = Rms(count, [&](int64_t i) { return double{ValueAt(out, dtype, i)} - ValueAt(in, dtype, i); });
  absl::PrintF("layer %-4d highway [%d, %d, %d] %s  rms %.6g, of the change %.6g  first%s\n", layer.layer_id, tokens,
               model.hc, model.dim, HighwayDtypeName(dtype), rms, change, FirstValues(out, dtype));
}

Form FormOf(const std::string& name) {
  for (const Form form : {Form::kKv, Form::kUpdate, Form::kGate, Form::kAuto}) {
    if (name == FormName(form)) return form;
  }
  return Form::kHighway;
}

// The layer of a call; its results lie in `output`, which is made as large as they are: gates, then the value.
LayerRun LayerOf(const ModelInfo& model, const ApplyCall& call, int64_t tokens, int32_t layer_id,
                 const std::string& highway, std::string& output) {
  LayerRun layer{.layer_id = layer_id, .highway = highway};
  const auto take = [&output](int64_t bytes) { output.assign(static_cast<size_t>(bytes), '\0'); };
  switch (call.form) {
    case Form::kKv:
      take(tokens * model.KvTokenBytes());
      layer.out = absl::MakeSpan(output);
      break;
    case Form::kUpdate:
    case Form::kGate: {
      const int64_t gates = tokens * model.GatesTokenBytes();
      const int64_t value = call.form == Form::kUpdate ? tokens * model.ValueTokenBytes() : 0;
      take(gates + value);
      layer.gates = {reinterpret_cast<float*>(output.data()), static_cast<size_t>(gates) / sizeof(float)};
      layer.value = {reinterpret_cast<uint16_t*>(output.data() + gates), static_cast<size_t>(value) / sizeof(uint16_t)};
      break;
    }
    default:
      take(static_cast<int64_t>(highway.size()));
      layer.out = absl::MakeSpan(output);
      break;
  }
  return layer;
}

// Returns the exit code, having printed what was wrong.
int Apply(Client& client, const ConnectionFlags& connection, const ApplyFlags& flags, const TokenInputs& inputs,
          OutputFile& file) {
  const ModelInfo& model = client.model();
  ApplyCall call;
  call.form = FormOf(flags.form);
  call.dtype = flags.dtype == "bf16" ? HighwayDtype::kBf16 : HighwayDtype::kF32;
  call.timeout = absl::Seconds(connection.timeout_secs);
  call.sequences = {inputs.Run(flags)};
  const std::vector<int32_t> layer_ids = inputs.LayersOf(model);
  std::vector<std::string> highways(layer_ids.size());
  if (call.form != Form::kKv) {
    absl::StatusOr<std::vector<std::string>> read =
        ReadHighways(flags, call.dtype, layer_ids.size(), inputs.count() * model.HighwayTokenBytes(call.dtype));
    if (!read.ok()) return PrintMistake(read.status().message());
    highways = *std::move(read);
  }
  std::vector<std::string> outputs(layer_ids.size());
  for (size_t i = 0; i < layer_ids.size(); ++i) {
    call.layers.push_back(LayerOf(model, call, inputs.count(), layer_ids[i], highways[i], outputs[i]));
  }

  const absl::Time start = absl::Now();
  if (absl::Status status = client.Apply(call); !status.ok()) return PrintError(status);
  const double milliseconds = absl::ToDoubleMilliseconds(absl::Now() - start);
  absl::PrintF("%s at position %d, %s, form %s: %.3f ms\n", Count(inputs.count(), "token"), flags.start_pos,
               Count(static_cast<int64_t>(layer_ids.size()), "layer"), FormName(call.form), milliseconds);
  for (const LayerRun& layer : call.layers) {
    if (call.form == Form::kKv) {
      PrintKv(model, layer, inputs.count());
    } else if (call.form == Form::kUpdate || call.form == Form::kGate) {
      PrintGates(model, layer, inputs.count());
    } else {
      PrintHighway(model, call.dtype, layer, inputs.count());
    }
  }
  if (flags.out_file.empty()) return kExitOk;
  if (absl::Status status = file.Write(outputs); !status.ok()) return PrintMistake(status.message());
  return kExitOk;
}

}  // namespace

int RunApply(const ConnectionFlags& connection, const ApplyFlags& flags) {
  absl::StatusOr<TokenInputs> inputs = ReadTokenInputs(flags);
  if (!inputs.ok()) return PrintMistake(inputs.status().message());
  OutputFile file;
  if (!flags.out_file.empty()) {
    if (absl::Status status = file.Open(flags.out_file); !status.ok()) return PrintMistake(status.message());
  }
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  PrintExcluded(**client);
  return Apply(**client, connection, flags, *inputs, file);
}

}  // namespace engram::client
