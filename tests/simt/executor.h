// Runs CUDA kernels on a CPU, without a GPU and without the CUDA toolkit, so that tests and sanitizers see their very
// source: g++ compiles it against tests/simt/include/cuda_runtime.h.
//
// A grid's blocks run one after the other on the launching thread, a block's threads as fibers that change only at
// barriers, collectives and exit. Shared memory is allocated to the byte and poisoned per block. A misuse ends the
// process with exit code kFailureExit and a line on stderr that says who waits where.
//
// Under ThreadSanitizer each CUDA thread is a thread of its own, and memory is ordered by __syncthreads, __syncwarp,
// __threadfence and the launch's ends alone: shuffles, ballots and other blocks order nothing. (Every second block is
// of the same threads, so a race of two blocks shows if they are an odd number of turns apart: Order::kRandom varies
// that.)
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <vector>

struct dim3;

namespace simt {

inline constexpr int kFailureExit = 70;

// In which order the threads of a block, and the blocks of a grid, take their turns.
enum class Order { kForward, kReverse, kRandom };
enum class Switch { kAssembly, kUcontext };  // kAssembly is ucontext where this machine is no x86-64

// For the launches that follow, in the whole process; not while one runs.
void SetOrder(Order order);
void SetSwitch(Switch how);

// The build that this is: "plain", "asan" or "tsan".
const char* Flavour();

// Those that are worth their time: all three; under AddressSanitizer forward, under ThreadSanitizer forward and random.
std::vector<Order> Orders();

template <class F>
void ForEachOrder(F&& body) {
  for (const Order order : Orders()) {
    SetOrder(order);
    body();
  }
  SetOrder(Order::kForward);
}

// Prints "simt: ..." and ends the process with kFailureExit.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Runs every block now. `dynamic_bytes` of shared memory are within `shared_limit`, which also bounds them together
// with what the kernel asks for through Shared().
void RunGrid(const dim3& grid, const dim3& block, size_t dynamic_bytes, size_t shared_limit,
             const std::function<void()>& body);

// A line of the source. (std::source_location needs a newer clang than the distribution's.)
struct Where {
  const char* file = "";
  unsigned line = 0;

  static constexpr Where current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line};
  }
};

// What follows is called by a kernel's threads. `where` tells one collective from another: the lanes of one must come
// from the same line.

void SyncThreads(Where where = Where::current());
void SyncWarp(unsigned mask, Where where = Where::current());

// __threadfence: orders memory among all that fence, in all blocks of the launch.
void Fence();

// Fills all[32][bytes] for the lanes in mask and leaves the others alone.
void Exchange(unsigned mask, const void* mine, void* all, size_t bytes, Where where);

// Each lane of `mask` gets the value of each, others are T{}.
template <class T>
std::array<T, 32> AllLanes(unsigned mask, const T& mine, Where where = Where::current()) {
  std::array<T, 32> all{};
  Exchange(mask, &mine, all.data(), sizeof(T), where);
  return all;
}

// This thread's place in its warp.
int Lane();

// The block's memory of this id and line, `bytes` in size, aligned to 128.
void* SharedBytes(int id, size_t bytes, const Where& where);
char* DynamicShared();

template <class T, int kId>
T* Shared(size_t count, Where where = Where::current()) {
  return static_cast<T*>(SharedBytes(kId, count * sizeof(T), where));
}

// cp.async: `bytes` (4, 8 or 16; both ends aligned to it) arrive in shared memory, and are read, in the WaitCopies of
// this thread that waits for them, not before. The last bytes - source_bytes are zeros.
void CopyAsync(void* shared, const void* global, int bytes, int source_bytes, Where where = Where::current());
inline void CopyAsync(void* shared, const void* global, int bytes, Where where = Where::current()) {
  CopyAsync(shared, global, bytes, bytes, where);
}
void CommitCopies();
void WaitCopies(int most_groups_left);

}  // namespace simt
