// A valid model of dialect A of a few kilobytes, to be bent by tests; and files for it.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/model/engram_model.h"
#include "server/model/gguf_writer.h"

namespace engram {

inline constexpr const char* kPrefix = "deepseek41.engram.";

// Layers 0 and 2, 3-grams x 1 head, dim 32, hc 2, vocabulary 6 -> 5 ids, pad 1: tables of 8 and 12 rows.
struct SmallModel {
  std::string prefix = "deepseek41.";
  std::string engram_prefix = kPrefix;
  std::vector<int32_t> layers = {0, 2};
  uint32_t dim = 32, hc = 2;
  std::vector<uint64_t> rows = {8, 12};
  GgufType table_type = GgufType::kQ2_K, wkv_type = GgufType::kBF16, qk_type = GgufType::kF32;
  // Data of every wkv; every q; every k. Zeros where they are short.
  std::string wkv, q, k;

  GgufWriter Writer() const {
    GgufWriter writer;
    writer.AddText("general.architecture", "deepseek41");
    AddKeys(writer);
    AddTensors(writer);
    return writer;
  }

  void AddKeys(GgufWriter& writer) const {
    writer.Add<uint32_t>(prefix + "embedding_length", dim);
    writer.Add<uint32_t>(prefix + "hyper_connection.count", hc);
    writer.Add<uint32_t>(prefix + "vocab_size", 6);
    writer.Add<float>(prefix + "attention.layer_norm_rms_epsilon", 1e-6f);
    writer.AddArray(engram_prefix + "layer_ids", layers);
    writer.Add<uint32_t>(engram_prefix + "head_count", 1);
    writer.Add<uint32_t>(engram_prefix + "key_length", 256);
    writer.Add<uint32_t>(engram_prefix + "max_ngram_size", 3);
    writer.Add<uint32_t>(engram_prefix + "pad_id", 1);
    writer.AddArray<uint64_t>(engram_prefix + "multipliers", std::vector<uint64_t>{3, 5, 7, 9, 11, 13});
    writer.AddArray<uint64_t>(engram_prefix + "primes", std::vector<uint64_t>{3, 5, 5, 7});
    writer.AddArray<uint64_t>(engram_prefix + "offsets", std::vector<uint64_t>{0, 3, 0, 5});
    writer.AddArray<int32_t>(engram_prefix + "token_map", std::vector<int32_t>{4, 3, 2, 1, 0, -1});
  }

  void AddTensors(GgufWriter& writer) const {
    for (size_t i = 0; i < layers.size(); ++i) {
      const std::string block = "blk." + std::to_string(layers[i]) + ".";
      writer.AddTensor(block + "engram_embd.weight", {256, rows[i]}, table_type);
      writer.AddTensor(block + "engram_wkv.weight", {512, dim * (hc + 1)}, wkv_type, wkv);
      writer.AddTensor(block + "engram_q.weight", {dim, hc}, qk_type, q);
      writer.AddTensor(block + "engram_k.weight", {dim, hc}, qk_type, k);
    }
  }
};

// A path of the test's own in the temporary folder.
inline std::string TestPath(const std::string& name) {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  std::string own = std::string(test->test_suite_name()) + "." + test->name() + "." + name;
  for (char& c : own) c = c == '/' ? '_' : c;
  return testing::TempDir() + "/" + own;
}

inline std::string WriteTestFile(const std::string& name, const std::string& bytes) {
  const std::string path = TestPath(name);
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  return path;
}

inline std::string ReadTestFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

inline absl::StatusOr<std::shared_ptr<const EngramModel>> LoadMapped(const std::string& path) {
  LoadOptions options;
  options.residency = Residency::kMmap;
  return EngramModel::Load(path, options);
}

}  // namespace engram
