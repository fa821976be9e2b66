#include "client/verify/fixture.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace engram::client {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxTokens = 1 << 20;

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be read"));
  return bytes;
}

absl::Status NoFixture(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": not a fixture: ", why));
}

// The JSON object of a fixture, as far as its outermost keys tell one.
absl::StatusOr<Json> ReadJson(const std::string& path) {
  // A model file is one typing error away: no 60 GiB are read to find that they are no JSON.
  std::ifstream start(path, std::ios::binary);
  start >> std::ws;
  if (start.good() && start.peek() != '{') return NoFixture(path, "no JSON object");
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  Json json = Json::parse(*text, nullptr, false);
  if (!json.is_object()) return NoFixture(path, "no JSON object");
  for (const char* key : {"cases", "layers"}) {
    if (!json.contains(key)) return NoFixture(path, absl::StrCat("no key \"", key, "\""));
  }
  return json;
}

// Reads a fixture's json; keeps the first fault and goes on with defaults, so that callers check once.
class Reader {
 public:
  explicit Reader(const std::string& bin) : bin_(bin) {}

  template <typename T>
  T Get(const Json& json, const char* key, const T& otherwise, bool required = true) {
    const auto found = json.find(key);
    if (found == json.end()) {
      if (required) Fail(absl::StrCat("\"", key, "\" is missing"));
      return otherwise;
    }
    try {
      return found->get<T>();
    } catch (const Json::exception& error) {
      Fail(absl::StrCat("\"", key, "\": ", error.what()));
      return otherwise;
    }
  }

  // An integer in [low, high].
  int64_t Integer(const Json& json, const char* key, int64_t low, int64_t high) {
    const int64_t value = Get<int64_t>(json, key, low);
    if (value < low || value > high) {
      Fail(absl::StrCat("\"", key, "\" is ", value, ", expected [", low, ", ", high, "]"));
      return low;
    }
    return value;
  }

  // `count` values of T where json[key] = {offset, bytes} says in expected.bin.
  template <typename T>
  std::vector<T> Extent(const Json& json, const char* key, int64_t count) {
    const Json extent = Get<Json>(json, key, Json::object());
    const auto offset = Get<uint64_t>(extent, "offset", 0);
    const auto bytes = Get<uint64_t>(extent, "bytes", 0);
    const uint64_t expected = static_cast<uint64_t>(count) * sizeof(T);
    if (bytes != expected || offset > bin_.size() || bytes > bin_.size() - offset) {
      Fail(absl::StrCat("\"", key, "\" is ", bytes, " bytes at ", offset, ", expected ", expected, " inside the ",
                        bin_.size(), " bytes of expected.bin"));
      return std::vector<T>();
    }
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), bin_.data() + offset, bytes);
    return values;
  }

  void Fail(absl::string_view text) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(where_, text));
  }

  // What later faults are said to be in.
  void Where(std::string where) { where_ = std::move(where); }

  const absl::Status& status() const { return status_; }

 private:
  const std::string& bin_;
  std::string where_;
  absl::Status status_;
};

FixtureLayer ReadLayer(const Json& json, const Fixture& fixture, int64_t tokens, Reader* reader) {
  FixtureLayer layer;
  layer.layer_id = static_cast<int32_t>(reader->Integer(json, "layer", 0, 0x7fffffff));
  const int64_t highway = tokens * fixture.hc * fixture.dim;
  const int64_t kv = tokens * (fixture.hc + 1) * fixture.dim;
  layer.highway = reader->Extent<float>(json, "highway_f32", highway);
  layer.kv_exact = reader->Extent<double>(json, "kv_exact_f64", kv);
  layer.kv = reader->Extent<float>(json, "kv_bf16_as_f32", kv);
  layer.gate = reader->Extent<double>(json, "gate_f64", tokens * fixture.hc);
  return layer;
}

FixtureCall ReadCall(const Json& json, const Fixture& fixture, Reader* reader) {
  FixtureCall call;
  call.start_pos = reader->Integer(json, "start", 0, int64_t{1} << 40);
  call.tokens = reader->Get<std::vector<int32_t>>(json, "tokens", {});
  call.mask = reader->Get<std::vector<uint8_t>>(json, "mask", {}, false);
  call.lookback = reader->Get<std::vector<int32_t>>(json, "lookback", {}, false);
  const auto tokens = static_cast<int64_t>(call.tokens.size());
  if (tokens < 1 || tokens > kMaxTokens) {
    reader->Fail(absl::StrCat("\"tokens\" has ", tokens, " entries, expected [1, ", kMaxTokens, "]"));
    return call;
  }
  if (!call.mask.empty() && call.mask.size() != call.tokens.size()) {
    reader->Fail(absl::StrCat("\"mask\" has ", call.mask.size(), " entries, expected ", tokens));
  }
  if (!call.lookback.empty() && static_cast<int64_t>(call.lookback.size()) != fixture.max_ngram - 1) {
    reader->Fail(absl::StrCat("\"lookback\" has ", call.lookback.size(), " entries, expected ", fixture.max_ngram - 1));
  }
  for (const Json& layer : reader->Get<std::vector<Json>>(json, "layers", {})) {
    call.layers.push_back(ReadLayer(layer, fixture, tokens, reader));
  }
  std::vector<int32_t> ids;
  for (const FixtureLayer& layer : call.layers) ids.push_back(layer.layer_id);
  if (ids != fixture.layer_ids) reader->Fail("the call's layers are not the model's");
  return call;
}

Fixture ReadFixture(const Json& json, Reader* reader) {
  Fixture fixture;
  fixture.name = reader->Get<std::string>(json, "name", "");
  fixture.dim = reader->Integer(json, "dim", 1, 1 << 20);
  fixture.hc = reader->Integer(json, "hc", 1, 8);
  fixture.head_dim = reader->Integer(json, "head_dim", 1, 1 << 16);
  fixture.max_ngram = reader->Integer(json, "max_ngram", 2, 8);
  fixture.heads = reader->Integer(json, "n_heads", 1, 1 << 16);
  fixture.cols = reader->Integer(json, "cols", 1, 1 << 20);
  fixture.vocab = reader->Integer(json, "vocab", 1, 0x7fffffff);
  fixture.pad_id = reader->Integer(json, "pad_id", 0, 0x7fffffff);
  fixture.eps = reader->Get<double>(json, "eps", 0);
  fixture.row_type = reader->Get<std::string>(json, "table", "");
  fixture.wkv_type = reader->Get<std::string>(json, "wkv_type", "");
  fixture.files = reader->Get<std::vector<std::string>>(json, "files", {}, false);
  fixture.layer_ids = reader->Get<std::vector<int32_t>>(json, "layers", {});
  fixture.rows = reader->Get<std::vector<int64_t>>(json, "rows", {});
  const Json tolerance = reader->Get<Json>(json, "tolerance", Json::object());
  fixture.kv_tolerance = reader->Get<std::string>(tolerance, "kv", "");
  fixture.out_tolerance = reader->Get<std::string>(tolerance, "out", "");
  if (fixture.rows.size() != fixture.layer_ids.size()) reader->Fail("\"rows\" and \"layers\" differ in length");
  for (const Json& entry : reader->Get<std::vector<Json>>(json, "cases", {})) {
    FixtureCase fixture_case;
    fixture_case.name = reader->Get<std::string>(entry, "name", "");
    for (const Json& call : reader->Get<std::vector<Json>>(entry, "calls", {})) {
      reader->Where(absl::StrCat("case ", fixture_case.name, ", call ", fixture_case.calls.size(), ": "));
      fixture_case.calls.push_back(ReadCall(call, fixture, reader));
    }
    fixture.cases.push_back(std::move(fixture_case));
  }
  reader->Where("");
  if (fixture.cases.empty()) reader->Fail("\"cases\" is empty: nothing would be compared");
  return fixture;
}

}  // namespace

absl::StatusOr<Fixture> LoadFixture(const std::string& path) {
  absl::StatusOr<Json> parsed = ReadJson(path);
  if (!parsed.ok()) return parsed.status();
  const Json& json = *parsed;
  absl::StatusOr<std::string> bin = ReadFile(std::filesystem::path(path).replace_filename("expected.bin"));
  if (!bin.ok()) return bin.status();
  Reader reader(*bin);
  Fixture fixture = ReadFixture(json, &reader);
  if (!reader.status().ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", reader.status().message()));
  }
  return fixture;
}

}  // namespace engram::client
