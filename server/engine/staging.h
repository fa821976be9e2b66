// Memory that steps read from and write to: highways on their way in, results on their way out, prepared kv.
//
// Megabytes asked of the allocator anew for every call come as fresh pages, and faulting those in costs more than
// computing on them. Blocks go back to the pool instead and are used again, so a server that has seen its load once
// takes no more memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace engram {

// A block, shared by whoever reads or writes it; null: none. The last owner to let go gives it back, on any thread,
// also after the pool itself is gone.
using StagingMemory = std::shared_ptr<uint8_t>;

struct StagingStats {
  int64_t in_use_bytes = 0;  // of blocks that are out
  int64_t idle_bytes = 0;    // of blocks that wait to be used again
};

// How a pool's blocks are made: a backend beside host memory knows memory that its device reaches faster. Both
// functions are thread-safe. Blocks outlive the pool, and the backend that the source is of: what the functions need
// for that they keep alive themselves.
struct StagingSource {
  // Aligned to 64, contents unspecified; null where there is no more. `bytes` > 0.
  std::function<uint8_t*(int64_t bytes)> allocate;
  // Once for each block that allocate(bytes) gave.
  std::function<void(uint8_t* block, int64_t bytes)> free;

  // The C library's memory.
  static StagingSource Ordinary();
};

// Thread-safe.
class StagingPool {
 public:
  // Blocks are kept for later as long as all of them, those in use counted, stay within `keep_bytes`.
  explicit StagingPool(int64_t keep_bytes, StagingSource source = StagingSource::Ordinary());

  // At least `bytes`, aligned to 64, contents unspecified. What bounds memory in use is the caller's permit. Null where
  // the source has no more.
  StagingMemory Take(int64_t bytes);

  StagingStats stats() const;

 private:
  class Blocks;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace engram
