#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "tests/kernels/twins.h"

namespace engram::kernels {
namespace {

std::vector<uint8_t> ReadFixture(const std::string& name) {
  std::ifstream file(std::string(ENGRAM_TEST_DATA) + "/q2_k/" + name, std::ios::binary);
  EXPECT_TRUE(file.good()) << name;
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<Bf16> Gather(const Kernels& kernels, const TableView& table, const std::vector<int64_t>& ids,
                         int64_t id_stride, int64_t tokens, int columns, int threads) {
  std::vector<Bf16> out(static_cast<size_t>(tokens * columns * kRowValues + 1), 0xABCD);
  Workers workers(threads);
  kernels.gather_rows(table, ids.data(), id_stride, tokens, columns, out.data(), workers);
  EXPECT_EQ(out.back(), 0xABCD) << "written behind the end";
  out.pop_back();
  return out;
}

// The decoded row by the block's description, in f64 where every step is exact, rounded once to f32.
std::vector<float> DecodeInF64(const uint8_t* block) {
  uint16_t halves[2];
  std::memcpy(halves, block + 80, 4);
  const double d = F32FromF16(halves[0]);
  const double dmin = F32FromF16(halves[1]);
  std::vector<float> row;
  for (int half = 0; half < 2; ++half) {
    for (int plane = 0; plane < 4; ++plane) {
      for (int i = 0; i < 32; ++i) {
        const int scale = block[half * 8 + plane * 2 + i / 16];
        const int code = block[16 + half * 32 + i] >> (2 * plane) & 3;
        row.push_back(static_cast<float>(d * (scale & 15) * code - dmin * (scale >> 4)));
      }
    }
  }
  return row;
}

class GgmlFixture : public testing::TestWithParam<const char*> {};

TEST_P(GgmlFixture, DecodesToTheBitsOfGgml) {
  const std::vector<uint8_t> blocks = ReadFixture(std::string(GetParam()) + "_q2k.bin");
  const std::vector<uint8_t> decoded = ReadFixture(std::string(GetParam()) + "_deq_f32.bin");
  const auto rows = static_cast<int64_t>(blocks.size()) / kQ2KBlockBytes;
  ASSERT_GT(rows, 0);
  ASSERT_EQ(decoded.size(), static_cast<size_t>(rows * kRowValues * 4));
  std::vector<int64_t> ids;
  std::vector<Bf16> expected;
  for (int64_t row = 0; row < rows; ++row) {
    ids.push_back(row);
    float values[kRowValues];
    DecodeQ2K(&blocks[static_cast<size_t>(row * kQ2KBlockBytes)], values);
    ASSERT_EQ(std::memcmp(values, &decoded[static_cast<size_t>(row * kRowValues * 4)], sizeof(values)), 0) << row;
    for (const float value : values) expected.push_back(Bf16FromF32(value));
  }
  for (const NamedTwin& twin : AllTwins()) {
    EXPECT_EQ(Gather(*twin.kernels, {blocks.data(), rows}, ids, 1, rows, 1, 2), expected) << twin.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Q2K, GgmlFixture, testing::Values("gauss", "random"));

TEST(Gather, RandomBlocksAtEveryMisalignmentWithAbsentIds) {
  Random random(3);
  constexpr int64_t kRows = 97;
  const std::vector<uint8_t> blocks = RandomQ2K(random, kRows);
  for (int64_t shift = 0; shift < 16; ++shift) {
    std::vector<uint8_t> storage(blocks.size() + 16);
    std::memcpy(storage.data() + shift, blocks.data(), blocks.size());
    const TableView table = {storage.data() + shift, kRows};
    const int columns = 1 + static_cast<int>(shift) % 5;
    const int64_t tokens = 1 + 9 * shift;
    const int64_t stride = columns + shift % 3;
    std::vector<int64_t> ids(static_cast<size_t>(tokens * stride));
    for (int64_t& id : ids) id = Below(random, kRows + 10) - 10;
    for (int64_t& id : ids) id = id < 0 ? -1 : id;
    ids[0] = kRows - 1;

    std::vector<Bf16> expected;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t id = ids[static_cast<size_t>(t * stride + column)];
        if (id < 0) {
          expected.insert(expected.end(), kRowValues, 0);
          continue;
        }
        for (const float value : DecodeInF64(&blocks[static_cast<size_t>(id * kQ2KBlockBytes)])) {
          expected.push_back(Bf16FromF32(value));
        }
      }
    }
    for (const NamedTwin& twin : AllTwins()) {
      for (const int threads : {1, 2, 3, 5}) {
        ASSERT_EQ(Gather(*twin.kernels, table, ids, stride, tokens, columns, threads), expected)
            << twin.name << " at " << shift;
      }
    }
  }
}

// An f16 NaN or infinity in a block is the file's business: it must come out as one and not as a large number.
TEST(Gather, ANanInABlockStaysANan) {
  Random random(4);
  std::vector<uint8_t> block = RandomQ2K(random, 1);
  for (int i = 0; i < 16; ++i) block[static_cast<size_t>(i)] = 0x11;
  const uint16_t nan = 0x7C01;
  std::memcpy(&block[80], &nan, 2);
  for (const NamedTwin& twin : AllTwins()) {
    for (const Bf16 value : Gather(*twin.kernels, {block.data(), 1}, {0}, 1, 1, 1, 1)) {
      EXPECT_TRUE(std::isnan(F32FromBf16(value))) << twin.name;
    }
  }
}

// Byte offsets need 64 bits: the file is sparse, so only the pages of the rows written exist.
TEST(Gather, RowsBeyondFourGib) {
  Random random(5);
  constexpr int64_t kRows = (int64_t{1} << 32) / kQ2KBlockBytes * 2 + 7;  // 8 GiB
  constexpr int64_t kBytes = kRows * kQ2KBlockBytes;
  std::string path = testing::TempDir() + "engram_table_XXXXXX";
  const int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0) << path;
  unlink(path.c_str());
  if (ftruncate(fd, kBytes) != 0) {
    close(fd);
    GTEST_SKIP() << "no sparse file of " << kBytes << " bytes in " << testing::TempDir();
  }
  const std::vector<int64_t> ids = {kRows - 1,
                                    (int64_t{1} << 31) / kQ2KBlockBytes,      // straddles 2 GiB
                                    (int64_t{1} << 32) / kQ2KBlockBytes,      // straddles 4 GiB
                                    (int64_t{1} << 32) / kQ2KBlockBytes + 1,  // beyond 4 GiB
                                    0,
                                    kRows / 2};
  std::vector<Bf16> expected;
  for (const int64_t id : ids) {
    const std::vector<uint8_t> block = RandomQ2K(random, 1);
    ASSERT_EQ(pwrite(fd, block.data(), block.size(), id * kQ2KBlockBytes), kQ2KBlockBytes);
    for (const float value : DecodeInF64(block.data())) expected.push_back(Bf16FromF32(value));
  }
  void* mapped = mmap(nullptr, static_cast<size_t>(kBytes), PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  for (const NamedTwin& twin : AllTwins()) {
    EXPECT_EQ(Gather(*twin.kernels, {static_cast<const uint8_t*>(mapped), kRows}, ids, 3, 2, 3, 2), expected)
        << twin.name;
  }
  munmap(mapped, static_cast<size_t>(kBytes));
  close(fd);
}

}  // namespace
}  // namespace engram::kernels
