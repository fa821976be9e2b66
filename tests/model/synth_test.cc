// What engram-model synth writes: a file that loads, of the asked geometry, the same for the same seed.
#include "server/model/synth.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/model/progress_meter.h"
#include "tests/model/small_model.h"

namespace engram {
namespace {

using ::testing::HasSubstr;

SynthOptions Tiny(const std::string& out) {
  SynthOptions options = *SynthPreset("tiny");
  options.out = TestPath(out);
  options.force = true;
  return options;
}

std::string Write(const SynthOptions& options) {
  const auto paths = WriteSynthModel(options);
  EXPECT_TRUE(paths.ok()) << paths.status();
  return paths.ok() ? paths->front() : "";
}

TEST(Synth, TinyLoadsWithItsGeometry) {
  const auto model = LoadMapped(Write(Tiny("m.gguf")));
  ASSERT_TRUE(model.ok()) << model.status();
  const EngramGeometry& geometry = (*model)->geometry();
  EXPECT_EQ(geometry.dim, 64);
  EXPECT_EQ(geometry.copies, 4);
  EXPECT_EQ(geometry.columns, 24);
  EXPECT_EQ(geometry.vocab, 512);
  EXPECT_EQ(geometry.compressed_vocab, 400);
  EXPECT_EQ(geometry.eps, 1e-20f);
  EXPECT_EQ((*model)->layers()[0].table.rows, 6660);
  EXPECT_EQ((*model)->layers()[1].table.rows, 10150);
  const auto map = (*model)->token_map();
  EXPECT_NE(map[geometry.pad_id], geometry.pad_id) << "mapping the pad once too often must show";
  EXPECT_EQ(std::set<int32_t>(map.begin(), map.end()).size(), 400u) << "onto the compressed vocabulary";
}

TEST(Synth, SameSeedSameBytesWhateverTheThreads) {
  SynthOptions one = Tiny("one.gguf"), four = Tiny("four.gguf"), other = Tiny("other.gguf");
  four.threads = 4;
  other.seed = 2;
  const std::string bytes = ReadTestFile(Write(one));
  EXPECT_EQ(bytes, ReadTestFile(Write(four)));
  EXPECT_EQ(bytes, *SynthModelBytes(one));
  EXPECT_NE(bytes, ReadTestFile(Write(other)));
}

TEST(Synth, EveryWeightTypeLoads) {
  for (GgufType type : {GgufType::kF32, GgufType::kF16, GgufType::kBF16, GgufType::kQ8_0, GgufType::kQ2_K}) {
    SynthOptions options = Tiny("m.gguf");
    options.wkv_type = type;
    options.qk_type = type == GgufType::kF16 ? type : GgufType::kBF16;
    const auto model = LoadMapped(Write(options));
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->layers()[0].wkv_type, type);
  }
}

TEST(Synth, GeometryFlagsAndDeadTokens) {
  SynthOptions options = Tiny("m.gguf");
  options.layers = {0, 3, 5};
  options.max_ngram = 3;
  options.heads = 2;
  options.dim = 33;
  options.hc = 1;
  options.dead_tokens = 10;
  options.engram_vocab_size = 50;
  options.alignment = 4096;
  const auto model = LoadMapped(Write(options));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->layers().size(), 3u);
  EXPECT_EQ((*model)->geometry().columns, 4);
  EXPECT_EQ((*model)->geometry().dim, 33);
  EXPECT_EQ(std::count((*model)->token_map().begin(), (*model)->token_map().end(), -1), 10);
}

TEST(Synth, RowsScaleShrinksTheTables) {
  SynthOptions options = Tiny("m.gguf");
  options.engram_vocab_size = 2110;
  options.rows_scale = 0.1;
  const auto model = LoadMapped(Write(options));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->layers()[0].table.rows, 6660);
}

TEST(Synth, SplitHasTheSameModelInShards) {
  SynthOptions whole = Tiny("m.gguf"), split = Tiny("s.gguf");
  split.split = 3;
  const auto paths = WriteSynthModel(split);
  ASSERT_TRUE(paths.ok()) << paths.status();
  ASSERT_EQ(paths->size(), 3u);
  EXPECT_THAT(paths->at(2), HasSubstr("s-00003-of-00003.gguf"));
  const auto a = LoadMapped(Write(whole)), b = LoadMapped(paths->front());
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ((*a)->config_digest(), (*b)->config_digest());
}

TEST(Synth, DoesNotReplaceAFileUnlessForced) {
  SynthOptions options = Tiny("m.gguf");
  Write(options);
  options.force = false;
  const auto again = WriteSynthModel(options);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(again.status().message()), HasSubstr("--force"));
}

TEST(Synth, AModelLargerThanTheDiskIsRefusedBeforeAnythingIsWritten) {
  SynthOptions options = *SynthPreset("v41");
  options.out = TestPath("huge.gguf");
  options.rows_scale = 200;
  const auto paths = WriteSynthModel(options);
  EXPECT_EQ(paths.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(paths.status().message()), HasSubstr("lower --rows-scale"));
  struct stat status;
  EXPECT_NE(stat((options.out + ".partial").c_str(), &status), 0);
}

TEST(Synth, MissingFolderIsNamed) {
  SynthOptions options = Tiny("m.gguf");
  options.out = TestPath("no") + "/such/m.gguf";
  EXPECT_THAT(std::string(WriteSynthModel(options).status().message()), HasSubstr("no/such"));
}

struct BadOption {
  const char* flag;
  void (*set)(SynthOptions&);
};

TEST(Synth, OptionsOutOfRangeAreRefusedByName) {
  const BadOption kBad[] = {
      {"--dim", [](SynthOptions& o) { o.dim = 0; }},
      {"--hc", [](SynthOptions& o) { o.hc = 9; }},
      {"--max-ngram", [](SynthOptions& o) { o.max_ngram = 1; }},
      {"--heads", [](SynthOptions& o) { o.heads = 0; }},
      {"--layers",
       [](SynthOptions& o) {
         o.layers = {3, 3};
       }},
      {"--layers", [](SynthOptions& o) { o.layers = {}; }},
      {"--compressed-vocab", [](SynthOptions& o) { o.compressed_vocab = 1; }},
      {"--vocab", [](SynthOptions& o) { o.vocab = o.compressed_vocab - 1; }},
      {"--pad-id", [](SynthOptions& o) { o.pad_id = o.compressed_vocab; }},
      {"--engram-vocab-size", [](SynthOptions& o) { o.engram_vocab_size = INT64_MAX; }},
      {"--rows-scale", [](SynthOptions& o) { o.rows_scale = 0; }},
      {"--alignment", [](SynthOptions& o) { o.alignment = 48; }},
      {"--split", [](SynthOptions& o) { o.split = 9; }},
      {"--eps", [](SynthOptions& o) { o.eps = 0; }},
  };
  for (const BadOption& bad : kBad) {
    SynthOptions options = Tiny("m.gguf");
    bad.set(options);
    const auto paths = WriteSynthModel(options);
    EXPECT_EQ(paths.status().code(), absl::StatusCode::kInvalidArgument) << bad.flag;
    EXPECT_THAT(std::string(paths.status().message()), HasSubstr(bad.flag));
  }
}

TEST(Synth, ProgressEndsAtTheWhole) {
  SynthOptions options = Tiny("m.gguf");
  int64_t done = 0, total = -1;
  options.progress = [&](int64_t d, int64_t t) { done = d, total = t; };
  const std::string path = Write(options);
  EXPECT_EQ(done, total);
  EXPECT_EQ(total, static_cast<int64_t>(ReadTestFile(path).size()));
}

TEST(ProgressText, HasRateAndTimeLeft) {
  const int64_t gib = int64_t{1} << 30;
  EXPECT_EQ(ProgressText("writing m", gib, 4 * gib, 2), "writing m: 1.00 of 4.00 GiB, 25 %, 0.50 GiB/s, 6 s left");
  EXPECT_EQ(ProgressText("writing m", 0, 4 * gib, 0), "writing m: 0.00 of 4.00 GiB, 0 %");
}

}  // namespace
}  // namespace engram
