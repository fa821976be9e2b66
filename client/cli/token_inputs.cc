#include "client/cli/token_inputs.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace engram::client {
namespace {

// "-2147483648," and no more for each token of a call.
constexpr int64_t kMaxTokensFileBytes = 12 * kMaxCallTokens;

// An entry as an error shows it: it may be a file's every byte.
std::string Shown(absl::string_view entry) {
  constexpr size_t kMost = 32;
  return absl::StrCat(absl::CHexEscape(entry.substr(0, kMost)), entry.size() > kMost ? "..." : "");
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
            absl::StrCat(what, ": entry ", ids.size(), " is \"", Shown(part), "\", expected an integer"));
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

absl::StatusOr<std::vector<int32_t>> ReadTokens(const TokenFlags& flags) {
  if (flags.tokens_file.empty()) return ParseIds("--tokens", flags.tokens);
  absl::StatusOr<std::string> text = ReadFile(flags.tokens_file, kMaxTokensFileBytes);
  if (!text.ok()) return text.status();
  if (static_cast<int64_t>(text->size()) > kMaxTokensFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat(flags.tokens_file, " has more than ", kMaxTokensFileBytes,
                                                   " bytes, expected the ids of at most ", kMaxCallTokens, " tokens"));
  }
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

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t most) {
  constexpr int64_t kChunk = int64_t{1} << 20;
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  while (file.good() && static_cast<int64_t>(bytes.size()) <= most) {
    const size_t before = bytes.size();
    bytes.resize(before + static_cast<size_t>(std::min(kChunk, most - static_cast<int64_t>(before) + 1)));
    file.read(&bytes[before], static_cast<std::streamsize>(bytes.size() - before));
    bytes.resize(before + static_cast<size_t>(file.gcount()));
  }
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  return bytes;
}

absl::StatusOr<TokenInputs> ReadTokenInputs(const TokenFlags& flags) {
  absl::StatusOr<std::vector<int32_t>> tokens = ReadTokens(flags);
  if (!tokens.ok()) return tokens.status();
  absl::StatusOr<std::vector<uint8_t>> mask = ParseMask(flags.mask);
  if (!mask.ok()) return mask.status();
  absl::StatusOr<std::vector<int32_t>> lookback = ParseOptionalIds("--lookback", flags.lookback);
  if (!lookback.ok()) return lookback.status();
  TokenInputs inputs;
  for (const std::string& text : flags.layers) {
    absl::StatusOr<std::vector<int32_t>> layers = ParseIds("--layer", text);
    if (!layers.ok()) return layers.status();
    inputs.layers.insert(inputs.layers.end(), layers->begin(), layers->end());
  }
  inputs.tokens = *std::move(tokens);
  inputs.mask = *std::move(mask);
  inputs.lookback = *std::move(lookback);
  return inputs;
}

SequenceRun TokenInputs::Run(const TokenFlags& flags) const {
  return {.start_pos = flags.start_pos,
          .token_ids = tokens,
          .token_mask = mask,
          .session = flags.session,
          .lookback = lookback};
}

std::vector<int32_t> TokenInputs::LayersOf(const ModelInfo& model) const {
  if (!layers.empty()) return layers;
  std::vector<int32_t> all;
  for (const ModelInfo::Layer& layer : model.layers) all.push_back(layer.layer_id);
  return all;
}

}  // namespace engram::client
