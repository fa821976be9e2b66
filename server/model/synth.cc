#include "server/model/synth.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/chunk_threads.h"
#include "server/model/engram_header.h"
#include "server/model/gguf_writer.h"
#include "server/model/hash_constants.h"
#include "server/model/model_files.h"
#include "server/model/status_macros.h"
#include "server/model/synth_values.h"

namespace engram {
namespace {

// Blocks of a chunk: about 8 MiB of Q2_K, so that a thread's buffer is small and a write is long.
constexpr int64_t kChunkBlocks = 98304;
// With the other bounds, no sum of sizes leaves 63 bits.
constexpr int64_t kMostEngramVocab = int64_t{1} << 32;

struct SynthTensor {
  std::string name;
  std::vector<uint64_t> ne;
  GgufType type = GgufType::kQ2_K;
  uint64_t stream = 0;
  bool norm = false;  // q or k: norm weights; else blocks

  int64_t values() const {
    return static_cast<int64_t>(std::accumulate(ne.begin(), ne.end(), uint64_t{1}, std::multiplies<>()));
  }
  int64_t bytes() const {
    const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
    return values() / traits.block_values * traits.block_bytes;
  }
  int64_t chunks() const { return norm ? 1 : (values() / kernels::kRowValues + kChunkBlocks - 1) / kChunkBlocks; }
  // Bytes of one full chunk.
  int64_t chunk_bytes() const {
    const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
    return kChunkBlocks * kernels::kRowValues / traits.block_values * traits.block_bytes;
  }

  // The bytes of one chunk.
  std::vector<uint8_t> Make(int64_t chunk) const {
    const int64_t begin = chunk * chunk_bytes();
    std::vector<uint8_t> out(norm ? bytes() : std::min(chunk_bytes(), bytes() - begin));
    if (norm) {
      SynthNorm(type, stream, values(), out.data());
    } else {
      const int64_t blocks = std::min(kChunkBlocks, values() / kernels::kRowValues - chunk * kChunkBlocks);
      SynthBlocks(type, stream, chunk * kChunkBlocks, blocks, out.data());
    }
    return out;
  }
};

struct SynthPlan {
  std::vector<GgufWriter> shards;
  std::vector<SynthTensor> tensors;
  std::vector<size_t> shard_of;  // per tensor
};

// `why` says where the bounds come from, if that is not plain.
absl::Status CheckRange(const char* flag, int64_t value, int64_t least, int64_t most, const char* why = "") {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, " is ", value, "; expected ", least, " to ", most, why));
}

absl::Status CheckLayers(const std::vector<int64_t>& layers) {
  const auto count = static_cast<int64_t>(layers.size());
  if (count < 1 || count > kMaxLayers) {
    return absl::InvalidArgumentError(absl::StrCat("--layers has ", count, " ids; expected 1 to ", kMaxLayers));
  }
  for (int64_t layer : layers) RETURN_IF_ERROR(CheckRange("--layers", layer, 0, INT32_MAX));
  for (size_t i = 1; i < layers.size(); ++i) {
    if (layers[i] > layers[i - 1]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--layers has ", layers[i], " behind ", layers[i - 1], "; expected ascending ids, each once"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const SynthOptions& options) {
  RETURN_IF_ERROR(CheckRange("--dim", options.dim, 1, kMaxDim));
  RETURN_IF_ERROR(CheckRange("--hc", options.hc, 1, kernels::kMaxCopies));
  RETURN_IF_ERROR(CheckRange("--max-ngram", options.max_ngram, 2, kernels::kMaxNgram));
  RETURN_IF_ERROR(CheckRange("--heads", options.heads, 1, kMaxHeads));
  RETURN_IF_ERROR(CheckLayers(options.layers));
  // The token map stands in the header, which readers bound (kGgufMaxHeaderBytes).
  RETURN_IF_ERROR(CheckRange("--vocab", options.vocab, 2, int64_t{1} << 24));
  RETURN_IF_ERROR(CheckRange("--compressed-vocab", options.compressed_vocab, 2,
                             std::min<int64_t>(options.vocab, kMostCompressedVocab), ", no more than --vocab"));
  RETURN_IF_ERROR(CheckRange("--dead-tokens", options.dead_tokens, 0, options.vocab - options.compressed_vocab,
                             ", what --vocab has beyond --compressed-vocab"));
  RETURN_IF_ERROR(CheckRange("--pad-id", options.pad_id, 0, options.compressed_vocab - 1));
  RETURN_IF_ERROR(CheckRange("--engram-vocab-size", options.engram_vocab_size, 2, kMostEngramVocab));
  RETURN_IF_ERROR(CheckRange("--alignment", options.alignment, 1, int64_t{1} << 20));
  if ((options.alignment & (options.alignment - 1)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--alignment is ", options.alignment, "; expected a power of two"));
  }
  RETURN_IF_ERROR(CheckRange("--split", options.split, 1, static_cast<int64_t>(options.layers.size()) * 4));
  if (!(options.rows_scale > 0) || options.rows_scale > 1000) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rows-scale is ", options.rows_scale, "; expected more than 0, at most 1000"));
  }
  if (!std::isnormal(static_cast<float>(options.eps)) || options.eps < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--eps is ", options.eps, "; expected a positive, finite, normal F32"));
  }
  return absl::OkStatus();
}

// Onto 0 .. compressed - 1, the rest repeated, some dead, shuffled; the pad's own entry is another id, so that mapping
// the pad once too often shows.
std::vector<int32_t> MakeTokenMap(const SynthOptions& options, uint64_t stream) {
  std::vector<int32_t> map(options.vocab);
  uint64_t draw = 0;
  for (int64_t i = 0; i < options.vocab; ++i) {
    if (i < options.compressed_vocab) {
      map[i] = static_cast<int32_t>(i);
    } else if (i < options.compressed_vocab + options.dead_tokens) {
      map[i] = -1;
    } else {
      map[i] = static_cast<int32_t>(CounterRandom(stream, draw++) % options.compressed_vocab);
    }
  }
  for (int64_t i = options.vocab - 1; i > 0; --i) std::swap(map[i], map[CounterRandom(stream, draw++) % (i + 1)]);
  for (int64_t i = 1; map[options.pad_id] == options.pad_id; ++i) {
    std::swap(map[options.pad_id], map[(options.pad_id + i) % options.vocab]);
  }
  return map;
}

std::vector<SynthTensor> MakeTensors(const SynthOptions& options, absl::Span<const int64_t> primes) {
  const uint64_t columns = (options.max_ngram - 1) * options.heads;
  const uint64_t dim = options.dim, hc = options.hc;
  std::vector<SynthTensor> tensors;
  for (size_t i = 0; i < options.layers.size(); ++i) {
    const std::string block = absl::StrCat("blk.", options.layers[i], ".");
    const auto of_layer = primes.subspan(i * columns, columns);
    const uint64_t rows = std::accumulate(of_layer.begin(), of_layer.end(), uint64_t{0});
    const auto stream = [&](uint64_t kind) { return CounterRandom(options.seed, 16 * (options.layers[i] + 1) + kind); };
    tensors.push_back({block + "engram_embd.weight", {256, rows}, GgufType::kQ2_K, stream(0), false});
    tensors.push_back(
        {block + "engram_wkv.weight", {columns * 256, dim * (hc + 1)}, options.wkv_type, stream(1), false});
    tensors.push_back({block + "engram_q.weight", {dim, hc}, options.qk_type, stream(2), true});
    tensors.push_back({block + "engram_k.weight", {dim, hc}, options.qk_type, stream(3), true});
  }
  return tensors;
}

void AddKeys(const SynthOptions& options, const std::vector<int64_t>& primes, GgufWriter& writer) {
  const int64_t columns = (options.max_ngram - 1) * options.heads;
  writer.AddText("general.architecture", "deepseek41");
  writer.AddText("general.name", absl::StrCat("engram-synth-", options.seed));
  writer.Add<uint32_t>("deepseek41.embedding_length", options.dim);
  writer.Add<uint32_t>("deepseek41.hyper_connection.count", options.hc);
  writer.Add<uint32_t>("deepseek41.block_count", options.layers.back() + 1);
  writer.Add<uint32_t>("deepseek41.vocab_size", options.vocab);
  writer.Add<float>("deepseek41.attention.layer_norm_rms_epsilon", static_cast<float>(options.eps));
  writer.AddArray("deepseek41.engram.layer_ids", std::vector<int32_t>(options.layers.begin(), options.layers.end()));
  writer.Add<uint32_t>("deepseek41.engram.head_count", options.heads);
  writer.Add<uint32_t>("deepseek41.engram.key_length", kernels::kRowValues);
  writer.Add<uint32_t>("deepseek41.engram.max_ngram_size", options.max_ngram);
  writer.Add<uint32_t>("deepseek41.engram.pad_id", options.pad_id);
  const auto unsigned_copy = [](const std::vector<int64_t>& from) {
    return std::vector<uint64_t>(from.begin(), from.end());
  };
  writer.AddArray(
      "deepseek41.engram.multipliers",
      unsigned_copy(MakeMultipliers(options.layers, static_cast<int>(options.max_ngram), options.compressed_vocab)));
  writer.AddArray("deepseek41.engram.primes", unsigned_copy(primes));
  writer.AddArray("deepseek41.engram.offsets", unsigned_copy(MakeOffsets(primes, columns)));
  writer.AddArray("deepseek41.engram.token_map", MakeTokenMap(options, CounterRandom(options.seed, 0)));
}

absl::StatusOr<SynthPlan> MakePlan(const SynthOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  const int64_t engram_vocab_size =
      std::max<int64_t>(2, std::llround(static_cast<double>(options.engram_vocab_size) * options.rows_scale));
  RETURN_IF_ERROR(CheckRange("--engram-vocab-size x --rows-scale", engram_vocab_size, 2, kMostEngramVocab));
  const std::vector<int64_t> primes =
      MakePrimes(static_cast<int64_t>(options.layers.size()), static_cast<int>(options.max_ngram),
                 static_cast<int>(options.heads), engram_vocab_size);
  SynthPlan plan;
  plan.tensors = MakeTensors(options, primes);
  plan.shards.resize(options.split);
  for (size_t i = 0; i < plan.shards.size(); ++i) {
    GgufWriter& writer = plan.shards[i];
    if (options.alignment != kGgufDefaultAlignment) writer.SetAlignment(static_cast<uint32_t>(options.alignment));
    if (i == 0) AddKeys(options, primes, writer);
    if (options.split == 1) continue;
    writer.Add<uint16_t>("split.no", static_cast<uint16_t>(i));
    writer.Add<uint16_t>("split.count", static_cast<uint16_t>(options.split));
    writer.Add<int32_t>("split.tensors.count", static_cast<int32_t>(plan.tensors.size()));
  }
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const SynthTensor& tensor = plan.tensors[i];
    plan.shard_of.push_back(i * plan.shards.size() / plan.tensors.size());
    plan.shards[plan.shard_of.back()].AddTensor(tensor.name, tensor.ne, tensor.type);
  }
  return plan;
}

absl::Status FileError(const std::string& path, const char* what) {
  const int error = errno;
  const std::string message = absl::StrCat(path, ": ", what, ": ", strerror(error));
  return error == ENOSPC || error == EDQUOT ? absl::ResourceExhaustedError(message) : absl::UnavailableError(message);
}

// A file that gets its name when it is complete, and vanishes when it is not.
class NewFile {
 public:
  explicit NewFile(std::string path) : path_(std::move(path)), partial_(path_ + ".partial") {}
  ~NewFile() {
    if (fd_ < 0) return;
    close(fd_);
    unlink(partial_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  absl::Status Create(int64_t bytes) {
    fd_ = open(partial_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd_ < 0) return FileError(partial_, "cannot be created");
    // Reserve now what would otherwise run out after an hour; not every file system can.
    if (fallocate(fd_, 0, 0, bytes) != 0) {
      if (errno != EOPNOTSUPP && errno != ENOSYS) return FileError(partial_, "has no room");
      if (ftruncate(fd_, bytes) != 0) return FileError(partial_, "cannot be extended");
    }
    return absl::OkStatus();
  }

  absl::Status WriteAt(int64_t offset, const void* bytes, int64_t count) const {
    const char* from = static_cast<const char*>(bytes);
    while (count > 0) {
      const ssize_t put = pwrite(fd_, from, count, offset);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return FileError(partial_, "cannot be written");
      from += put;
      offset += put;
      count -= put;
    }
    return absl::OkStatus();
  }

  absl::Status Commit() {
    const int fd = std::exchange(fd_, -1);
    const bool ok = close(fd) == 0 && rename(partial_.c_str(), path_.c_str()) == 0;
    return ok ? absl::OkStatus() : FileError(path_, "cannot be completed");
  }

 private:
  const std::string path_, partial_;
  int fd_ = -1;
};

absl::Status CheckTarget(const std::vector<std::string>& paths, int64_t bytes, bool force) {
  for (const std::string& path : paths) {
    struct stat status;
    if (!force && lstat(path.c_str(), &status) == 0) {
      return absl::AlreadyExistsError(absl::StrCat(path, ": exists already; expected a new name, or --force"));
    }
  }
  const std::filesystem::path folder = std::filesystem::path(paths.front()).parent_path();
  struct statvfs disk;
  if (statvfs(folder.empty() ? "." : folder.c_str(), &disk) != 0) return FileError(folder, "cannot be examined");
  const uint64_t free = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
  if (static_cast<uint64_t>(bytes) <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s: the model takes %d bytes (%.1f GiB) and the disk has %d (%.1f GiB); lower --rows-scale", paths.front(),
      bytes, static_cast<double>(bytes) / (1 << 30), free, static_cast<double>(free) / (1 << 30)));
}

}  // namespace

absl::StatusOr<SynthOptions> SynthPreset(const std::string& name) {
  SynthOptions options;
  if (name == "tiny") return options;
  if (name == "v41") {
    options.dim = 5120;
    options.vocab = 129280;
    options.compressed_vocab = 99092;
    options.engram_vocab_size = 16'000'000;
    return options;
  }
  return absl::InvalidArgumentError(absl::StrCat("--preset is ", GgufQuote(name), "; expected tiny or v41"));
}

absl::StatusOr<std::string> SynthModelBytes(const SynthOptions& options) {
  SynthOptions whole = options;
  whole.split = 1;
  ASSIGN_OR_RETURN(const SynthPlan plan, MakePlan(whole));
  std::string file = plan.shards.front().File();
  for (const SynthTensor& tensor : plan.tensors) {
    const int64_t offset = plan.shards.front().DataOffset(tensor.name);
    for (int64_t chunk = 0; chunk < tensor.chunks(); ++chunk) {
      const std::vector<uint8_t> bytes = tensor.Make(chunk);
      std::copy(bytes.begin(), bytes.end(), file.begin() + offset + chunk * tensor.chunk_bytes());
    }
  }
  return file;
}

absl::StatusOr<std::vector<std::string>> WriteSynthModel(const SynthOptions& options) {
  ASSIGN_OR_RETURN(const SynthPlan plan, MakePlan(options));
  std::vector<std::string> paths;
  const std::string stem =
      absl::EndsWith(options.out, ".gguf") ? options.out.substr(0, options.out.size() - 5) : options.out;
  for (int64_t i = 1; i <= options.split; ++i) {
    paths.push_back(options.split == 1 ? options.out : ShardPath(stem, i, options.split));
  }
  int64_t total = 0;
  for (const GgufWriter& shard : plan.shards) total += shard.FileBytes();
  RETURN_IF_ERROR(CheckTarget(paths, total, options.force));

  std::vector<std::unique_ptr<NewFile>> files;
  int64_t headers = 0;
  for (size_t i = 0; i < paths.size(); ++i) {
    files.push_back(std::make_unique<NewFile>(paths[i]));
    RETURN_IF_ERROR(files.back()->Create(plan.shards[i].FileBytes()));
    const std::string header = plan.shards[i].Header();
    RETURN_IF_ERROR(files.back()->WriteAt(0, header.data(), static_cast<int64_t>(header.size())));
    headers += static_cast<int64_t>(header.size());
  }
  struct Job {
    size_t tensor;
    int64_t chunk, offset;
  };
  std::vector<Job> jobs;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const int64_t begin = plan.shards[plan.shard_of[i]].DataOffset(plan.tensors[i].name);
    for (int64_t chunk = 0; chunk < plan.tensors[i].chunks(); ++chunk) {
      jobs.push_back({i, chunk, begin + chunk * plan.tensors[i].chunk_bytes()});
    }
  }
  std::atomic<int64_t> written = headers;
  const auto report = [&] {
    if (options.progress) options.progress(written.load(), total);
  };
  const auto write = [&](int64_t i) -> absl::Status {
    const Job& job = jobs[i];
    const std::vector<uint8_t> bytes = plan.tensors[job.tensor].Make(job.chunk);
    const NewFile& file = *files[plan.shard_of[job.tensor]];
    RETURN_IF_ERROR(file.WriteAt(job.offset, bytes.data(), static_cast<int64_t>(bytes.size())));
    written += static_cast<int64_t>(bytes.size());
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(RunChunks(static_cast<int64_t>(jobs.size()), options.threads, write, report));
  written = total;
  for (auto& file : files) RETURN_IF_ERROR(file->Commit());
  report();
  return paths;
}

}  // namespace engram
