// Files that are no model, and splits: which shard is missing, wrong or given instead of the first.
#include "server/model/model_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/small_model.h"

namespace engram {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string ErrorOf(const std::string& path) {
  const auto model = EngramModel::Load(path, {});
  EXPECT_FALSE(model.ok());
  const std::string message(model.status().message());
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  return message;
}

TEST(ModelFile, MissingFile) {
  const std::string path = TestPath("absent.gguf");
  EXPECT_EQ(EngramModel::Load(path, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(ErrorOf(path), HasSubstr(path + ": cannot be opened: No such file"));
}

TEST(ModelFile, EmptyPath) { EXPECT_THAT(ErrorOf(""), HasSubstr("cannot be opened")); }

TEST(ModelFile, Directory) {
  EXPECT_THAT(ErrorOf(testing::TempDir()), HasSubstr("is a directory; expected a GGUF file"));
}

TEST(ModelFile, EmptyFile) {
  EXPECT_THAT(ErrorOf(WriteTestFile("m", "")), HasSubstr("is empty; expected a GGUF file"));
}

TEST(ModelFile, FourByteFile) {
  EXPECT_THAT(ErrorOf(WriteTestFile("m", "GGUF")), HasSubstr("the version needs 4 bytes"));
}

TEST(ModelFile, Text) { EXPECT_THAT(ErrorOf(WriteTestFile("m", "hello, world\n")), HasSubstr("begins with 'hell'")); }

TEST(ModelFile, FifoDoesNotHang) {
  const std::string path = TestPath("fifo");
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(ErrorOf(path), HasSubstr("is not a regular file"));
  unlink(path.c_str());
}

TEST(ModelFile, CharacterDevice) { EXPECT_THAT(ErrorOf("/dev/zero"), HasSubstr("is not a regular file")); }

TEST(ModelFile, FileThatShrinksUnderTheReaderIsAnError) {
  const std::string path = WriteTestFile("m", std::string(10000, 'x'));
  const auto file = ModelFile::Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(truncate(path.c_str(), 5000), 0);
  std::vector<uint8_t> bytes(10000);
  const absl::Status status = (*file)->ReadAt(0, bytes.data(), 10000);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ends at byte 5000 when read; it had 10000 bytes"));
}

TEST(ModelFile, HeaderLongerThanTheFirstReadIsReadOn) {
  GgufWriter writer;
  writer.AddText("general.architecture", "deepseek41");
  writer.AddTexts("tokenizer.ggml.tokens", std::vector<std::string>(200000, "a token of some length"));  // 6 MB
  const SmallModel model;
  model.AddKeys(writer);
  model.AddTensors(writer);
  const auto loaded = LoadMapped(WriteTestFile("m.gguf", writer.File()));
  EXPECT_TRUE(loaded.ok()) << loaded.status();
}

// Two shards of the small model, each ready to be bent.
struct TwoShards {
  TwoShards() {
    const SmallModel model;
    first.AddText("general.architecture", "deepseek41");
    model.AddKeys(first);
    SplitKeys(first, 0);
    SplitKeys(second, 1);
    GgufWriter all;
    SmallModel layer0 = model, layer2 = model;
    layer0.layers = {0};
    layer0.AddTensors(first);
    layer2.layers = {2};
    layer2.rows = {12};
    layer2.AddTensors(second);
  }

  static void SplitKeys(GgufWriter& writer, uint16_t no) {
    writer.Add<uint16_t>("split.no", no);
    writer.Add<uint16_t>("split.count", 2);
    writer.Add<int32_t>("split.tensors.count", 8);
  }

  std::string Write() const {
    const std::string path = WriteTestFile("m-00001-of-00002.gguf", first.File());
    WriteTestFile("m-00002-of-00002.gguf", second.File());
    return path;
  }

  GgufWriter first, second;
};

TEST(Split, TensorsInAnyShardAndAlignmentPerShard) {
  TwoShards shards;
  GgufWriter second;
  second.SetAlignment(4096);
  TwoShards::SplitKeys(second, 1);
  SmallModel layer2;
  layer2.layers = {2};
  layer2.rows = {12};
  layer2.AddTensors(second);
  shards.second = second;
  const auto model = LoadMapped(shards.Write());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->layers()[1].table.rows, 12);
}

TEST(Split, ShardOtherThanTheFirstIsRefused) {
  const TwoShards shards;
  shards.Write();
  EXPECT_THAT(ErrorOf(TestPath("m-00002-of-00002.gguf")),
              AllOf(HasSubstr("is shard 2 of 2 (key 'split.no' holds 1)"), HasSubstr("expected shard 1"),
                    HasSubstr("m-00001-of-00002.gguf")));
}

TEST(Split, MissingShardIsNamed) {
  const TwoShards shards;
  const std::string path = shards.Write();
  unlink(TestPath("m-00002-of-00002.gguf").c_str());
  EXPECT_EQ(EngramModel::Load(path, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(ErrorOf(path), HasSubstr("m-00002-of-00002.gguf: shard 2 of 2 is missing"));
}

TEST(Split, RenamedFirstShardIsRefused) {
  const TwoShards shards;
  EXPECT_THAT(ErrorOf(WriteTestFile("renamed.gguf", shards.first.File())),
              HasSubstr("key 'split.count' holds 2; expected a file name that ends in -00001-of-00002.gguf"));
}

TEST(Split, ShardOfAnotherPlaceIsRefused) {
  TwoShards shards;
  shards.second.RemoveKey("split.no");
  shards.second.Add<uint16_t>("split.no", 0);
  EXPECT_THAT(ErrorOf(shards.Write()),
              AllOf(HasSubstr("00002.gguf: key 'split.no' holds 0"), HasSubstr("expected 1 in shard 2")));
}

TEST(Split, ShardOfAnotherSplitIsRefused) {
  TwoShards shards;
  shards.second.RemoveKey("split.count");
  shards.second.Add<uint16_t>("split.count", 3);
  EXPECT_THAT(ErrorOf(shards.Write()), HasSubstr("key 'split.count' holds 3; expected 2 as in shard 1"));
}

TEST(Split, ShardWithoutSplitKeysIsRefused) {
  TwoShards shards;
  shards.second.RemoveKey("split.no");
  EXPECT_THAT(ErrorOf(shards.Write()), HasSubstr("00002-of-00002.gguf: key 'split.no' is missing"));
}

TEST(Split, TensorCountsMustAgreeAndBeTrue) {
  TwoShards shards;
  shards.second.RemoveKey("split.tensors.count");
  shards.second.Add<int32_t>("split.tensors.count", 9);
  EXPECT_THAT(ErrorOf(shards.Write()), HasSubstr("key 'split.tensors.count' holds 9; expected 8 as in shard 1"));

  TwoShards fewer;
  fewer.second.RemoveTensor("blk.2.engram_k.weight");
  EXPECT_THAT(ErrorOf(fewer.Write()),
              HasSubstr("key 'split.tensors.count' holds 8; expected 7, the tensors of all shards"));
}

TEST(Split, TensorInTwoShardsIsRefused) {
  TwoShards shards;
  shards.second.RemoveTensor("blk.2.engram_k.weight");
  shards.second.AddTensor("blk.0.engram_k.weight", {32, 2}, GgufType::kF32);
  EXPECT_THAT(ErrorOf(shards.Write()), AllOf(HasSubstr("tensor 'blk.0.engram_k.weight' stands in"), HasSubstr("too")));
}

TEST(Split, BadSecondShardIsNamed) {
  const TwoShards shards;
  const std::string path = shards.Write();
  WriteTestFile("m-00002-of-00002.gguf", "GGUF");
  EXPECT_THAT(ErrorOf(path), HasSubstr("m-00002-of-00002.gguf: the version needs 4 bytes"));
}

TEST(Split, AbsurdCountNamesTheFirstMissingShard) {
  TwoShards shards;
  shards.first.RemoveKey("split.count");
  shards.first.Add<uint16_t>("split.count", 65535);
  EXPECT_THAT(ErrorOf(WriteTestFile("m-00001-of-65535.gguf", shards.first.File())),
              HasSubstr("m-00002-of-65535.gguf: shard 2 of 65535 is missing"));
}

TEST(Split, CountOfOneIsAWholeModel) {
  GgufWriter writer = SmallModel().Writer();
  writer.Add<uint16_t>("split.count", 1);
  EXPECT_TRUE(LoadMapped(WriteTestFile("m.gguf", writer.File())).ok());
}

}  // namespace
}  // namespace engram
