#include "server/model/engram_model.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/model/anonymous_memory.h"
#include "server/model/chunk_threads.h"
#include "server/model/content_digest.h"
#include "server/model/digests.h"
#include "server/model/engram_header.h"
#include "server/model/model_files.h"
#include "server/model/status_macros.h"
#include "server/model/tensor_values.h"

namespace engram {
namespace {

// One read of a chunk: large enough that a disk streams, small enough that threads share a tensor evenly and progress
// moves; a multiple of a huge page, so that no two threads fault the same one.
constexpr int64_t kReadChunk = int64_t{8} << 20;
constexpr int64_t kExpandValues = int64_t{1}
                                  << 20;  // values of wkv a thread expands at a time: whole blocks of any type

// Bytes of a file on their way into memory.
struct PendingRead {
  std::shared_ptr<const ModelFile> file;
  int64_t offset = 0;
  uint8_t* out = nullptr;
  int64_t bytes = 0;
  Digest* digests = nullptr;  // of each kContentChunk of a table; null: not wanted
};

// A layer's small tensors as the file holds them.
struct RawWeights {
  std::unique_ptr<AnonymousMemory> wkv, q, k;
};

// One thread's work. What is read is digested at once, while other threads wait for the disk.
absl::Status ReadChunk(const PendingRead& chunk, std::atomic<int64_t>& bytes_done) {
  Sha256 sha;
  for (int64_t at = 0; at < chunk.bytes; at += kReadChunk) {
    const int64_t bytes = std::min(kReadChunk, chunk.bytes - at);
    RETURN_IF_ERROR(chunk.file->ReadAt(chunk.offset + at, chunk.out + at, bytes));
    if (chunk.digests != nullptr) sha.Add(absl::MakeConstSpan(chunk.out + at, static_cast<size_t>(bytes)));
    bytes_done += bytes;
  }
  if (chunk.digests != nullptr) *chunk.digests = sha.Finish();
  return absl::OkStatus();
}

absl::Status ReadAll(const std::vector<PendingRead>& tensors, const LoadOptions& options) {
  std::vector<PendingRead> chunks;
  LoadProgress progress;
  for (const PendingRead& tensor : tensors) {
    progress.bytes_total += tensor.bytes;
    const int64_t step = tensor.digests == nullptr ? kReadChunk : kContentChunk;
    for (int64_t done = 0; done < tensor.bytes; done += step) {
      chunks.push_back({tensor.file, tensor.offset + done, tensor.out + done, std::min(step, tensor.bytes - done),
                        tensor.digests == nullptr ? nullptr : tensor.digests + done / step});
    }
  }
  std::atomic<int64_t> bytes_done = 0;
  const auto report = [&] {
    if (!options.progress) return;
    progress.bytes_done = bytes_done.load();
    options.progress(progress);
  };
  RETURN_IF_ERROR(RunChunks(
      static_cast<int64_t>(chunks.size()), options.threads,
      [&](int64_t i) { return ReadChunk(chunks[static_cast<size_t>(i)], bytes_done); }, report));
  report();
  return absl::OkStatus();
}

// The indices of the layers to serve, ascending.
absl::StatusOr<std::vector<size_t>> ServedLayers(const std::string& path, const EngramHeader& header,
                                                 const std::vector<int64_t>& wanted) {
  std::vector<size_t> served;
  for (size_t i = 0; i < header.layer_ids.size(); ++i) {
    if (wanted.empty() || absl::c_linear_search(wanted, header.layer_ids[i])) served.push_back(i);
  }
  if (wanted.empty()) return served;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!absl::c_linear_search(header.layer_ids, wanted[i])) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": has no engram at layer ", wanted[i],
                                                     ", which --layers names; it has layers ",
                                                     absl::StrJoin(header.layer_ids, ", ")));
    }
    if (std::count(wanted.begin(), wanted.end(), wanted[i]) > 1) {
      return absl::InvalidArgumentError(absl::StrCat("--layers names layer ", wanted[i], " twice"));
    }
  }
  return served;
}

// The header as if the model had these layers alone.
EngramHeader OfLayers(const EngramHeader& header, const std::vector<size_t>& served) {
  EngramHeader part = header;
  part.layer_ids.clear();
  part.layers.clear();
  part.multipliers.clear();
  part.primes.clear();
  part.offsets.clear();
  const auto take = [](const std::vector<int64_t>& from, size_t index, size_t count, std::vector<int64_t>& to) {
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(index * count);
    to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(count));
  };
  const auto ngram = static_cast<size_t>(header.geometry.max_ngram);
  const auto columns = static_cast<size_t>(header.geometry.columns);
  for (const size_t i : served) {
    part.layer_ids.push_back(header.layer_ids[i]);
    part.layers.push_back(header.layers[i]);
    take(header.multipliers, i, ngram, part.multipliers);
    take(header.primes, i, columns, part.primes);
    take(header.offsets, i, columns, part.offsets);
  }
  return part;
}

class LoadedModel : public EngramModel {
 public:
  static absl::StatusOr<std::shared_ptr<const EngramModel>> Load(const std::string& path, const LoadOptions& options) {
    ASSIGN_OR_RETURN(const ModelFiles files, ModelFiles::Open(path));
    ASSIGN_OR_RETURN(const EngramHeader whole, ReadEngramHeader(files));
    ASSIGN_OR_RETURN(const std::vector<size_t> served, ServedLayers(path, whole, options.layers));
    EngramHeader header = OfLayers(whole, served);
    std::shared_ptr<LoadedModel> model(new LoadedModel);
    model->path_ = path;
    model->residency_ = options.residency;
    std::vector<RawWeights> raw(header.layers.size());
    std::vector<ChunkDigests> chunks(header.layers.size());
    RETURN_IF_ERROR(model->ReadTensors(header, options, raw, chunks));
    RETURN_IF_ERROR(model->ExpandWeights(header, options.threads, raw));
    RETURN_IF_ERROR(model->TakeDigests(whole, served, options.threads, raw));
    RETURN_IF_ERROR(model->TakeContentDigest(files, whole, options, chunks));
    for (size_t i = 0; i < raw.size(); ++i) {
      if (model->layers_[i].wkv_type == GgufType::kQ2_K) model->memory_.push_back(std::move(raw[i].wkv));
    }
    model->TakeHeader(std::move(header));
    return model;
  }

  absl::Status ReadRowsFromFile(size_t layer, int64_t first, int64_t count, uint8_t* out) const override {
    return ReadTableFromFile(layer, first * kernels::kQ2KBlockBytes, count * kernels::kQ2KBlockBytes, out);
  }

  absl::Status ReadTableFromFile(size_t layer, int64_t at, int64_t bytes, uint8_t* out) const override {
    const TensorPlace& table = tables_[layer];
    return table.file->ReadAt(table.tensor.offset + at, out, bytes);
  }

  void WillReadRows(size_t layer, absl::Span<const int64_t> rows) const override {
    if (residency_ != Residency::kMmap) return;
    const TensorPlace& table = tables_[layer];
    for (const int64_t row : rows) {
      if (row < 0) continue;
      table.file->WillRead(table.tensor.offset + row * kernels::kQ2KBlockBytes, kernels::kQ2KBlockBytes);
    }
  }

 private:
  LoadedModel() = default;

  // Memory that the model keeps.
  absl::StatusOr<uint8_t*> AllocateKept(int64_t bytes, const std::string& what) {
    ASSIGN_OR_RETURN(auto memory, Allocate(bytes, what));
    memory_.push_back(std::move(memory));
    return memory_.back()->data();
  }

  absl::StatusOr<std::unique_ptr<AnonymousMemory>> Allocate(int64_t bytes, const std::string& what) const {
    auto memory = AnonymousMemory::Allocate(bytes, what);
    if (memory.ok()) return memory;
    return absl::Status(memory.status().code(), absl::StrCat(path_, ": ", memory.status().message()));
  }

  // Brings the tables where `options.residency` wants them and the small tensors into memory.
  absl::Status ReadTensors(const EngramHeader& header, const LoadOptions& options, std::vector<RawWeights>& raw,
                           std::vector<ChunkDigests>& chunks) {
    std::vector<PendingRead> reads;
    const auto stage = [&](const TensorPlace& place, std::unique_ptr<AnonymousMemory>& into) -> absl::Status {
      ASSIGN_OR_RETURN(into, Allocate(place.tensor.bytes, absl::StrCat("tensor '", place.tensor.name, "'")));
      reads.push_back({place.file, place.tensor.offset, into->data(), place.tensor.bytes});
      return absl::OkStatus();
    };
    for (size_t i = 0; i < header.layers.size(); ++i) {
      const LayerTensors& tensors = header.layers[i];
      RETURN_IF_ERROR(stage(tensors.wkv, raw[i].wkv));
      RETURN_IF_ERROR(stage(tensors.q, raw[i].q));
      RETURN_IF_ERROR(stage(tensors.k, raw[i].k));

      EngramLayer layer;
      layer.layer_id = header.layer_ids[i];
      layer.table_type = tensors.table.tensor.type;
      layer.wkv_type = tensors.wkv.tensor.type;
      layer.table.rows = header.rows(i);
      if (options.residency == Residency::kMmap) {
        ASSIGN_OR_RETURN(auto mapping, tensors.table.file->MapForRandomReads(tensors.table.tensor.offset,
                                                                             tensors.table.tensor.bytes));
        layer.table.bytes = mapping->data();
        mappings_.push_back(std::move(mapping));
      } else {
        std::unique_ptr<AnonymousMemory> table;
        RETURN_IF_ERROR(stage(tensors.table, table));
        chunks[i].resize(static_cast<size_t>(ContentChunks(tensors.table.tensor.bytes)));
        reads.back().digests = chunks[i].data();
        tensors.table.file->AdviseReadOnce();
        layer.table.bytes = table->data();
        memory_.push_back(std::move(table));
      }
      tables_.push_back(tensors.table);
      layers_.push_back(layer);
    }
    return ReadAll(reads, options);
  }

  absl::Status ExpandWeights(const EngramHeader& header, int threads, const std::vector<RawWeights>& raw) {
    const EngramGeometry& geometry = header.geometry;
    const int64_t wkv_values = geometry.inputs() * geometry.outputs();
    const int64_t gate_values = geometry.highway_values();
    for (size_t i = 0; i < layers_.size(); ++i) {
      const LayerTensors& tensors = header.layers[i];
      const GgufType type = tensors.wkv.tensor.type;
      if (type == GgufType::kQ2_K) {
        layers_[i].wkv.q2k = raw[i].wkv->data();
      } else {
        ASSIGN_OR_RETURN(auto bf16_bytes, AllocateKept(wkv_values * sizeof(kernels::Bf16),
                                                       absl::StrCat("tensor '", tensors.wkv.tensor.name, "' as bf16")));
        auto* bf16 = reinterpret_cast<kernels::Bf16*>(bf16_bytes);
        const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
        RETURN_IF_ERROR(RunChunks((wkv_values + kExpandValues - 1) / kExpandValues, threads, [&](int64_t chunk) {
          const int64_t begin = chunk * kExpandValues;
          ExpandToBf16(type, raw[i].wkv->data() + begin / traits.block_values * traits.block_bytes,
                       std::min(kExpandValues, wkv_values - begin), bf16 + begin);
          return absl::OkStatus();
        }));
        layers_[i].wkv.bf16 = bf16;
      }
      layers_[i].wkv.outputs = geometry.outputs();
      layers_[i].wkv.inputs = geometry.inputs();

      ASSIGN_OR_RETURN(auto qk_bytes, AllocateKept(gate_values * sizeof(float), "the product of q and k"));
      auto* qk = reinterpret_cast<float*>(qk_bytes);
      std::vector<float> k(gate_values);
      ExpandToF32(tensors.q.tensor.type, raw[i].q->data(), gate_values, qk);
      ExpandToF32(tensors.k.tensor.type, raw[i].k->data(), gate_values, k.data());
      for (int64_t j = 0; j < gate_values; ++j) qk[j] *= k[j];
      layers_[i].gate = {qk, geometry.copies, geometry.dim, geometry.eps};
    }
    return absl::OkStatus();
  }

  // `whole`: of all layers; those that are not served are read for it.
  absl::Status TakeDigests(const EngramHeader& whole, const std::vector<size_t>& served, int threads,
                           const std::vector<RawWeights>& raw) {
    hash_digest_ = HashDigest(whole);
    std::vector<WeightDigests> weights(whole.layers.size());
    const auto digest = [](const AnonymousMemory& memory, const TensorPlace& place) {
      Sha256 sha;
      sha.Add(absl::MakeConstSpan(memory.data(), place.tensor.bytes));
      return sha.Finish();
    };
    RETURN_IF_ERROR(RunChunks(static_cast<int64_t>(weights.size()), threads, [&](int64_t chunk) -> absl::Status {
      const auto i = static_cast<size_t>(chunk);
      const LayerTensors& tensors = whole.layers[i];
      const auto at = std::lower_bound(served.begin(), served.end(), i);
      if (at == served.end() || *at != i) {
        ASSIGN_OR_RETURN(weights[i].wkv, DigestTensor(tensors.wkv));
        ASSIGN_OR_RETURN(weights[i].q, DigestTensor(tensors.q));
        ASSIGN_OR_RETURN(weights[i].k, DigestTensor(tensors.k));
        return absl::OkStatus();
      }
      const RawWeights& read = raw[static_cast<size_t>(at - served.begin())];
      weights[i].wkv = digest(*read.wkv, tensors.wkv);
      weights[i].q = digest(*read.q, tensors.q);
      weights[i].k = digest(*read.k, tensors.k);
      return absl::OkStatus();
    }));
    config_digest_ = ConfigDigest(whole, hash_digest_, weights);
    return absl::OkStatus();
  }

  // `chunks`: of the tables that were read; mapped ones have none.
  absl::Status TakeContentDigest(const ModelFiles& files, const EngramHeader& whole, const LoadOptions& options,
                                 const std::vector<ChunkDigests>& chunks) {
    const bool read = options.residency == Residency::kRam && chunks.size() == whole.layers.size();
    if (read) content_digest_ = ContentDigest(whole, config_digest_, chunks);
    const absl::StatusOr<Digest> said = ReadSidecar(files, config_digest_);
    if (!said.ok()) {
      if (!absl::IsNotFound(said.status()) && options.warn) {
        options.warn(absl::StrCat(SidecarPath(path_), ": left aside: ", said.status().message()));
      }
      return absl::OkStatus();
    }
    if (read && *said != *content_digest_) {
      return absl::DataLossError(absl::StrCat(
          path_, ": the tables read have content_digest ", DigestHex(*content_digest_), "; expected ", DigestHex(*said),
          ", which ", SidecarPath(path_), " says of files of these sizes and times (remove it if they are right)"));
    }
    content_digest_ = *said;
    return absl::OkStatus();
  }

  void TakeHeader(EngramHeader header) {
    geometry_ = header.geometry;
    token_map_ = std::move(header.token_map);
    multipliers_ = std::move(header.multipliers);
    primes_ = std::move(header.primes);
    offsets_ = std::move(header.offsets);
    hash_tables_.max_ngram = geometry_.max_ngram;
    hash_tables_.heads = geometry_.heads;
    hash_tables_.layers = static_cast<int>(layers_.size());
    hash_tables_.pad_id = geometry_.pad_id;
    hash_tables_.multipliers = multipliers_.data();
    hash_tables_.primes = primes_.data();
    hash_tables_.offsets = offsets_.data();
    for (const int64_t prime : primes_) reciprocals_.push_back(kernels::ReciprocalOf(prime));
    hash_tables_.reciprocals = reciprocals_.data();
  }

  // What the pointers in layers_ point into.
  std::vector<std::unique_ptr<AnonymousMemory>> memory_;
  std::vector<std::unique_ptr<const FileMapping>> mappings_;
  std::vector<TensorPlace> tables_;  // where the tables stand in their files, per layer
};

}  // namespace

absl::StatusOr<std::shared_ptr<const EngramModel>> EngramModel::Load(const std::string& path,
                                                                     const LoadOptions& options) {
  return LoadedModel::Load(path, options);
}

}  // namespace engram
