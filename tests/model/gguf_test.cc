// The fault catalogue of the GGUF reader: each known way to break a header is refused with its own words, and no input
// whatever crashes it.
#include "server/model/gguf.h"

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/small_model.h"

namespace engram {
namespace {

using ::testing::HasSubstr;

absl::Span<const uint8_t> Bytes(const std::string& text) {
  return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

absl::StatusOr<GgufHeader> Parse(const std::string& file) {
  return ParseGgufHeader("m.gguf", Bytes(file), static_cast<int64_t>(file.size()));
}

TEST(Gguf, ReadsEveryTypeOfValue) {
  GgufWriter writer;
  writer.Add<uint8_t>("u8", 200);
  writer.Add<int8_t>("i8", -3);
  writer.Add<uint16_t>("u16", 60000);
  writer.Add<int16_t>("i16", -4);
  writer.Add<uint32_t>("u32", 4000000000u);
  writer.Add<int32_t>("i32", -5);
  writer.Add<float>("f32", 0.5f);
  writer.Add<bool>("bool", true);
  writer.Add<uint64_t>("u64", ~uint64_t{0});
  writer.Add<int64_t>("i64", -6);
  writer.Add<double>("f64", 0.25);
  writer.AddText("text", "hello");
  writer.AddTexts("texts", {"", "a", "bc"});
  writer.AddArray<int16_t>("shorts", std::vector<int16_t>{1, 2, 3});
  writer.AddTensor("t", {4, 3}, GgufType::kF32);
  const std::string file = writer.File();
  const auto header = Parse(file);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->keys.size(), 14u);
  EXPECT_EQ(GgufValueKind(*header->Find("texts")), "array of 3 STRING");
  EXPECT_EQ(GgufValueKind(*header->Find("u64")), "U64");
  EXPECT_EQ(header->Find("shorts")->bytes.size(), 6u);
  ASSERT_NE(header->FindTensor("t"), nullptr);
  EXPECT_EQ(header->FindTensor("t")->bytes, 48);
  EXPECT_EQ(header->FindTensor("t")->offset, header->data_offset);
  EXPECT_EQ(header->Find("absent"), nullptr);
}

TEST(Gguf, ReadsVersion2) {
  GgufWriter writer = SmallModel().Writer();
  writer.set_version(2);
  EXPECT_TRUE(Parse(writer.File()).ok());
}

TEST(Gguf, TensorOfAnUnknownTypeIsListedWithoutSize) {
  GgufWriter writer;
  writer.AddTensor("odd", {7}, static_cast<GgufType>(77));
  const auto header = Parse(writer.File() + "data");
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->FindTensor("odd")->bytes, 0);
  EXPECT_EQ(GgufTypeName(header->FindTensor("odd")->type), "type 77");
}

// ggml's own writer keeps to 32 whatever general.alignment it writes; the split fixture is such a file.
TEST(Gguf, OffsetsThatBetrayTheDefaultAlignmentAreReadByIt) {
  GgufWriter writer;
  writer.Add<uint32_t>("general.alignment", 16384);  // the key alone: laid out by 32
  writer.AddTensor("a", {8}, GgufType::kF32);
  writer.AddTensor("b", {8}, GgufType::kF32);
  const auto header = Parse(writer.File());
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->alignment, 32);
  EXPECT_EQ(header->FindTensor("b")->offset, writer.DataOffset("b"));
}

TEST(Gguf, HeaderLongerThanWhatIsInMemoryAsksForMore) {
  const std::string file = SmallModel().Writer().File();
  for (size_t bytes : {0, 3, 8, 24, 100, 500}) {
    const auto header = ParseGgufHeader("m.gguf", Bytes(file).subspan(0, bytes), static_cast<int64_t>(file.size()));
    EXPECT_EQ(header.status().code(), absl::StatusCode::kOutOfRange) << bytes;
  }
}

TEST(Gguf, TruncationAtEveryByteIsRefused) {
  const std::string file = SmallModel().Writer().File();
  ASSERT_TRUE(Parse(file).ok());
  for (size_t bytes = 0; bytes < file.size(); ++bytes) {
    // A copy of exactly this size, so that a sanitizer sees one byte too far.
    const std::vector<uint8_t> cut(file.begin(), file.begin() + static_cast<int64_t>(bytes));
    const auto header = ParseGgufHeader("m.gguf", cut, static_cast<int64_t>(bytes));
    ASSERT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << bytes << " " << header.status();
    ASSERT_THAT(std::string(header.status().message()), HasSubstr("m.gguf"));
  }
}

TEST(Gguf, NoiseNeverCrashes) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string noise = i % 2 == 0 ? std::string("GGUF\3\0\0\0", 8) : "";
    const size_t bytes = random() % 400;
    while (noise.size() < bytes) noise.push_back(static_cast<char>(random() % (i % 3 == 0 ? 4 : 256)));
    EXPECT_FALSE(Parse(noise).ok());
  }
}

TEST(Gguf, BitFlipsOfARealHeaderNeverCrash) {
  const std::string file = ReadTestFile(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf");
  const auto good = Parse(file);
  ASSERT_TRUE(good.ok()) << good.status();
  std::vector<uint8_t> head(file.begin(), file.begin() + good->data_offset);
  for (size_t bit = 0; bit < head.size() * 8; ++bit) {
    head[bit / 8] ^= 1 << bit % 8;
    const auto header = ParseGgufHeader("m.gguf", head, static_cast<int64_t>(file.size()));
    ASSERT_THAT(std::string(header.status().message()), testing::Not(HasSubstr("\n")));
    head[bit / 8] ^= 1 << bit % 8;
  }
}

struct Fault {
  const char* name;
  std::function<std::string()> file;
  const char* message;  // part of it
};

std::string Le64(uint64_t value) { return std::string(reinterpret_cast<const char*>(&value), 8); }
std::string Le32(uint32_t value) { return std::string(reinterpret_cast<const char*>(&value), 4); }

// A file of one key whose value is `type` and `bytes`.
std::string OneKey(GgufValueType type, const std::string& bytes) {
  GgufWriter writer;
  writer.AddRaw("k", type, bytes);
  return writer.File();
}

std::string OneArray(GgufValueType element, uint64_t count, const std::string& bytes) {
  GgufWriter writer;
  writer.AddRawArray("k", element, count, bytes);
  return writer.File();
}

std::string OneTensor(const std::vector<uint64_t>& ne, GgufType type) {
  GgufWriter writer;
  writer.AddTensor("t", ne, type);
  return writer.Header() + std::string(64, '\0');
}

std::string Aligned(GgufValueType type, const std::string& bytes) {
  GgufWriter writer;
  writer.AddRaw("general.alignment", type, bytes);
  writer.AddTensor("t", {8}, GgufType::kF32);
  return writer.File();
}

std::string Counts(uint64_t tensors, uint64_t keys) {
  return "GGUF" + Le32(3) + Le64(tensors) + Le64(keys) + std::string(64, '\0');
}

std::string TwoTensors(uint64_t second_offset) {
  GgufWriter writer;
  writer.AddTensor("a", {32}, GgufType::kF32);
  writer.AddTensor("b", {32}, GgufType::kF32);
  writer.OverrideOffset("b", second_offset);
  return writer.File();
}

const Fault kFaults[] = {
    {"empty", [] { return std::string(); }, "is empty"},
    {"only_the_magic", [] { return std::string("GGUF"); },
     "the version needs 4 bytes at byte 4, the file ends at byte 4"},
    {"three_bytes", [] { return std::string("GGU"); }, "the magic needs 4 bytes"},
    {"another_magic", [] { return "GGML" + std::string(60, '\0'); }, "begins with 'GGML'; expected 'GGUF'"},
    {"zeros", [] { return std::string(64, '\0'); }, "expected 'GGUF'"},
    {"version_1", [] { return "GGUF" + Le32(1) + std::string(60, '\0'); }, "is GGUF version 1; expected 2 or 3"},
    {"version_4", [] { return "GGUF" + Le32(4) + std::string(60, '\0'); }, "is GGUF version 4"},
    {"big_endian", [] { return "GGUF" + Le32(0x03000000) + std::string(60, '\0'); }, "big-endian"},
    {"tensor_count_2_64", [] { return Counts(~uint64_t{0}, 0); }, "counts 18446744073709551615 tensors"},
    {"key_count_2_64", [] { return Counts(0, ~uint64_t{0}); }, "counts 18446744073709551615 keys"},
    {"key_count_that_wraps_times_its_size", [] { return Counts(0, (uint64_t{1} << 63) / 13 * 2 + 1); },
     "keys; expected"},
    {"tensor_count_beyond_the_bytes_left", [] { return Counts(100, 0); }, "counts 100 tensors; expected at most 2"},
    {"key_count_beyond_the_bytes_left", [] { return Counts(0, 6); }, "counts 6 keys; expected at most 4"},
    {"one_key_too_many",
     [] {
       GgufWriter writer;
       writer.AddText("k", std::string(100, 'x'));
       writer.OverrideKeyCount(2);
       return writer.File();
     },
     "key number 1 has a name of 0 bytes"},
    {"key_name_length_2_64", [] { return "GGUF" + Le32(3) + Le64(0) + Le64(1) + Le64(~uint64_t{0}) + "kkkkkkkkk"; },
     "key number 0 needs 18446744073709551615 bytes"},
    {"key_name_one_byte_past_the_end", [] { return "GGUF" + Le32(3) + Le64(0) + Le64(1) + Le64(10) + "kkkkkkkkk"; },
     "needs 10 bytes at byte 32"},
    // 19 bytes end the file without padding.
    {"string_length_plus_one", [] { return OneKey(GgufValueType::kString, Le64(19 + 1) + std::string(19, 's')); },
     "key 'k' needs 20 bytes at byte 45, the file ends at byte 64"},
    {"string_length_past_the_end", [] { return OneKey(GgufValueType::kString, Le64(1000) + "s"); },
     "key 'k' needs 1000 bytes"},
    {"string_length_2_63", [] { return OneKey(GgufValueType::kString, Le64(uint64_t{1} << 63) + "s"); },
     "key 'k' needs 9223372036854775808 bytes"},
    {"value_type_13", [] { return OneKey(static_cast<GgufValueType>(13), std::string(8, '\0')); },
     "key 'k' is of type 13; expected a type from 0 to 12"},
    {"value_type_2_32", [] { return OneKey(static_cast<GgufValueType>(~0u), ""); }, "key 'k' is of type 4294967295"},
    {"array_of_arrays", [] { return OneArray(GgufValueType::kArray, 1, std::string(32, '\0')); },
     "holds an array of arrays"},
    {"array_of_type_99", [] { return OneArray(static_cast<GgufValueType>(99), 1, std::string(32, '\0')); },
     "holds an array of type 99"},
    {"array_count_times_size_wraps_to_0", [] { return OneArray(GgufValueType::kU64, uint64_t{1} << 61, ""); },
     "holds an array of 2305843009213693952 U64"},
    {"array_count_times_size_wraps_to_8",
     [] { return OneArray(GgufValueType::kU64, (uint64_t{1} << 61) + 1, std::string(8, 'x')); },
     "bytes left in the file"},
    {"array_one_element_short", [] { return OneArray(GgufValueType::kU64, 98, std::string(97 * 8, 'x')); },
     "holds an array of 98 U64"},
    {"strings_more_than_bytes", [] { return OneArray(GgufValueType::kString, uint64_t{1} << 60, Le64(0)); },
     "holds an array of 1152921504606846976 strings"},
    {"strings_that_run_out", [] { return OneArray(GgufValueType::kString, 2, Le64(0) + Le64(1 << 20)); },
     "element 1 needs 1048576 bytes"},
    {"alignment_0", [] { return Aligned(GgufValueType::kU32, Le32(0)); },
     "'general.alignment' holds 0; expected a power"},
    {"alignment_3", [] { return Aligned(GgufValueType::kU32, Le32(3)); }, "'general.alignment' holds 3"},
    {"alignment_2_31", [] { return Aligned(GgufValueType::kU32, Le32(1u << 31)); }, "holds 2147483648"},
    {"alignment_2_40", [] { return Aligned(GgufValueType::kU64, Le64(uint64_t{1} << 40)); }, "holds 1099511627776"},
    {"alignment_text", [] { return Aligned(GgufValueType::kString, Le64(2) + "32"); },
     "is of type STRING; expected U32"},
    {"alignment_past_the_end", [] { return Aligned(GgufValueType::kU32, Le32(1u << 20)); },
     "tensor 't' has 32 bytes at byte 1048576; the file ends"},
    {"key_twice",
     [] {
       GgufWriter writer;
       writer.Add<uint32_t>("k", 1);
       writer.Add<uint32_t>("k", 2);
       return writer.File();
     },
     "key 'k' stands twice"},
    {"tensor_twice",
     [] {
       GgufWriter writer;
       writer.AddTensor("t", {8}, GgufType::kF32);
       writer.AddTensor("t", {8}, GgufType::kF32);
       return writer.File();
     },
     "tensor 't' stands twice"},
    {"five_dimensions",
     [] {
       return OneTensor({1, 1, 1, 1, 1}, GgufType::kF32);
     },
     "tensor 't' has 5 dimensions"},
    {"dimensions_2_32_do_not_loop",
     [] {
       std::string file = OneTensor({1}, GgufType::kF32);
       file.replace(file.find('t') + 1, 4, Le32(~0u));
       return file;
     },
     "has 4294967295 dimensions"},
    {"dimension_2_63", [] { return OneTensor({uint64_t{1} << 63}, GgufType::kF32); },
     "holds 9223372036854775808 as dimension 0"},
    {"product_wraps_to_0",
     [] {
       return OneTensor({uint64_t{1} << 32, uint64_t{1} << 32}, GgufType::kF32);
     },
     "has shape [4294967296, 4294967296]; expected fewer than 2^63 values"},
    {"product_wraps_to_a_small_number",
     [] {
       return OneTensor({(uint64_t{1} << 62) + 1, 4}, GgufType::kI8);
     },
     "expected fewer than 2^63 values"},
    {"bytes_wrap_where_values_do_not", [] { return OneTensor({uint64_t{1} << 62}, GgufType::kF32); },
     "expected fewer than 2^63 bytes"},
    {"row_not_of_whole_blocks",
     [] {
       return OneTensor({255, 2}, GgufType::kQ2_K);
     },
     "expected rows of a multiple of 256 values, as Q2_K has"},
    {"data_past_the_end", [] { return OneTensor({17}, GgufType::kF32); }, "has 68 bytes at byte"},
    {"offset_past_the_end", [] { return TwoTensors(uint64_t{1} << 20); },
     "tensor 'b' begins 1048576 bytes into the data"},
    {"offset_plus_size_wraps", [] { return TwoTensors(~uint64_t{0} - 31); }, "begins 18446744073709551584 bytes"},
    {"offset_not_aligned", [] { return TwoTensors(130); }, "begins 130 bytes into the data; expected a multiple of 32"},
    {"extent_one_step_past_the_end", [] { return TwoTensors(160); }, "the file ends at byte"},
    {"tensors_that_overlap", [] { return TwoTensors(96); }, "tensor 'b' begins at byte 192, inside tensor 'a'"},
    {"name_with_a_line_break_stays_one_line",
     [] {
       GgufWriter writer;
       writer.AddTensor("a\nb", {uint64_t{1} << 63}, GgufType::kF32);
       return writer.Header() + std::string(64, '\0');
     },
     "tensor 'a\\nb' holds"},
};

class GgufFault : public testing::TestWithParam<Fault> {};

TEST_P(GgufFault, IsRefused) {
  const std::string file = GetParam().file();
  // A vector of exactly the file's size, so that a sanitizer sees one byte too far.
  const std::vector<uint8_t> bytes(file.begin(), file.end());
  const auto header = ParseGgufHeader("m.gguf", bytes, static_cast<int64_t>(bytes.size()));
  ASSERT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << header.status();
  EXPECT_THAT(std::string(header.status().message()), HasSubstr(GetParam().message));
  EXPECT_THAT(std::string(header.status().message()), testing::StartsWith("m.gguf:"));
  EXPECT_THAT(std::string(header.status().message()), testing::Not(HasSubstr("\n")));
}

INSTANTIATE_TEST_SUITE_P(All, GgufFault, testing::ValuesIn(kFaults),
                         [](const auto& fault) { return std::string(fault.param.name); });

}  // namespace
}  // namespace engram
