// Many independent chunks of work on a few threads, for loading and writing: minutes long, may fail, reports progress.
// (kernels::Workers is for loops of microseconds that cannot fail.)
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"

namespace engram {

// Calls body(0) .. body(chunks - 1), each once, in ascending order of start, on up to `threads` threads, and returns
// the first error; after an error no further chunk begins. `tick`, where given, is called on the calling thread about
// four times a second while the work goes on.
absl::Status RunChunks(int64_t chunks, int threads, const std::function<absl::Status(int64_t chunk)>& body,
                       const std::function<void()>& tick = nullptr);

}  // namespace engram
