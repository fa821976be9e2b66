// Loading: fixtures, weights of every type, both residencies, tables larger than 4 GiB.
#include "server/model/engram_model.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/model/synth.h"
#include "server/model/synth_values.h"
#include "server/model/tensor_values.h"
#include "tests/model/small_model.h"

namespace engram {
namespace {

std::string Data(const std::string& name) { return std::string(ENGRAM_TEST_DATA) + "/" + name; }

void ExpectGeometryOf(const std::string& folder) {
  const auto expected = nlohmann::json::parse(ReadTestFile(Data(folder + "/expected.json")));
  const auto model = EngramModel::Load(Data(folder + "/" + expected["files"][0].get<std::string>()), {});
  ASSERT_TRUE(model.ok()) << model.status();
  const EngramGeometry& geometry = (*model)->geometry();
  EXPECT_EQ(geometry.dim, expected["dim"]);
  EXPECT_EQ(geometry.copies, expected["hc"]);
  EXPECT_EQ(geometry.head_dim, expected["head_dim"]);
  EXPECT_EQ(geometry.max_ngram, expected["max_ngram"]);
  EXPECT_EQ(geometry.heads, expected["n_heads"]);
  EXPECT_EQ(geometry.columns, expected["cols"]);
  EXPECT_EQ(geometry.vocab, expected["vocab"]);
  EXPECT_EQ(geometry.pad_id, expected["pad_id"]);
  EXPECT_EQ(geometry.eps, expected["eps"].get<float>());
  ASSERT_EQ((*model)->layers().size(), expected["layers"].size());
  for (size_t i = 0; i < expected["layers"].size(); ++i) {
    const EngramLayer& layer = (*model)->layers()[i];
    EXPECT_EQ(layer.layer_id, expected["layers"][i]);
    EXPECT_EQ(layer.table.rows, expected["rows"][i]);
    EXPECT_EQ(GgufTypeName(layer.table_type), expected["table"]);
    EXPECT_EQ(GgufTypeName(layer.wkv_type), expected["wkv_type"]);
    EXPECT_EQ(layer.wkv.inputs, geometry.inputs());
    EXPECT_EQ(layer.wkv.outputs, geometry.outputs());
    EXPECT_EQ(layer.wkv.q2k != nullptr, layer.wkv_type == GgufType::kQ2_K);
    EXPECT_EQ(layer.wkv.bf16 == nullptr, layer.wkv_type == GgufType::kQ2_K);
    EXPECT_EQ(layer.gate.copies, geometry.copies);
    EXPECT_EQ(layer.gate.dim, geometry.dim);
    EXPECT_EQ(layer.gate.eps, geometry.eps);
  }
  EXPECT_EQ((*model)->hash_tables().layers, static_cast<int>(expected["layers"].size()));
  EXPECT_EQ((*model)->hash_tables().columns(), geometry.columns);
  EXPECT_EQ((*model)->token_map().size(), static_cast<size_t>(geometry.vocab));
}

TEST(EngramModel, SomeLayersAreThoseOfTheWholeModel) {
  const std::string path = Data("split/split-00001-of-00002.gguf");
  const auto whole = EngramModel::Load(path, {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (const Residency residency : {Residency::kRam, Residency::kMmap}) {
    LoadOptions options;
    options.residency = residency;
    options.layers = {5, 0};  // of 0, 3, 5
    const auto some = EngramModel::Load(path, options);
    ASSERT_TRUE(some.ok()) << some.status();
    EXPECT_EQ((*some)->hash_digest(), (*whole)->hash_digest());
    EXPECT_EQ((*some)->config_digest(), (*whole)->config_digest());
    EXPECT_FALSE((*some)->content_digest().has_value()) << "of tables that were not read";
    ASSERT_EQ((*some)->layers().size(), 2);
    const kernels::HashTables &from = (*whole)->hash_tables(), &to = (*some)->hash_tables();
    EXPECT_EQ(to.layers, 2);
    for (const auto& [in_some, in_whole] : {std::pair<size_t, size_t>{0, 0}, {1, 2}}) {
      const EngramLayer &got = (*some)->layers()[in_some], &expected = (*whole)->layers()[in_whole];
      EXPECT_EQ(got.layer_id, expected.layer_id);
      ASSERT_EQ(got.table.rows, expected.table.rows);
      EXPECT_EQ(std::memcmp(got.table.bytes, expected.table.bytes,
                            static_cast<size_t>(got.table.rows * kernels::kQ2KBlockBytes)),
                0);
      for (int i = 0; i < from.max_ngram; ++i) {
        EXPECT_EQ(to.multipliers[in_some * from.max_ngram + i], from.multipliers[in_whole * from.max_ngram + i]);
      }
      for (int c = 0; c < from.columns(); ++c) {
        const size_t at = in_some * from.columns() + c, of = in_whole * from.columns() + c;
        EXPECT_EQ(to.primes[at], from.primes[of]);
        EXPECT_EQ(to.offsets[at], from.offsets[of]);
        EXPECT_EQ(to.reciprocals[at], from.reciprocals[of]);
      }
      std::vector<uint8_t> row(kernels::kQ2KBlockBytes);
      ASSERT_TRUE((*some)->ReadRowsFromFile(in_some, 1, 1, row.data()).ok());
      EXPECT_EQ(std::memcmp(row.data(), expected.table.bytes + row.size(), row.size()), 0);
    }
  }
  LoadOptions absent;
  absent.layers = {3, 4};
  EXPECT_THAT(std::string(EngramModel::Load(path, absent).status().message()),
              testing::HasSubstr("has no engram at layer 4, which --layers names; it has layers 0, 3, 5"));
  absent.layers = {3, 3};
  EXPECT_EQ(EngramModel::Load(path, absent).status().message(), "--layers names layer 3 twice");
}

TEST(EngramModel, TinyFixture) { ExpectGeometryOf("tiny"); }
TEST(EngramModel, SplitFixture) { ExpectGeometryOf("split"); }

// The first call of the fixture, through the loaded constants and token map.
TEST(EngramModel, RowIdsOfTheFixtures) {
  for (const std::string folder : {"tiny", "split"}) {
    const auto expected = nlohmann::json::parse(ReadTestFile(Data(folder + "/expected.json")));
    const std::string results = ReadTestFile(Data(folder + "/expected.bin"));
    const auto model = LoadMapped(Data(folder + "/" + expected["files"][0].get<std::string>()));
    ASSERT_TRUE(model.ok()) << model.status();
    const auto& call = expected["cases"][0]["calls"][0];
    ASSERT_EQ(call["start"], 0);
    std::vector<int32_t> window((*model)->geometry().max_ngram - 1, kernels::kDead);
    for (int64_t token : call["tokens"]) window.push_back((*model)->token_map()[token]);
    std::vector<int64_t> ids(call["row_ids_i64"]["bytes"].get<size_t>() / sizeof(int64_t));
    kernels::Workers workers(1);
    kernels::ReferenceKernels().hash_window((*model)->hash_tables(), window.data(),
                                            static_cast<int64_t>(call["tokens"].size()), ids.data(), workers);
    EXPECT_EQ(std::memcmp(ids.data(), results.data() + call["row_ids_i64"]["offset"].get<size_t>(),
                          ids.size() * sizeof(int64_t)),
              0)
        << folder;
  }
}

TEST(EngramModel, BothResidenciesHoldTheFilesBytes) {
  const std::string path = Data("tiny/tiny.gguf");
  const std::string file = ReadTestFile(path);
  LoadOptions ram, map;
  ram.threads = 3;
  map.residency = Residency::kMmap;
  const auto a = EngramModel::Load(path, ram), b = EngramModel::Load(path, map);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ((*a)->residency(), Residency::kRam);
  EXPECT_EQ((*b)->residency(), Residency::kMmap);
  EXPECT_EQ((*a)->config_digest(), (*b)->config_digest());
  for (size_t i = 0; i < 2; ++i) {
    const EngramLayer &x = (*a)->layers()[i], &y = (*b)->layers()[i];
    const size_t bytes = x.table.rows * kernels::kQ2KBlockBytes;
    EXPECT_EQ(std::memcmp(x.table.bytes, y.table.bytes, bytes), 0);
    EXPECT_NE(file.find(std::string(reinterpret_cast<const char*>(x.table.bytes), bytes)), std::string::npos);
    const int64_t values = x.wkv.inputs * x.wkv.outputs;
    EXPECT_EQ(x.wkv.bf16, nullptr) << "Q2_K is used as it is";
    EXPECT_EQ(y.wkv.bf16, nullptr);
    EXPECT_EQ(std::memcmp(x.wkv.q2k, y.wkv.q2k, values / 256 * kernels::kQ2KBlockBytes), 0);
    EXPECT_EQ(std::memcmp(x.gate.qk, y.gate.qk, x.gate.copies * x.gate.dim * sizeof(float)), 0);
  }
}

TEST(EngramModel, WkvOfEveryTypeButQ2KIsExpandedToBf16) {
  for (GgufType type : {GgufType::kF32, GgufType::kF16, GgufType::kBF16, GgufType::kQ8_0}) {
    SmallModel small;
    small.wkv_type = type;
    const int64_t values = 512 * 96;
    const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
    small.wkv.resize(values / traits.block_values * traits.block_bytes);
    SynthBlocks(type, 3, 0, values / 256, reinterpret_cast<uint8_t*>(small.wkv.data()));
    const auto model = LoadMapped(WriteTestFile("m.gguf", small.Writer().File()));
    ASSERT_TRUE(model.ok()) << model.status();
    std::vector<float> want(values);
    ExpandToF32(type, reinterpret_cast<const uint8_t*>(small.wkv.data()), values, want.data());
    for (const EngramLayer& layer : (*model)->layers()) {
      for (int64_t i = 0; i < values; ++i) {
        ASSERT_EQ(layer.wkv.bf16[i], Bf16FromF32(want[i])) << GgufTypeName(type) << " " << i;
      }
    }
  }
}

TEST(EngramModel, GateWeightIsTheF32ProductOfQAndK) {
  for (GgufType type : {GgufType::kF32, GgufType::kF16, GgufType::kBF16, GgufType::kQ8_0}) {
    SmallModel small;
    small.qk_type = type;
    const int64_t values = 64;
    const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
    std::vector<uint8_t> block(256 / traits.block_values * traits.block_bytes);
    const size_t bytes = values / traits.block_values * traits.block_bytes;
    std::vector<float> q(values), k(values);
    SynthBlocks(type, 5, 0, 1, block.data());
    small.q.assign(block.begin(), block.begin() + static_cast<int64_t>(bytes));
    ExpandToF32(type, block.data(), values, q.data());
    SynthBlocks(type, 5, 1, 1, block.data());
    small.k.assign(block.begin(), block.begin() + static_cast<int64_t>(bytes));
    ExpandToF32(type, block.data(), values, k.data());
    const auto model = LoadMapped(WriteTestFile("m.gguf", small.Writer().File()));
    ASSERT_TRUE(model.ok()) << model.status();
    for (int64_t i = 0; i < values; ++i) EXPECT_EQ((*model)->layers()[1].gate.qk[i], q[i] * k[i]);
  }
}

// A row's byte offset needs 64 bits: 52 million rows are 4.4 GB. The file is sparse: it takes a few kilobytes.
TEST(EngramModel, LastRowOfATableLargerThan4GiB) {
  constexpr uint64_t kRows = 52'000'000;
  SmallModel small;
  small.rows = {8, kRows};
  GgufWriter writer = small.Writer();
  const std::string path = TestPath("big.gguf");
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, writer.FileBytes()), 0);
  const std::string header = writer.Header();
  ASSERT_EQ(pwrite(fd, header.data(), header.size(), 0), static_cast<ssize_t>(header.size()));
  uint8_t row[kernels::kQ2KBlockBytes];
  SynthQ2KBlocks(1, 0, 1, row);
  const int64_t last = static_cast<int64_t>((kRows - 1) * kernels::kQ2KBlockBytes);
  ASSERT_GT(last, int64_t{1} << 32);
  ASSERT_EQ(pwrite(fd, row, sizeof row, writer.DataOffset("blk.2.engram_embd.weight") + last),
            static_cast<ssize_t>(sizeof row));
  close(fd);
  const auto model = LoadMapped(path);
  ASSERT_TRUE(model.ok()) << model.status();
  const kernels::TableView& table = (*model)->layers()[1].table;
  EXPECT_EQ(table.rows, static_cast<int64_t>(kRows));
  EXPECT_EQ(std::memcmp(table.bytes + (table.rows - 1) * kernels::kQ2KBlockBytes, row, sizeof row), 0);
  EXPECT_EQ(table.bytes[(table.rows - 1) * kernels::kQ2KBlockBytes - 1], 0);
  unlink(path.c_str());
}

TEST(EngramModel, ProgressCountsToTheEnd) {
  LoadOptions options;
  options.threads = 2;
  LoadProgress last;
  int calls = 0;
  options.progress = [&](const LoadProgress& progress) {
    EXPECT_GE(progress.bytes_done, last.bytes_done);
    last = progress;
    ++calls;
  };
  ASSERT_TRUE(EngramModel::Load(Data("tiny/tiny.gguf"), options).ok());
  EXPECT_GE(calls, 1);
  EXPECT_EQ(last.bytes_done, last.bytes_total);
  EXPECT_EQ(last.bytes_total, 2 * 645120 + 4 * 1024 + 559440 + 852600);
}

TEST(EngramModel, ModelOutlivesItsFile) {
  const std::string path = WriteTestFile("m.gguf", ReadTestFile(Data("tiny/tiny.gguf")));
  for (Residency residency : {Residency::kRam, Residency::kMmap}) {
    WriteTestFile("m.gguf", ReadTestFile(Data("tiny/tiny.gguf")));
    LoadOptions options;
    options.residency = residency;
    const auto model = EngramModel::Load(path, options);
    ASSERT_TRUE(model.ok()) << model.status();
    unlink(path.c_str());
    float values[256];
    kernels::DecodeQ2K((*model)->layers()[1].table.bytes + 10149 * kernels::kQ2KBlockBytes, values);
    EXPECT_TRUE(std::isfinite(values[255]));
  }
}

TEST(EngramModel, DigestsTellModelsApart) {
  SynthOptions options = *SynthPreset("tiny");
  options.dim = 32;
  options.hc = 1;
  const auto load = [&](const SynthOptions& o) { return *LoadMapped(WriteTestFile("m.gguf", *SynthModelBytes(o))); };
  const auto base = load(options);
  EXPECT_EQ(load(options)->config_digest(), base->config_digest());

  SynthOptions eps = options;
  eps.eps = 1e-6;
  EXPECT_EQ(load(eps)->hash_digest(), base->hash_digest());
  EXPECT_NE(load(eps)->config_digest(), base->config_digest());

  SynthOptions wkv = options;
  wkv.wkv_type = GgufType::kBF16;
  EXPECT_EQ(load(wkv)->hash_digest(), base->hash_digest());
  EXPECT_NE(load(wkv)->config_digest(), base->config_digest());

  SynthOptions map = options;  // the field's fault: a map of the same size, of another tokenizer
  map.seed = 2;
  EXPECT_NE(load(map)->hash_digest(), base->hash_digest());

  SynthOptions pad = options;
  pad.pad_id = 3;
  EXPECT_NE(load(pad)->hash_digest(), base->hash_digest());
}

}  // namespace
}  // namespace engram
