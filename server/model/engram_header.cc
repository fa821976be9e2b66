#include "server/model/engram_header.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/model/gguf_keys.h"
#include "server/model/hash_rules.h"
#include "server/model/status_macros.h"
#include "server/model/tensor_values.h"

namespace engram {
namespace {

constexpr const char* kBases[] = {"deepseek41.", "deepseek4."};
constexpr const char* kServed = "this release serves Q2_K tables of dialect A";
constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

// Finds each key under either prefix in circulation.
class DialectKeys {
 public:
  explicit DialectKeys(const GgufHeader& header) : header_(header), reader_(header) {}

  const KeyReader& reader() const { return reader_; }

  // The key's full name: whichever of "deepseek41.NAME" and "deepseek4.NAME" the file has, the first where it has none.
  absl::StatusOr<std::string> Name(const std::string& name) const {
    const std::string full = absl::StrCat(kBases[0], name), literal = absl::StrCat(kBases[1], name);
    const bool has_full = header_.Find(full) != nullptr, has_literal = header_.Find(literal) != nullptr;
    if (has_full && has_literal) {
      return absl::InvalidArgumentError(absl::StrCat(header_.file, ": keys '", full, "' and '", literal,
                                                     "' both stand in the file; expected one of them"));
    }
    return has_literal ? literal : full;
  }

  bool Has(const std::string& name) const {
    return header_.Find(absl::StrCat(kBases[0], name)) != nullptr ||
           header_.Find(absl::StrCat(kBases[1], name)) != nullptr;
  }

  absl::StatusOr<int64_t> Integer(const std::string& name, int64_t least, int64_t most) const {
    ASSIGN_OR_RETURN(const std::string key, Name(name));
    return reader_.Integer(key, least, most);
  }

  absl::StatusOr<std::vector<int64_t>> Integers(const std::string& name, int64_t least, int64_t most) const {
    ASSIGN_OR_RETURN(const std::string key, Name(name));
    return reader_.Integers(key, least, most);
  }

  // An array that must have `count` elements; `reason` says where the count comes from.
  absl::StatusOr<std::vector<int64_t>> Integers(const std::string& name, int64_t least, int64_t most, int64_t count,
                                                const std::string& reason) const {
    ASSIGN_OR_RETURN(const std::string key, Name(name));
    ASSIGN_OR_RETURN(std::vector<int64_t> values, reader_.Integers(key, least, most));
    if (static_cast<int64_t>(values.size()) != count) {
      return reader_.Refuse(key, absl::StrCat(values.size(), " elements"), absl::StrCat(count, ", ", reason));
    }
    return values;
  }

 private:
  const GgufHeader& header_;
  KeyReader reader_;
};

absl::Status CheckDialect(const DialectKeys& keys, const GgufHeader& metadata, EngramHeader& header) {
  ASSIGN_OR_RETURN(header.architecture, keys.reader().Text("general.architecture"));
  if (header.architecture != "deepseek41" && header.architecture != "deepseek4") {
    return keys.reader().Refuse("general.architecture", GgufQuote(header.architecture),
                                "'deepseek41' or 'deepseek4': no other architecture has an engram");
  }
  if (keys.Has("engram.encoding")) {
    ASSIGN_OR_RETURN(const std::string key, keys.Name("engram.encoding"));
    absl::StatusOr<std::string> encoding = keys.reader().Text(key);
    return keys.reader().Refuse(key, encoding.ok() ? GgufQuote(*encoding) : "no text",
                                absl::StrCat("no such key: it marks dialect B, and ", kServed));
  }
  const bool any = std::any_of(metadata.keys.begin(), metadata.keys.end(), [](const auto& entry) {
    return absl::StartsWith(entry.first, "deepseek41.engram.") || absl::StartsWith(entry.first, "deepseek4.engram.");
  });
  if (!any) {
    return absl::NotFoundError(absl::StrCat(metadata.file, ": no key begins with 'deepseek41.engram.' or ",
                                            "'deepseek4.engram.'; expected a model with an engram"));
  }
  return absl::OkStatus();
}

absl::Status ReadGeometry(const DialectKeys& keys, EngramHeader& header) {
  EngramGeometry& geometry = header.geometry;
  ASSIGN_OR_RETURN(geometry.dim, keys.Integer("embedding_length", 1, kMaxDim));
  ASSIGN_OR_RETURN(const int64_t copies, keys.Integer("hyper_connection.count", 1, kernels::kMaxCopies));
  geometry.copies = static_cast<int>(copies);
  ASSIGN_OR_RETURN(geometry.head_dim, keys.Integer("engram.key_length", kernels::kRowValues, kernels::kRowValues));
  ASSIGN_OR_RETURN(const int64_t max_ngram, keys.Integer("engram.max_ngram_size", 2, kernels::kMaxNgram));
  geometry.max_ngram = static_cast<int>(max_ngram);
  ASSIGN_OR_RETURN(const int64_t heads, keys.Integer("engram.head_count", 1, kMaxHeads));
  geometry.heads = static_cast<int>(heads);
  geometry.columns = (geometry.max_ngram - 1) * geometry.heads;

  ASSIGN_OR_RETURN(const std::string eps_key, keys.Name("attention.layer_norm_rms_epsilon"));
  ASSIGN_OR_RETURN(const double eps, keys.reader().Float(eps_key));
  geometry.eps = static_cast<float>(eps);
  // Zero would make a zero highway NaN, and a subnormal is zero on devices that flush them.
  if (!std::isnormal(geometry.eps) || geometry.eps < 0) {
    return keys.reader().Refuse(eps_key, eps, "a positive, finite, normal F32");
  }
  return absl::OkStatus();
}

absl::Status ReadTokenMap(const DialectKeys& keys, EngramHeader& header) {
  EngramGeometry& geometry = header.geometry;
  ASSIGN_OR_RETURN(const std::string key, keys.Name("engram.token_map"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> map, keys.reader().Integers(key, -1, kMaxId));
  geometry.vocab = static_cast<int64_t>(map.size());
  if (keys.Has("vocab_size")) {
    ASSIGN_OR_RETURN(const std::string vocab_key, keys.Name("vocab_size"));
    ASSIGN_OR_RETURN(const int64_t vocab, keys.reader().Integer(vocab_key, 1, kMaxId));
    if (vocab != geometry.vocab) {
      return keys.reader().Refuse(key, absl::StrCat(geometry.vocab, " elements"),
                                  absl::StrCat(vocab, " as '", vocab_key, "' says"));
    }
  }
  const auto highest = std::max_element(map.begin(), map.end());
  if (highest == map.end() || *highest < 0) {
    return keys.reader().Refuse(key, map.empty() ? "no element" : "no id but -1", "at least one compressed id");
  }
  geometry.compressed_vocab = *highest + 1;
  if (keys.Has("engram.compressed_vocab_size")) {
    ASSIGN_OR_RETURN(geometry.compressed_vocab, keys.Integer("engram.compressed_vocab_size", 1, kMaxId));
    if (*highest >= geometry.compressed_vocab) {
      return keys.reader().RefuseElement(
          key, highest - map.begin(), *highest,
          absl::StrCat("less than ", geometry.compressed_vocab, ", the compressed vocabulary"));
    }
  }
  header.token_map.assign(map.begin(), map.end());
  return absl::OkStatus();
}

absl::Status ReadHashConstants(const DialectKeys& keys, EngramHeader& header) {
  const EngramGeometry& geometry = header.geometry;
  ASSIGN_OR_RETURN(const std::string layers_key, keys.Name("engram.layer_ids"));
  header.engram_prefix = layers_key.substr(0, layers_key.size() - std::string("layer_ids").size());
  ASSIGN_OR_RETURN(header.layer_ids, keys.reader().Integers(layers_key, 0, kMaxId));
  const int64_t layers = static_cast<int64_t>(header.layer_ids.size());
  if (layers < 1 || layers > kMaxLayers) {
    return keys.reader().Refuse(layers_key, absl::StrCat(layers, " elements"), absl::StrCat("1 to ", kMaxLayers));
  }
  ASSIGN_OR_RETURN(const int64_t pad, keys.Integer("engram.pad_id", 0, kMaxId));
  header.geometry.pad_id = static_cast<int32_t>(pad);

  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  const std::string by_shift = absl::StrCat(layers, " layers x max_ngram_size ", geometry.max_ngram);
  const std::string by_column = absl::StrCat(layers, " layers x ", geometry.columns, " columns");
  ASSIGN_OR_RETURN(header.multipliers,
                   keys.Integers("engram.multipliers", kLeast, kMost, layers * geometry.max_ngram, by_shift));
  ASSIGN_OR_RETURN(header.primes, keys.Integers("engram.primes", kLeast, kMost, layers * geometry.columns, by_column));
  ASSIGN_OR_RETURN(header.offsets,
                   keys.Integers("engram.offsets", kLeast, kMost, layers * geometry.columns, by_column));
  return absl::OkStatus();
}

absl::Status RefuseTensor(const TensorPlace& place, const std::string& held, const std::string& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat(place.file->path(), ": tensor ", GgufQuote(place.tensor.name), " ", held, "; expected ", expected));
}

absl::Status CheckShape(const TensorPlace& place, int64_t ne0, int64_t ne1, const std::string& reason) {
  const auto& ne = place.tensor.ne;
  if (ne[0] == ne0 && ne[1] == ne1 && ne[2] == 1 && ne[3] == 1) return absl::OkStatus();
  return RefuseTensor(place, absl::StrCat("has shape ", GgufShape(place.tensor)),
                      absl::StrCat("[", ne0, ", ", ne1, "]: ", reason));
}

absl::Status CheckWeightType(const TensorPlace& place) {
  if (CanExpand(place.tensor.type)) return absl::OkStatus();
  return RefuseTensor(place, absl::StrCat("is ", GgufTypeName(place.tensor.type)),
                      "F32, F16, BF16, Q8_0 or Q2_K: this release serves no other type of weight");
}

absl::StatusOr<LayerTensors> FindLayerTensors(const ModelFiles& files, const EngramGeometry& geometry, int64_t layer) {
  LayerTensors tensors;
  const std::string block = absl::StrCat("blk.", layer, ".");
  ASSIGN_OR_RETURN(tensors.table, files.FindTensor(block + "engram_embd.weight"));
  ASSIGN_OR_RETURN(tensors.wkv, files.FindTensor(block + "engram_wkv.weight"));
  ASSIGN_OR_RETURN(tensors.q, files.FindTensor(block + "engram_q.weight"));
  ASSIGN_OR_RETURN(tensors.k, files.FindTensor(block + "engram_k.weight"));

  const GgufTensor& table = tensors.table.tensor;
  if (table.type != GgufType::kQ2_K) {
    return RefuseTensor(tensors.table, absl::StrCat("is ", GgufTypeName(table.type)), absl::StrCat("Q2_K: ", kServed));
  }
  if (table.ne[0] != geometry.head_dim || table.ne[1] < 1 || table.ne[2] != 1 || table.ne[3] != 1) {
    return RefuseTensor(tensors.table, absl::StrCat("has shape ", GgufShape(table)),
                        absl::StrCat("[", geometry.head_dim, ", rows]"));
  }
  RETURN_IF_ERROR(CheckWeightType(tensors.wkv));
  RETURN_IF_ERROR(CheckShape(tensors.wkv, geometry.inputs(), geometry.outputs(),
                             absl::StrCat(geometry.columns, " columns x ", geometry.head_dim, ", dim ", geometry.dim,
                                          " x (hc ", geometry.copies, " + 1)")));
  for (const TensorPlace* gate : {&tensors.q, &tensors.k}) {
    RETURN_IF_ERROR(CheckWeightType(*gate));
    RETURN_IF_ERROR(CheckShape(*gate, geometry.dim, geometry.copies, "dim, hc"));
  }
  return tensors;
}

absl::Status CheckConstants(const DialectKeys& keys, const EngramHeader& header) {
  std::vector<int64_t> rows;
  for (size_t i = 0; i < header.layers.size(); ++i) rows.push_back(header.rows(i));
  HashRuleInput input;
  input.compressed_vocab = header.geometry.compressed_vocab;
  input.pad_id = header.geometry.pad_id;
  input.columns = header.geometry.columns;
  input.layer_ids = header.layer_ids;
  input.multipliers = header.multipliers;
  input.primes = header.primes;
  input.offsets = header.offsets;
  input.rows = rows;
  const std::optional<HashRuleBreach> breach = FindHashRuleBreach(input);
  if (!breach.has_value()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string key, keys.Name(absl::StrCat("engram.", breach->array)));
  if (breach->index < 0) return keys.reader().Refuse(key, breach->held, breach->expected);
  return keys.reader().RefuseElement(key, breach->index, breach->held, breach->expected);
}

absl::Status CheckAscending(const DialectKeys& keys, const EngramHeader& header) {
  for (size_t i = 1; i < header.layer_ids.size(); ++i) {
    if (header.layer_ids[i] > header.layer_ids[i - 1]) continue;
    ASSIGN_OR_RETURN(const std::string key, keys.Name("engram.layer_ids"));
    return keys.reader().RefuseElement(
        key, static_cast<int64_t>(i), header.layer_ids[i],
        absl::StrCat("more than ", header.layer_ids[i - 1], ": layers stand in ascending order, each once"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<EngramHeader> ReadEngramHeader(const ModelFiles& files) {
  EngramHeader header;
  const DialectKeys keys(files.metadata());
  RETURN_IF_ERROR(CheckDialect(keys, files.metadata(), header));
  RETURN_IF_ERROR(ReadGeometry(keys, header));
  RETURN_IF_ERROR(ReadTokenMap(keys, header));
  RETURN_IF_ERROR(ReadHashConstants(keys, header));
  RETURN_IF_ERROR(CheckAscending(keys, header));  // before a repeated id finds its tensors twice
  for (int64_t layer : header.layer_ids) {
    ASSIGN_OR_RETURN(LayerTensors tensors, FindLayerTensors(files, header.geometry, layer));
    header.layers.push_back(std::move(tensors));
  }
  RETURN_IF_ERROR(CheckConstants(keys, header));
  return header;
}

}  // namespace engram
