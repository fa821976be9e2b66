// Dialect A: what is accepted, and each broken rule with its own words.
#include "server/model/engram_header.h"

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/small_model.h"

namespace engram {
namespace {

using ::testing::HasSubstr;

std::string Key(const char* name) { return std::string(kPrefix) + name; }

template <typename T>
void Set(GgufWriter& writer, const std::string& key, T value) {
  writer.RemoveKey(key);
  writer.Add<T>(key, value);
}

template <typename T>
void SetArray(GgufWriter& writer, const std::string& key, const std::vector<T>& values) {
  writer.RemoveKey(key);
  writer.AddArray<T>(key, values);
}

TEST(EngramHeader, SmallModelLoads) {
  const auto model = LoadMapped(WriteTestFile("m.gguf", SmallModel().Writer().File()));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->geometry().compressed_vocab, 5);
  EXPECT_EQ((*model)->geometry().vocab, 6);
  EXPECT_EQ((*model)->token_map()[5], -1);
}

TEST(EngramHeader, LiteralPrefixOfTheFirstUploads) {
  SmallModel literal;
  literal.engram_prefix = "deepseek4.engram.";
  const auto model = LoadMapped(WriteTestFile("m.gguf", literal.Writer().File()));
  ASSERT_TRUE(model.ok()) << model.status();
  SmallModel all = literal;
  all.prefix = "deepseek4.";
  const auto same = LoadMapped(WriteTestFile("n.gguf", all.Writer().File()));
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_EQ((*model)->config_digest(), (*same)->config_digest());
}

TEST(EngramHeader, AnyIntegerTypeIsAccepted) {
  GgufWriter writer = SmallModel().Writer();
  Set<uint8_t>(writer, "deepseek41.embedding_length", 32);
  Set<int64_t>(writer, "deepseek41.hyper_connection.count", 2);
  Set<uint64_t>(writer, Key("pad_id"), 1);
  SetArray<uint64_t>(writer, Key("layer_ids"), {0, 2});
  SetArray<int32_t>(writer, Key("multipliers"), {3, 5, 7, 9, 11, 13});
  SetArray<uint8_t>(writer, Key("primes"), {3, 5, 5, 7});
  SetArray<int16_t>(writer, Key("offsets"), {0, 3, 0, 5});
  SetArray<int64_t>(writer, Key("token_map"), {4, 3, 2, 1, 0, -1});
  const auto model = LoadMapped(WriteTestFile("m.gguf", writer.File()));
  EXPECT_TRUE(model.ok()) << model.status();
}

TEST(EngramHeader, CompressedVocabularyOfTheFileCounts) {
  GgufWriter writer = SmallModel().Writer();
  writer.Add<uint32_t>(Key("compressed_vocab_size"), 9);
  const auto model = LoadMapped(WriteTestFile("m.gguf", writer.File()));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->geometry().compressed_vocab, 9);
}

TEST(EngramHeader, MapLengthIsTheVocabularyWhereNoKeySaysIt) {
  GgufWriter writer = SmallModel().Writer();
  writer.RemoveKey("deepseek41.vocab_size");
  SetArray<int32_t>(writer, Key("token_map"), {4, 3, 2, 1, 0, -1, 4, 4});
  const auto model = LoadMapped(WriteTestFile("m.gguf", writer.File()));
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*model)->geometry().vocab, 8);
}

// A table may have more rows than its buckets reach.
TEST(EngramHeader, LongerTableIsAccepted) {
  SmallModel longer;
  longer.rows = {9, 20};
  EXPECT_TRUE(LoadMapped(WriteTestFile("m.gguf", longer.Writer().File())).ok());
}

TEST(EngramHeader, DialectBIsRefusedByName) {
  const auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + "/ds4/ds4.gguf", {});
  EXPECT_THAT(std::string(model.status().message()),
              testing::AllOf(HasSubstr("ds4.gguf: key 'deepseek41.engram.encoding' holds 'e4m3_e8m0_32_row264'"),
                             HasSubstr("this release serves Q2_K tables of dialect A")));
}

struct Breach {
  const char* name;
  std::function<void(GgufWriter&)> bend;
  const char* message;
};

void Retype(GgufWriter& writer, const std::string& name, const std::vector<uint64_t>& ne, GgufType type) {
  writer.RemoveTensor(name);
  writer.AddTensor(name, ne, type);
}

constexpr int64_t kMostMultiplier = std::numeric_limits<int64_t>::max() / 5;

const Breach kBreaches[] = {
    {"no_architecture", [](GgufWriter& w) { w.RemoveKey("general.architecture"); },
     "key 'general.architecture' is missing"},
    {"other_architecture",
     [](GgufWriter& w) {
       w.RemoveKey("general.architecture");
       w.AddText("general.architecture", "llama");
     },
     "key 'general.architecture' holds 'llama'; expected 'deepseek41' or 'deepseek4'"},
    {"architecture_is_a_number", [](GgufWriter& w) { Set<uint32_t>(w, "general.architecture", 1); },
     "key 'general.architecture' is of type U32; expected STRING"},
    {"no_engram_keys_at_all",
     [](GgufWriter& w) {
       for (const char* key : {"layer_ids", "head_count", "key_length", "max_ngram_size", "pad_id", "multipliers",
                               "primes", "offsets", "token_map"}) {
         w.RemoveKey(Key(key));
       }
     },
     "no key begins with 'deepseek41.engram.' or 'deepseek4.engram.'; expected a model with an engram"},
    {"no_layer_ids", [](GgufWriter& w) { w.RemoveKey(Key("layer_ids")); },
     "key 'deepseek41.engram.layer_ids' is missing"},
    {"no_head_count", [](GgufWriter& w) { w.RemoveKey(Key("head_count")); }, "engram.head_count' is missing"},
    {"no_key_length", [](GgufWriter& w) { w.RemoveKey(Key("key_length")); }, "engram.key_length' is missing"},
    {"no_max_ngram_size", [](GgufWriter& w) { w.RemoveKey(Key("max_ngram_size")); },
     "engram.max_ngram_size' is missing"},
    {"no_pad_id", [](GgufWriter& w) { w.RemoveKey(Key("pad_id")); }, "engram.pad_id' is missing"},
    {"no_multipliers", [](GgufWriter& w) { w.RemoveKey(Key("multipliers")); }, "engram.multipliers' is missing"},
    {"no_primes", [](GgufWriter& w) { w.RemoveKey(Key("primes")); }, "engram.primes' is missing"},
    {"no_offsets", [](GgufWriter& w) { w.RemoveKey(Key("offsets")); }, "engram.offsets' is missing"},
    {"no_token_map", [](GgufWriter& w) { w.RemoveKey(Key("token_map")); }, "engram.token_map' is missing"},
    {"no_embedding_length", [](GgufWriter& w) { w.RemoveKey("deepseek41.embedding_length"); },
     "key 'deepseek41.embedding_length' is missing"},
    {"no_hyper_connection_count", [](GgufWriter& w) { w.RemoveKey("deepseek41.hyper_connection.count"); },
     "key 'deepseek41.hyper_connection.count' is missing"},
    {"no_eps", [](GgufWriter& w) { w.RemoveKey("deepseek41.attention.layer_norm_rms_epsilon"); },
     "key 'deepseek41.attention.layer_norm_rms_epsilon' is missing"},
    {"key_under_both_prefixes", [](GgufWriter& w) { w.Add<uint32_t>("deepseek4.engram.pad_id", 1); },
     "keys 'deepseek41.engram.pad_id' and 'deepseek4.engram.pad_id' both stand in the file"},

    {"dim_0", [](GgufWriter& w) { Set<uint32_t>(w, "deepseek41.embedding_length", 0); },
     "key 'deepseek41.embedding_length' holds 0; expected an integer from 1 to 16777216"},
    {"dim_absurd", [](GgufWriter& w) { Set<uint64_t>(w, "deepseek41.embedding_length", ~uint64_t{0}); },
     "holds 18446744073709551615; expected an integer from 1"},
    {"dim_is_text",
     [](GgufWriter& w) {
       w.RemoveKey("deepseek41.embedding_length");
       w.AddText("deepseek41.embedding_length", "32");
     },
     "key 'deepseek41.embedding_length' is of type STRING; expected an integer"},
    {"dim_is_a_float", [](GgufWriter& w) { Set<float>(w, "deepseek41.embedding_length", 32); },
     "is of type F32; expected an integer"},
    {"dim_is_a_bool", [](GgufWriter& w) { Set<bool>(w, "deepseek41.embedding_length", true); },
     "is of type BOOL; expected an integer"},
    {"hc_0", [](GgufWriter& w) { Set<uint32_t>(w, "deepseek41.hyper_connection.count", 0); },
     "hyper_connection.count' holds 0; expected an integer from 1 to 8"},
    {"hc_9", [](GgufWriter& w) { Set<uint32_t>(w, "deepseek41.hyper_connection.count", 9); },
     "hyper_connection.count' holds 9; expected an integer from 1 to 8"},
    {"ngram_1", [](GgufWriter& w) { Set<uint32_t>(w, Key("max_ngram_size"), 1); },
     "max_ngram_size' holds 1; expected an integer from 2 to 8"},
    {"ngram_9", [](GgufWriter& w) { Set<uint32_t>(w, Key("max_ngram_size"), 9); },
     "max_ngram_size' holds 9; expected an integer from 2 to 8"},
    {"heads_0", [](GgufWriter& w) { Set<uint32_t>(w, Key("head_count"), 0); },
     "head_count' holds 0; expected an integer from 1 to 1024"},
    {"heads_negative", [](GgufWriter& w) { Set<int32_t>(w, Key("head_count"), -1); }, "head_count' holds -1"},
    {"key_length_128", [](GgufWriter& w) { Set<uint32_t>(w, Key("key_length"), 128); },
     "key_length' holds 128; expected 256"},
    {"eps_0", [](GgufWriter& w) { Set<float>(w, "deepseek41.attention.layer_norm_rms_epsilon", 0); },
     "layer_norm_rms_epsilon' holds 0; expected a positive, finite, normal F32"},
    {"eps_negative", [](GgufWriter& w) { Set<float>(w, "deepseek41.attention.layer_norm_rms_epsilon", -1e-6f); },
     "holds -1e-06; expected a positive"},
    {"eps_nan", [](GgufWriter& w) { Set<float>(w, "deepseek41.attention.layer_norm_rms_epsilon", std::nanf("")); },
     "holds nan"},
    {"eps_infinite", [](GgufWriter& w) { Set<float>(w, "deepseek41.attention.layer_norm_rms_epsilon", INFINITY); },
     "holds inf"},
    {"eps_subnormal", [](GgufWriter& w) { Set<float>(w, "deepseek41.attention.layer_norm_rms_epsilon", 1e-40f); },
     "expected a positive, finite, normal F32"},
    {"eps_integer", [](GgufWriter& w) { Set<uint32_t>(w, "deepseek41.attention.layer_norm_rms_epsilon", 1); },
     "is of type U32; expected F32"},

    {"layers_none", [](GgufWriter& w) { SetArray<int32_t>(w, Key("layer_ids"), {}); },
     "layer_ids' holds 0 elements; expected 1 to 1024"},
    {"layers_unsorted",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("layer_ids"), {2, 0});
     },
     "key 'deepseek41.engram.layer_ids' holds 0 as element 1; expected more than 2"},
    {"layers_repeated",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("layer_ids"), {2, 2});
     },
     "layer_ids' holds 2 as element 1; expected more than 2"},
    {"layers_negative",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("layer_ids"), {-1, 2});
     },
     "layer_ids' holds -1 as element 0"},
    {"layers_scalar", [](GgufWriter& w) { Set<int32_t>(w, Key("layer_ids"), 1); },
     "layer_ids' is of type I32; expected an array of integers"},
    {"layers_too_many_for_the_constants",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("layer_ids"), {0, 2, 3});
     },
     "multipliers' holds 6 elements; expected 9, 3 layers x max_ngram_size 3"},

    {"map_empty",
     [](GgufWriter& w) {
       w.RemoveKey("deepseek41.vocab_size");
       SetArray<int32_t>(w, Key("token_map"), {});
     },
     "token_map' holds no element; expected at least one compressed id"},
    {"map_all_dead",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("token_map"), {-1, -1, -1, -1, -1, -1});
     },
     "token_map' holds no id but -1"},
    {"map_below_minus_1",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("token_map"), {4, 3, 2, 1, 0, -2});
     },
     "token_map' holds -2 as element 5"},
    {"map_above_int32",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("token_map"), {4, 3, 2, 1, 0, uint64_t{1} << 31});
     },
     "token_map' holds 2147483648 as element 5"},
    {"map_of_another_length",
     [](GgufWriter& w) {
       SetArray<int32_t>(w, Key("token_map"), {4, 3, 2, 1, 0});
     },
     "token_map' holds 5 elements; expected 6 as 'deepseek41.vocab_size' says"},
    {"map_beyond_the_compressed_vocabulary", [](GgufWriter& w) { w.Add<uint32_t>(Key("compressed_vocab_size"), 4); },
     "token_map' holds 4 as element 0; expected less than 4, the compressed vocabulary"},
    {"map_of_floats",
     [](GgufWriter& w) {
       SetArray<float>(w, Key("token_map"), {0, 1, 2, 3, 4, 5});
     },
     "token_map' is of type array of 6 F32; expected an array of integers"},
    {"pad_outside", [](GgufWriter& w) { Set<uint32_t>(w, Key("pad_id"), 5); },
     "key 'deepseek41.engram.pad_id' holds 5; expected a compressed id from 0 to 4"},
    {"pad_negative", [](GgufWriter& w) { Set<int32_t>(w, Key("pad_id"), -1); }, "pad_id' holds -1"},

    {"multiplier_even",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("multipliers"), {3, 5, 7, 8, 11, 13});
     },
     "multipliers' holds 8 as element 3; expected an odd number from 1 to 1844674407370955161"},
    {"multiplier_0",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("multipliers"), {0, 5, 7, 9, 11, 13});
     },
     "multipliers' holds 0 as element 0; expected an odd number"},
    {"multiplier_negative",
     [](GgufWriter& w) {
       SetArray<int64_t>(w, Key("multipliers"), {3, -5, 7, 9, 11, 13});
     },
     "multipliers' holds -5 as element 1; expected an odd number"},
    {"multiplier_that_wraps",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("multipliers"), {3, 5, 7, 9, 11, static_cast<uint64_t>(kMostMultiplier) + 2});
     },
     "multipliers' holds 1844674407370955163 as element 5; expected an odd number from 1 to 1844674407370955161"},
    {"multiplier_above_int64",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("multipliers"), {3, 5, 7, 9, 11, ~uint64_t{0}});
     },
     "multipliers' holds 18446744073709551615 as element 5"},
    {"multipliers_short",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("multipliers"), {3, 5, 7, 9, 11});
     },
     "multipliers' holds 5 elements; expected 6, 2 layers x max_ngram_size 3"},
    {"prime_1",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("primes"), {3, 1, 5, 7});
     },
     "primes' holds 1 as element 1; expected at least 2"},
    {"prime_0",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("primes"), {0, 5, 5, 7});
     },
     "primes' holds 0 as element 0; expected at least 2"},
    {"prime_that_leaves_the_table",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("primes"), {3, 5, 5, 11});
     },
     "primes' holds 11 as element 3; expected at most 7: with offset 5 it leaves the 12 rows of the table of layer 2"},
    {"prime_whose_sum_wraps",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("primes"), {3, static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), 5, 7});
     },
     "primes' holds 9223372036854775807 as element 1; expected at most 5"},
    {"primes_long",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("primes"), {3, 5, 5, 7, 11});
     },
     "primes' holds 5 elements; expected 4, 2 layers x 2 columns"},
    {"offset_not_the_running_sum",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("offsets"), {0, 2, 0, 5});
     },
     "offsets' holds 2 as element 1; expected 3, the sum of the primes before it of layer 0"},
    {"offset_of_one_run_over_all_layers",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("offsets"), {0, 3, 8, 13});
     },
     "offsets' holds 8 as element 2; expected 0"},
    {"offsets_short",
     [](GgufWriter& w) {
       SetArray<uint64_t>(w, Key("offsets"), {0, 3, 0});
     },
     "offsets' holds 3 elements; expected 4"},

    {"no_table", [](GgufWriter& w) { w.RemoveTensor("blk.2.engram_embd.weight"); },
     "tensor 'blk.2.engram_embd.weight' is missing"},
    {"no_wkv", [](GgufWriter& w) { w.RemoveTensor("blk.0.engram_wkv.weight"); },
     "tensor 'blk.0.engram_wkv.weight' is missing"},
    {"no_q", [](GgufWriter& w) { w.RemoveTensor("blk.0.engram_q.weight"); }, "'blk.0.engram_q.weight' is missing"},
    {"no_k", [](GgufWriter& w) { w.RemoveTensor("blk.2.engram_k.weight"); }, "'blk.2.engram_k.weight' is missing"},
    {"table_q3_k",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {256, 8}, GgufType::kQ3_K);
     },
     "tensor 'blk.0.engram_embd.weight' is Q3_K; expected Q2_K: this release serves Q2_K tables of dialect A"},
    {"table_q8_0",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {256, 8}, GgufType::kQ8_0);
     },
     "is Q8_0; expected Q2_K: this release serves"},
    {"table_row264",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {264, 8}, GgufType::kI8);
     },
     "is I8; expected Q2_K: this release serves"},
    {"table_of_an_unknown_type",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {256, 8}, static_cast<GgufType>(77));
     },
     "is type 77; expected Q2_K"},
    {"table_of_wide_rows",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {512, 8}, GgufType::kQ2_K);
     },
     "tensor 'blk.0.engram_embd.weight' has shape [512, 8]; expected [256, rows]"},
    {"table_of_three_dimensions",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {256, 4, 2}, GgufType::kQ2_K);
     },
     "has shape [256, 4, 2]; expected [256, rows]"},
    {"table_of_no_rows",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_embd.weight", {256, 0}, GgufType::kQ2_K);
     },
     "has shape [256, 0]; expected [256, rows]"},
    {"table_too_short",
     [](GgufWriter& w) {
       Retype(w, "blk.2.engram_embd.weight", {256, 11}, GgufType::kQ2_K);
     },
     "primes' holds 7 as element 3; expected at most 6: with offset 5 it leaves the 11 rows"},
    {"wkv_inputs_wrong",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_wkv.weight", {256, 96}, GgufType::kBF16);
     },
     "tensor 'blk.0.engram_wkv.weight' has shape [256, 96]; expected [512, 96]: 2 columns x 256, dim 32 x (hc 2 + 1)"},
    {"wkv_outputs_wrong",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_wkv.weight", {512, 64}, GgufType::kBF16);
     },
     "has shape [512, 64]; expected [512, 96]"},
    {"wkv_transposed",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_wkv.weight", {96, 512}, GgufType::kBF16);
     },
     "has shape [96, 512]; expected [512, 96]"},
    {"wkv_q3_k",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_wkv.weight", {512, 96}, GgufType::kQ3_K);
     },
     "tensor 'blk.0.engram_wkv.weight' is Q3_K; expected F32, F16, BF16, Q8_0 or Q2_K"},
    {"q_shape",
     [](GgufWriter& w) {
       Retype(w, "blk.0.engram_q.weight", {64, 1}, GgufType::kF32);
     },
     "tensor 'blk.0.engram_q.weight' has shape [64, 1]; expected [32, 2]: dim, hc"},
    {"k_shape", [](GgufWriter& w) { Retype(w, "blk.2.engram_k.weight", {32}, GgufType::kF32); },
     "tensor 'blk.2.engram_k.weight' has shape [32]; expected [32, 2]"},
    {"k_type",
     [](GgufWriter& w) {
       Retype(w, "blk.2.engram_k.weight", {32, 2}, GgufType::kI32);
     },
     "tensor 'blk.2.engram_k.weight' is I32; expected F32, F16, BF16, Q8_0 or Q2_K"},
};

class EngramHeaderBreach : public testing::TestWithParam<Breach> {};

TEST_P(EngramHeaderBreach, IsRefusedByName) {
  GgufWriter writer = SmallModel().Writer();
  GetParam().bend(writer);
  const std::string path = WriteTestFile("m.gguf", writer.File());
  const auto model = LoadMapped(path);
  ASSERT_FALSE(model.ok());
  EXPECT_THAT(std::string(model.status().message()), HasSubstr(GetParam().message));
  EXPECT_THAT(std::string(model.status().message()), testing::StartsWith(path + ":"));
  EXPECT_THAT(std::string(model.status().message()), testing::Not(HasSubstr("\n")));
  std::remove(path.c_str());
}

INSTANTIATE_TEST_SUITE_P(All, EngramHeaderBreach, testing::ValuesIn(kBreaches),
                         [](const auto& breach) { return std::string(breach.param.name); });

// One bit of the header at a time, through the whole of the checks: refused or loaded, never a crash.
TEST(EngramHeader, BitFlipsNeverCrash) {
  const GgufWriter writer = SmallModel().Writer();
  std::string file = writer.File();
  const std::string path = WriteTestFile("m.gguf", file);
  std::fstream patch(path, std::ios::in | std::ios::out | std::ios::binary);
  const int64_t header = static_cast<int64_t>(writer.Header().size());
  for (int64_t bit = 0; bit < header * 8; bit += 3) {
    const char good = file[bit / 8];
    patch.seekp(bit / 8);
    patch.put(static_cast<char>(good ^ 1 << bit % 8)).flush();
    const auto files = ModelFiles::Open(path);
    if (files.ok()) (void)ReadEngramHeader(*files).ok();
    patch.seekp(bit / 8);
    patch.put(good).flush();
  }
  EXPECT_TRUE(LoadMapped(path).ok());
}

}  // namespace
}  // namespace engram
