#include <cstring>

#include "kernels/kernels.h"

namespace engram::kernels {
namespace {

// Rows per claim of a thread, 64 tokens of 24 columns, 24 ns each: 37 us. What fits one range runs on the calling
// thread alone: at that size two threads gained nothing on two idle cores (35 to 55 us), and under load, where the
// woken one waits for a core, a call of 64 tokens and two layers took twice as long with ranges of 96.
constexpr int64_t kCopyGrain = 1536;
// Rows whose lines are on the way: a copy takes a few ns, so more are in flight than where rows are decoded.
constexpr int64_t kCopyPrefetch = 24;

// Ids row by row: [tokens][columns] of them, tokens `stride` apart. Without a division a row, which would cost as much
// as the copy.
class RowWalk {
 public:
  RowWalk(const int64_t* ids, int64_t stride, int columns, int64_t row)
      : token_(ids + row / columns * stride), stride_(stride), columns_(columns), column_(row % columns), row_(row) {}

  int64_t row() const { return row_; }
  int64_t Next() {
    const int64_t id = token_[column_];
    ++row_;
    if (++column_ == columns_) {
      column_ = 0;
      token_ += stride_;
    }
    return id;
  }

 private:
  const int64_t* token_;
  const int64_t stride_;
  const int64_t columns_;
  int64_t column_;
  int64_t row_;
};

}  // namespace

void CopyRows(const TableView& table, const int64_t* ids, int64_t id_stride, int64_t tokens, int columns, uint8_t* out,
              Workers& workers) {
  workers.ForEachRange(tokens * columns, kCopyGrain, [&](int64_t begin, int64_t end) {
    RowWalk ahead(ids, id_stride, columns, begin);
    const auto prefetch_next = [&] {
      if (ahead.row() == end) return;
      const int64_t id = ahead.Next();
      if (id < 0) return;
      const uint8_t* row = table.bytes + id * kQ2KBlockBytes;
      __builtin_prefetch(row);
      __builtin_prefetch(row + 64);
      __builtin_prefetch(row + kQ2KBlockBytes - 1);
    };
    for (int64_t i = 0; i < kCopyPrefetch; ++i) prefetch_next();
    for (RowWalk at(ids, id_stride, columns, begin); at.row() < end;) {
      prefetch_next();
      uint8_t* to = out + at.row() * kQ2KBlockBytes;
      const int64_t id = at.Next();
      if (id < 0) {
        std::memset(to, 0, kQ2KBlockBytes);
      } else {
        std::memcpy(to, table.bytes + id * kQ2KBlockBytes, kQ2KBlockBytes);
      }
    }
  });
}

}  // namespace engram::kernels
