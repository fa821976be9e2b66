// engram-cli apply: one call by hand.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/bf16.h"
#include "client/cli/commands.h"
#include "client/cli/output_file.h"

namespace engram::client {
namespace {

constexpr int kFirstValues = 4;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  return bytes;
}

// Integers separated by commas or white space; between two commas stands at least one.
absl::StatusOr<std::vector<int32_t>> ParseIds(absl::string_view what, absl::string_view text) {
  std::vector<int32_t> ids;
  for (absl::string_view item : absl::StrSplit(text, ',')) {
    const size_t before = ids.size();
    for (absl::string_view part : absl::StrSplit(item, absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty())) {
      int32_t id = 0;
      if (!absl::SimpleAtoi(part, &id)) {
        return absl::InvalidArgumentError(
            absl::StrCat(what, ": entry ", ids.size(), " is \"", part, "\", expected an integer"));
      }
      ids.push_back(id);
    }
    if (ids.size() == before) {
      return absl::InvalidArgumentError(absl::StrCat(what, ": entry ", before, " is empty, expected an integer"));
    }
  }
  return ids;
}

// The same of a flag that may be left out.
absl::StatusOr<std::vector<int32_t>> ParseOptionalIds(absl::string_view what, absl::string_view text) {
  if (text.empty()) return std::vector<int32_t>();
  return ParseIds(what, text);
}

absl::StatusOr<std::vector<int32_t>> ReadTokens(const ApplyFlags& flags) {
  if (flags.tokens_file.empty()) return ParseIds("--tokens", flags.tokens);
  absl::StatusOr<std::string> text = ReadFile(flags.tokens_file);
  if (!text.ok()) return text.status();
  return ParseIds(flags.tokens_file, *text);
}

absl::StatusOr<std::vector<uint8_t>> ParseMask(const std::string& text) {
  absl::StatusOr<std::vector<int32_t>> values = ParseOptionalIds("--mask", text);
  if (!values.ok()) return values.status();
  std::vector<uint8_t> mask;
  for (int32_t value : *values) {
    if (value != 0 && value != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--mask: entry ", mask.size(), " is ", value, ", expected 1 (live) or 0 (masked)"));
    }
    mask.push_back(static_cast<uint8_t>(value));
  }
  return mask;
}

void AppendValue(float value, HighwayDtype dtype, std::string* bytes) {
  if (dtype == HighwayDtype::kBf16) {
    const uint16_t bits = FloatToBf16(value);
    bytes->append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  } else {
    bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
}

float ValueAt(absl::string_view bytes, HighwayDtype dtype, int64_t index) {
  if (dtype == HighwayDtype::kBf16) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * index, sizeof(bits));
    return Bf16ToFloat(bits);
  }
  float value = 0;
  std::memcpy(&value, bytes.data() + 4 * index, sizeof(value));
  return value;
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
  absl::StatusOr<std::string> bytes = ReadFile(flags.highway_file);
  if (!bytes.ok()) return bytes.status();
  const auto size = static_cast<int64_t>(bytes->size());
  if (size == layer_bytes) return std::vector<std::string>(layers, *bytes);
  if (size == layer_bytes * static_cast<int64_t>(layers)) {
    std::vector<std::string> highways;
    for (size_t i = 0; i < layers; ++i) highways.push_back(bytes->substr(i * layer_bytes, layer_bytes));
    return highways;
  }
  return absl::InvalidArgumentError(absl::StrCat(flags.highway_file, " has ", size, " bytes, expected ", layer_bytes,
                                                 " (one highway for all layers) or ", layers, " times that"));
}

// Root mean square of what `value` gives for [0, count).
template <typename Value>
double Rms(int64_t count, Value value) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += value(i) * value(i);
  return count == 0 ? 0 : std::sqrt(sum / static_cast<double>(count));
}

std::string FirstValues(absl::string_view bytes, HighwayDtype dtype) {
  std::string text;
  for (int64_t i = 0; i < kFirstValues && (i + 1) * BytesOf(dtype) <= static_cast<int64_t>(bytes.size()); ++i) {
    absl::StrAppendFormat(&text, " %.6g", ValueAt(bytes, dtype, i));
  }
  return text;
}

void PrintLayer(const ModelInfo& model, const ApplyCall& call, const LayerRun& layer, int64_t tokens) {
  const absl::string_view out(layer.out.data(), layer.out.size());
  if (call.form == Form::kKv) {
    const int64_t width = model.dim * (model.hc + 1);
    const int64_t keys = model.dim * model.hc;
    const auto rms = [&](int64_t low, int64_t high) {
      const int64_t span = high - low;
      return Rms(tokens * span, [&](int64_t i) {
        return double{ValueAt(out, HighwayDtype::kBf16, i / span * width + low + i % span)};
      });
    };
    absl::PrintF("layer %-4d kv [%d, %d] bf16  rms of keys %.6g, of values %.6g  first%s\n", layer.layer_id, tokens,
                 width, rms(0, keys), rms(keys, width), FirstValues(out, HighwayDtype::kBf16));
    return;
  }
  const absl::string_view in(layer.highway.data(), layer.highway.size());
  const int64_t count = tokens * model.hc * model.dim;
  const double rms = Rms(count, [&](int64_t i) { return double{ValueAt(out, call.dtype, i)}; });
  const double change =
      Rms(count, [&](int64_t i) { return double{ValueAt(out, call.dtype, i)} - ValueAt(in, call.dtype, i); });
  absl::PrintF("layer %-4d highway [%d, %d, %d] %s  rms %.6g, of the change %.6g  first%s\n", layer.layer_id, tokens,
               model.hc, model.dim, HighwayDtypeName(call.dtype), rms, change, FirstValues(out, call.dtype));
}

// What the flags give that needs no server to be read.
struct ApplyInputs {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> mask;
  std::vector<int32_t> lookback;
  std::vector<int32_t> layers;  // empty: all
  OutputFile out;               // open where --out is given
};

absl::Status ReadInputs(const ApplyFlags& flags, ApplyInputs* inputs) {
  absl::StatusOr<std::vector<int32_t>> tokens = ReadTokens(flags);
  if (!tokens.ok()) return tokens.status();
  absl::StatusOr<std::vector<uint8_t>> mask = ParseMask(flags.mask);
  if (!mask.ok()) return mask.status();
  absl::StatusOr<std::vector<int32_t>> lookback = ParseOptionalIds("--lookback", flags.lookback);
  if (!lookback.ok()) return lookback.status();
  for (const std::string& text : flags.layers) {
    absl::StatusOr<std::vector<int32_t>> layers = ParseIds("--layer", text);
    if (!layers.ok()) return layers.status();
    inputs->layers.insert(inputs->layers.end(), layers->begin(), layers->end());
  }
  inputs->tokens = *std::move(tokens);
  inputs->mask = *std::move(mask);
  inputs->lookback = *std::move(lookback);
  return flags.out_file.empty() ? absl::OkStatus() : inputs->out.Open(flags.out_file);
}

// Returns the exit code, having printed what was wrong.
int Apply(Client& client, const ConnectionFlags& connection, const ApplyFlags& flags, ApplyInputs& inputs) {
  const ModelInfo& model = client.model();
  const auto count = static_cast<int64_t>(inputs.tokens.size());
  ApplyCall call;
  call.form = flags.form == "kv" ? Form::kKv : Form::kHighway;
  call.dtype = flags.dtype == "bf16" ? HighwayDtype::kBf16 : HighwayDtype::kF32;
  call.timeout = absl::Seconds(connection.timeout_secs);
  call.sequences = {SequenceRun{.start_pos = flags.start_pos,
                                .token_ids = inputs.tokens,
                                .token_mask = inputs.mask,
                                .session = flags.session,
                                .lookback = inputs.lookback}};
  std::vector<int32_t> layer_ids = inputs.layers;
  if (layer_ids.empty()) {
    for (const ModelInfo::Layer& layer : model.layers) layer_ids.push_back(layer.layer_id);
  }
  const int64_t layer_bytes =
      count * (call.form == Form::kKv ? model.KvTokenBytes() : model.HighwayTokenBytes(call.dtype));
  std::vector<std::string> highways(layer_ids.size());
  if (call.form == Form::kHighway) {
    absl::StatusOr<std::vector<std::string>> read = ReadHighways(flags, call.dtype, layer_ids.size(), layer_bytes);
    if (!read.ok()) return PrintMistake(read.status().message());
    highways = *std::move(read);
  }
  std::vector<std::string> outputs(layer_ids.size(), std::string(layer_bytes, '\0'));
  for (size_t i = 0; i < layer_ids.size(); ++i) {
    call.layers.push_back({.layer_id = layer_ids[i], .highway = highways[i], .out = absl::MakeSpan(outputs[i])});
  }

  const absl::Time start = absl::Now();
  if (absl::Status status = client.Apply(call); !status.ok()) return PrintError(status);
  const double milliseconds = absl::ToDoubleMilliseconds(absl::Now() - start);
  absl::PrintF("%d tokens at position %d, %d layers, form %s: %.3f ms\n", count, flags.start_pos, layer_ids.size(),
               FormName(call.form), milliseconds);
  for (const LayerRun& layer : call.layers) PrintLayer(model, call, layer, count);
  if (flags.out_file.empty()) return kExitOk;
  if (absl::Status status = inputs.out.Write(outputs); !status.ok()) return PrintMistake(status.message());
  return kExitOk;
}

}  // namespace

int RunApply(const ConnectionFlags& connection, const ApplyFlags& flags) {
  ApplyInputs inputs;
  if (absl::Status status = ReadInputs(flags, &inputs); !status.ok()) return PrintMistake(status.message());
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  return Apply(**client, connection, flags, inputs);
}

}  // namespace engram::client
