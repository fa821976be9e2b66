#include <cstring>

#include "kernels/kernels.h"

namespace engram::kernels {
namespace {

// Rows per claim of a thread: a row copied from memory costs about 100 ns when it misses, so 96 rows are 10 us.
constexpr int64_t kCopyGrain = 96;
// Rows whose lines are on the way: a copy takes a few ns, so more are in flight than where rows are decoded.
constexpr int64_t kCopyPrefetch = 24;

}  // namespace

void CopyRows(const TableView& table, const int64_t* ids, int64_t id_stride, int64_t tokens, int columns, uint8_t* out,
              Workers& workers) {
  const auto id_of = [&](int64_t row) { return ids[row / columns * id_stride + row % columns]; };
  workers.ForEachRange(tokens * columns, kCopyGrain, [&](int64_t begin, int64_t end) {
    const auto prefetch = [&](int64_t row) {
      if (row >= end || id_of(row) < 0) return;
      __builtin_prefetch(table.bytes + id_of(row) * kQ2KBlockBytes);
      __builtin_prefetch(table.bytes + id_of(row) * kQ2KBlockBytes + kQ2KBlockBytes - 1);
    };
    for (int64_t row = begin; row < begin + kCopyPrefetch; ++row) prefetch(row);
    for (int64_t row = begin; row < end; ++row) {
      prefetch(row + kCopyPrefetch);
      uint8_t* to = out + row * kQ2KBlockBytes;
      const int64_t id = id_of(row);
      if (id < 0) {
        std::memset(to, 0, kQ2KBlockBytes);
      } else {
        std::memcpy(to, table.bytes + id * kQ2KBlockBytes, kQ2KBlockBytes);
      }
    }
  });
}

}  // namespace engram::kernels
