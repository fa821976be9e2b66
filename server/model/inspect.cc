#include "server/model/inspect.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

using Json = nlohmann::ordered_json;

Json TensorJson(const TensorPlace& place) {
  Json json;
  json["name"] = place.tensor.name;
  json["type"] = GgufTypeName(place.tensor.type);
  json["shape"] = std::vector<int64_t>(place.tensor.ne.begin(), place.tensor.ne.begin() + place.tensor.dimensions);
  json["bytes"] = place.tensor.bytes;
  json["file"] = place.file->path();
  json["offset"] = place.tensor.offset;
  return json;
}

Json WeightJson(const TensorPlace& place, const Digest& digest) {
  Json json = TensorJson(place);
  json["sha256"] = DigestHex(digest);
  return json;
}

std::vector<int64_t> LayerSlice(const std::vector<int64_t>& values, size_t layer, int64_t width) {
  const auto begin = values.begin() + static_cast<int64_t>(layer) * width;
  return {begin, begin + width};
}

std::string Size(int64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes < 1 << 20) return absl::StrFormat("%d B", bytes);
  if (bytes < 1 << 30) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  return absl::StrFormat("%.2f GiB", value / (1 << 30));
}

}  // namespace

absl::StatusOr<Inspection> InspectModel(const std::string& path) {
  Inspection inspection;
  ASSIGN_OR_RETURN(inspection.files, ModelFiles::Open(path));
  ASSIGN_OR_RETURN(inspection.header, ReadEngramHeader(inspection.files));
  for (const LayerTensors& layer : inspection.header.layers) {
    WeightDigests weights;
    ASSIGN_OR_RETURN(weights.wkv, DigestTensor(layer.wkv));
    ASSIGN_OR_RETURN(weights.q, DigestTensor(layer.q));
    ASSIGN_OR_RETURN(weights.k, DigestTensor(layer.k));
    inspection.weights.push_back(weights);
  }
  inspection.hash_digest = HashDigest(inspection.header);
  inspection.config_digest = ConfigDigest(inspection.header, inspection.hash_digest, inspection.weights);
  return inspection;
}

std::string InspectionText(const Inspection& inspection) {
  const EngramHeader& header = inspection.header;
  const EngramGeometry& geometry = header.geometry;
  std::string out;
  absl::StrAppendFormat(&out, "file           %s, %s in %d file(s), GGUF version %d\n", inspection.files.path(),
                        Size(inspection.files.total_bytes()), inspection.files.shards().size(),
                        inspection.files.metadata().version);
  absl::StrAppendFormat(&out, "architecture   %s, keys under %s (dialect A)\n", header.architecture,
                        header.engram_prefix);
  absl::StrAppendFormat(&out, "geometry       dim %d, hc %d, eps %g\n", geometry.dim, geometry.copies, geometry.eps);
  absl::StrAppendFormat(&out, "n-grams        up to %d, %d heads: %d columns of %d values\n", geometry.max_ngram,
                        geometry.heads, geometry.columns, geometry.head_dim);
  absl::StrAppendFormat(&out, "vocabulary     %d tokens, %d compressed, pad %d\n", geometry.vocab,
                        geometry.compressed_vocab, geometry.pad_id);
  for (size_t i = 0; i < header.layers.size(); ++i) {
    const LayerTensors& layer = header.layers[i];
    absl::StrAppendFormat(&out, "layer %-8d table %s, %d rows, %s; wkv %s, %s; q %s, k %s\n", header.layer_ids[i],
                          GgufTypeName(layer.table.tensor.type), header.rows(i), Size(layer.table.tensor.bytes),
                          GgufTypeName(layer.wkv.tensor.type), Size(layer.wkv.tensor.bytes),
                          GgufTypeName(layer.q.tensor.type), GgufTypeName(layer.k.tensor.type));
    absl::StrAppendFormat(&out, "               multipliers %s\n",
                          absl::StrJoin(LayerSlice(header.multipliers, i, geometry.max_ngram), " "));
    const std::vector<int64_t> primes = LayerSlice(header.primes, i, geometry.columns);
    absl::StrAppendFormat(&out, "               primes %d .. %d\n", primes.front(), primes.back());
  }
  absl::StrAppendFormat(&out, "hash rules     all hold\nhash_digest    %s\nconfig_digest  %s\n",
                        DigestHex(inspection.hash_digest), DigestHex(inspection.config_digest));
  return out;
}

std::string InspectionJson(const Inspection& inspection) {
  const EngramHeader& header = inspection.header;
  const EngramGeometry& geometry = header.geometry;
  Json json;
  json["path"] = inspection.files.path();
  json["bytes"] = inspection.files.total_bytes();
  for (const Shard& shard : inspection.files.shards()) json["files"].push_back(shard.file->path());
  json["gguf_version"] = inspection.files.metadata().version;
  json["architecture"] = header.architecture;
  json["engram_prefix"] = header.engram_prefix;
  json["dialect"] = "A";
  json["geometry"] = {{"dim", geometry.dim},           {"hc", geometry.copies},
                      {"head_dim", geometry.head_dim}, {"max_ngram", geometry.max_ngram},
                      {"heads", geometry.heads},       {"columns", geometry.columns},
                      {"vocab", geometry.vocab},       {"compressed_vocab", geometry.compressed_vocab},
                      {"pad_id", geometry.pad_id},     {"eps", geometry.eps}};
  for (size_t i = 0; i < header.layers.size(); ++i) {
    const LayerTensors& tensors = header.layers[i];
    Json layer;
    layer["layer_id"] = header.layer_ids[i];
    layer["rows"] = header.rows(i);
    layer["multipliers"] = LayerSlice(header.multipliers, i, geometry.max_ngram);
    layer["primes"] = LayerSlice(header.primes, i, geometry.columns);
    layer["offsets"] = LayerSlice(header.offsets, i, geometry.columns);
    layer["table"] = TensorJson(tensors.table);
    layer["wkv"] = WeightJson(tensors.wkv, inspection.weights[i].wkv);
    layer["q"] = WeightJson(tensors.q, inspection.weights[i].q);
    layer["k"] = WeightJson(tensors.k, inspection.weights[i].k);
    json["layers"].push_back(layer);
  }
  json["hash_digest"] = DigestHex(inspection.hash_digest);
  json["config_digest"] = DigestHex(inspection.config_digest);
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

std::string DigestsText(const Inspection& inspection, const Digest& content_digest) {
  return absl::StrCat("hash_digest    ", DigestHex(inspection.hash_digest), "\nconfig_digest  ",
                      DigestHex(inspection.config_digest), "\ncontent_digest ", DigestHex(content_digest));
}

std::string DigestsJson(const Inspection& inspection, const Digest& content_digest, const std::string& sidecar) {
  Json json;
  json["path"] = inspection.files.path();
  json["bytes"] = inspection.files.total_bytes();
  json["hash_digest"] = DigestHex(inspection.hash_digest);
  json["config_digest"] = DigestHex(inspection.config_digest);
  json["content_digest"] = DigestHex(content_digest);
  if (!sidecar.empty()) json["sidecar"] = sidecar;
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace engram
