// GatherRows and CopyRows of the CUDA kernels, run by the executor of tests/simt.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "tests/kernels/twins.h"
#include "tests/simt/executor.h"

namespace engram::kernels::cuda {
namespace {

bool IsNan(Bf16 value) { return (value & 0x7FFF) > 0x7F80; }

// Same bits; a NaN's payload is nobody's.
void ExpectSameRows(const std::vector<Bf16>& rows, const std::vector<Bf16>& expected) {
  ASSERT_EQ(rows.size(), expected.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (IsNan(expected[i]) && IsNan(rows[i])) continue;
    ASSERT_EQ(rows[i], expected[i]) << "value " << i % kRowValues << " of row " << i / kRowValues;
  }
}

std::vector<Bf16> Reference(const uint8_t* table, const std::vector<int64_t>& ids) {
  std::vector<Bf16> out(ids.size() * kRowValues);
  Workers workers(1);
  ReferenceKernels().gather_rows({table, 0}, ids.data(), 1, static_cast<int64_t>(ids.size()), 1, out.data(), workers);
  return out;
}

// Checks both kernels; `ids` are null in the call where they are 0, 1, ...
void ExpectRows(const uint8_t* table, const std::vector<int64_t>& ids, bool all_in_order = false) {
  const auto count = static_cast<int64_t>(ids.size());
  const GatherCall call = {table, all_in_order ? nullptr : ids.data(), count};
  simt::ForEachOrder([&] {
    std::vector<Bf16> rows(ids.size() * kRowValues, 0xFFFF);
    ASSERT_EQ(GatherRows(call, rows.data(), nullptr), cudaSuccess);
    ExpectSameRows(rows, Reference(table, ids));

    std::vector<uint8_t> bytes(ids.size() * kQ2KBlockBytes, 0xA5);
    ASSERT_EQ(CopyRows(call, bytes.data(), nullptr), cudaSuccess);
    for (size_t i = 0; i < ids.size(); ++i) {
      const uint8_t zeros[kQ2KBlockBytes] = {};
      const uint8_t* const expected = ids[i] < 0 ? zeros : table + ids[i] * kQ2KBlockBytes;
      ASSERT_EQ(std::memcmp(&bytes[i * kQ2KBlockBytes], expected, kQ2KBlockBytes), 0) << "row " << i;
    }
  });
}

TEST(CudaRows, AnyNumberOfThemWithAbsentAndRepeatedIds) {
  Random random(1);
  const int64_t table_rows = 57;
  const std::vector<uint8_t> table = RandomQ2K(random, table_rows);
  for (const int64_t count : {1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 200}) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < count; ++i)
      ids.push_back(Below(random, table_rows + 6) - 6 < 0 ? -1 : Below(random, table_rows));
    ids.back() = table_rows - 1;
    ExpectRows(table.data(), ids);
  }
}

TEST(CudaRows, WithoutIdsAllRowsInOrder) {
  Random random(2);
  for (const int64_t count : {1, 31, 32, 33, 70}) {
    const std::vector<uint8_t> table = RandomQ2K(random, count);
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < count; ++i) ids.push_back(i);
    ExpectRows(table.data(), ids, /*all_in_order=*/true);
  }
}

// Infinities and NaNs of d and dmin, zeros of both signs, subnormal halves.
TEST(CudaRows, EveryKindOfScale) {
  Random random(3);
  const std::vector<uint16_t> halves = {0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E01};
  const auto rows = static_cast<int64_t>(halves.size() * halves.size());
  std::vector<uint8_t> table = RandomQ2K(random, rows);
  std::vector<int64_t> ids;
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* const ds = &table[static_cast<size_t>(row * kQ2KBlockBytes + 80)];
    StoreUnaligned(ds, halves[static_cast<size_t>(row) / halves.size()]);
    StoreUnaligned(ds + 2, halves[static_cast<size_t>(row) % halves.size()]);
    ids.push_back(row);
  }
  ExpectRows(table.data(), ids);
}

TEST(CudaRows, TheLastRowsOfATableBeyondFourGibibytes) {
  const int64_t rows = (int64_t{5} << 30) / kQ2KBlockBytes;
  const auto bytes = static_cast<size_t>(rows * kQ2KBlockBytes);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const table = static_cast<uint8_t*>(memory);
  Random random(4);
  const int64_t around = (int64_t{1} << 32) / kQ2KBlockBytes;  // the row that 32 bits would cut
  std::vector<int64_t> ids;
  for (const int64_t row : {int64_t{0}, around / 2, around - 1, around, around + 1, rows - 2, rows - 1}) {
    const std::vector<uint8_t> block = RandomQ2K(random, 1);
    std::memcpy(table + row * kQ2KBlockBytes, block.data(), block.size());
    ids.push_back(row);
  }
  ExpectRows(table, ids);
  munmap(memory, bytes);
}

TEST(CudaRows, NoneIsNoLaunch) {
  EXPECT_EQ(GatherRows({nullptr, nullptr, 0}, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(CopyRows({nullptr, nullptr, 0}, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(GatherRows({nullptr, nullptr, -1}, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(CopyRows({nullptr, nullptr, -1}, nullptr, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace engram::kernels::cuda
