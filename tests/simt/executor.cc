// Compiled without ThreadSanitizer's instrumentation: what the executor itself does is no part of a kernel. Where it
// calls functions that the sanitizer intercepts, an Unseen stands around.
#include "tests/simt/executor.h"

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>

#include "tests/simt/device.h"
#include "tests/simt/fiber.h"

thread_local constinit uint3 threadIdx{};
thread_local constinit uint3 blockIdx{};
thread_local constinit dim3 blockDim{};
thread_local constinit dim3 gridDim{};

namespace simt {
namespace {

Order run_order = Order::kForward;
Switch run_switch = Switch::kAssembly;

enum class State { kReady, kAtBarrier, kAtCollective, kExited };

// Who released to it before a barrier may be acquired after it. An object of its own per barrier: a thread that runs
// ahead to the next one releases there.
struct Meeting {
  int members = 0;
};

struct Copy {
  char* to;
  const char* from;
  int bytes, source_bytes;
  int64_t group;
};

struct Thread {
  ~Thread() { DropFiber(fiber); }

  Stack stack;
  Fiber fiber;
  State state = State::kReady;
  int number = 0;  // in the block
  uint3 index{};   // the same, as threadIdx
  Where where;
  Meeting* meeting = nullptr;
  // At a collective:
  unsigned mask = 0;
  const void* mine = nullptr;
  void* all = nullptr;
  size_t bytes = 0;
  // cp.async
  std::vector<Copy> copies;
  int64_t groups = 0;
};

struct SharedObject {
  int id;
  unsigned line;
  const char* file;
  size_t bytes;
  char* memory;
};

using Team = std::vector<std::unique_ptr<Thread>>;

// The block that an OS thread runs.
//
// ThreadSanitizer's threads cost 0.8 MB and a millisecond or two each, so blocks take turns at two teams of them:
// blocks of one team are ordered, those of different teams are not.
struct Block {
  Fiber scheduler;
  Team teams[kTsan ? 2 : 1];
  std::unique_ptr<Thread>* threads = nullptr;  // of the team whose turn it is
  std::vector<int> turns;
  std::vector<int64_t> block_turns;
  std::vector<SharedObject> shared;
  std::vector<char> values;  // of the collective that hands out
  Thread* running = nullptr;
  const std::function<void()>* body = nullptr;
  int count = 0, alive = 0, at_barrier = 0;
  Meeting* meeting = nullptr;  // of the barrier that fills
  size_t shared_bytes = 0, shared_limit = 0;
  char* start = nullptr;  // addresses that order a launch's start, end and fences
  char* end = nullptr;
  char* fence = nullptr;
  uint64_t random = 0x9E3779B97F4A7C15u;
};

thread_local Block own_block;
thread_local constinit Block* block =
    nullptr;  // own_block, from the first launch on; reached without asking if it exists

constexpr int kDynamic = -1;

Thread& Running(const char* what) {
  if (block == nullptr || block->running == nullptr) Fail("%s outside a kernel", what);
  return *block->running;
}

int LaneOf(const Thread& thread) { return thread.number % 32; }

const char* Name(const Where& where) {
  const char* slash = strrchr(where.file, '/');
  return slash == nullptr ? where.file : slash + 1;
}

// Back to the scheduler, until it is this thread's turn again.
void Pause(Thread& thread) { SwitchFiber(thread.fiber, block->scheduler, false); }

void Join(Thread& thread, Meeting*& meeting) {
  if (!kTsan) return;
  const Unseen unseen;
  if (meeting == nullptr) meeting = new Meeting;
  ++meeting->members;
  thread.meeting = meeting;
  ReleaseMemory(meeting);
}

void Part(Thread& thread) {
  if (!kTsan || thread.meeting == nullptr) return;
  const Unseen unseen;
  AcquireMemory(thread.meeting);
  if (--thread.meeting->members == 0) delete thread.meeting;
  thread.meeting = nullptr;
}

void OpenBarrierIfFull() {
  if (block->at_barrier == 0 || block->at_barrier < block->alive) return;
  for (int i = 0; i < block->count; ++i) {
    if (block->threads[i]->state == State::kAtBarrier) block->threads[i]->state = State::kReady;
  }
  block->at_barrier = 0;
  block->meeting = nullptr;
}

// Of a warp, the thread in a lane; null where the block ends before it.
Thread* InLane(const Thread& thread, int lane) {
  const int index = thread.number / 32 * 32 + lane;
  return index < block->count ? block->threads[index].get() : nullptr;
}

bool SameCollective(const Thread& a, const Thread& b) {
  return a.mask == b.mask && a.bytes == b.bytes && a.where.line == b.where.line &&
         (a.where.file == b.where.file || strcmp(a.where.file, b.where.file) == 0);
}

// All lanes of a collective have arrived: each gets the value of each, and may go on.
void HandOut(const Thread& last) {
  const Unseen unseen;
  const size_t bytes = last.bytes;
  char* values = nullptr;
  if (bytes != 0) {
    block->values.resize(std::max(block->values.size(), 32 * bytes));
    values = block->values.data();
  }
  for (int lane = 0; lane < 32; ++lane) {
    if ((last.mask >> lane & 1) == 0) continue;
    Thread& giver = *InLane(last, lane);
    giver.state = State::kReady;
    if (bytes != 0) memcpy(values + bytes * lane, giver.mine, bytes);
  }
  for (int to = 0; bytes != 0 && to < 32; ++to) {
    if ((last.mask >> to & 1) == 0) continue;
    char* all = static_cast<char*>(InLane(last, to)->all);
    if (last.mask == ~0u) {
      memcpy(all, values, 32 * bytes);
      continue;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (last.mask >> lane & 1) memcpy(all + bytes * lane, values + bytes * lane, bytes);
    }
  }
}

void Collect(Thread& thread, unsigned mask, const void* mine, void* all, size_t bytes, const Where& where,
             bool orders) {
  thread.mask = mask;
  thread.mine = mine;
  thread.all = all;
  thread.bytes = bytes;
  thread.where = where;
  const int me = LaneOf(thread), index = thread.number;
  if ((mask >> me & 1) == 0) {
    Fail("%s:%u: thread %d (lane %d) calls a collective with mask %08x, which does not hold it", Name(where),
         where.line, index, me, mask);
  }
  bool complete = true;
  Meeting* meeting = nullptr;
  for (int lane = 0; lane < 32; ++lane) {
    const bool wanted = mask >> lane & 1;
    Thread* other = InLane(thread, lane);
    if (other == &thread) continue;
    if (wanted && (other == nullptr || other->state == State::kExited)) {
      Fail("%s:%u: thread %d (lane %d) waits with mask %08x for lane %d, which %s", Name(where), where.line, index, me,
           mask, lane, other == nullptr ? "the block does not have" : "has exited");
    }
    if (other == nullptr || !(wanted || (other->mask >> me & 1))) continue;
    if (other->state != State::kAtCollective) {
      complete = complete && !wanted;
      continue;
    }
    if (SameCollective(thread, *other)) {
      meeting = other->meeting;
      continue;
    }
    complete = complete && !wanted;
    if (other->mask >> me & 1) {  // it waits for this lane, but elsewhere
      Fail(
          "lanes of one warp disagree: thread %d (lane %d) is at %s:%u with mask %08x, %zu bytes; thread %d (lane %d) "
          "at "
          "%s:%u with mask %08x, %zu bytes",
          index, me, Name(where), where.line, mask, bytes, other->number, lane, Name(other->where), other->where.line,
          other->mask, other->bytes);
    }
  }
  if (orders) Join(thread, meeting);
  if (!complete) {
    thread.state = State::kAtCollective;
    Pause(thread);
  } else {
    HandOut(thread);
  }
  Part(thread);
}

void Exit(Thread& thread) {
  thread.state = State::kExited;
  --block->alive;
  for (int lane = 0; lane < 32; ++lane) {
    const Thread* other = InLane(thread, lane);
    if (other != nullptr && other->state == State::kAtCollective && (other->mask >> LaneOf(thread) & 1)) {
      Fail("thread %d (lane %d) has exited; thread %d waits for it at %s:%u with mask %08x", thread.number,
           LaneOf(thread), other->number, Name(other->where), other->where.line, other->mask);
    }
  }
  OpenBarrierIfFull();
  if (!thread.copies.empty()) {
    const Unseen unseen;
    thread.copies.clear();
  }
  ReleaseMemory(block->end);
}

// A fiber's first function. Its frame is never left, so it has nothing in it that a sanitizer would mark.
__attribute__((noinline, no_sanitize("address"), no_sanitize("undefined"))) void Run() {
  EnterFiber(block->scheduler);
  AcquireMemory(block->start);
  (*block->body)();
  Exit(*block->running);
  SwitchFiber(block->running->fiber, block->scheduler, true);
  __builtin_unreachable();
}

[[noreturn]] void FailDeadlock() {
  fprintf(stderr, "simt: deadlock in block (%u, %u, %u): no thread can go on\n", blockIdx.x, blockIdx.y, blockIdx.z);
  int lines = 0, exited = 0;
  for (int i = 0; i < block->count; ++i) {
    const Thread& thread = *block->threads[i];
    const bool as_before =
        i > 0 && thread.state == block->threads[i - 1]->state && thread.where.line == block->threads[i - 1]->where.line;
    if (thread.state == State::kExited) {
      ++exited;
    } else if (!as_before && ++lines <= 16) {
      fprintf(stderr, "  from thread %d on: at %s:%u, %s mask %08x\n", i, Name(thread.where), thread.where.line,
              thread.state == State::kAtBarrier ? "__syncthreads," : "collective,", thread.mask);
    }
  }
  Fail("%d threads have exited, %d wait", exited, block->alive);
}

char* AddShared(int id, size_t bytes, const Where& where) {
  const Unseen unseen;
  void* memory = nullptr;
  if (posix_memalign(&memory, 128, bytes) != 0) Fail("no memory for %zu bytes of shared memory", bytes);
  memset(memory, 0xFF, bytes);  // NaNs and -1
  block->shared.push_back({id, where.line, where.file, bytes, static_cast<char*>(memory)});
  block->shared_bytes += bytes;
  return static_cast<char*>(memory);
}

template <class T>
void Reorder(std::vector<T>& turns) {
  if (run_order == Order::kReverse) std::reverse(turns.begin(), turns.end());
  if (run_order != Order::kRandom) return;
  for (size_t i = turns.size(); i > 1; --i) {
    block->random = block->random * 6364136223846793005u + 1442695040888963407u;
    std::swap(turns[i - 1], turns[(block->random >> 33) % i]);
  }
}

void RunBlock(size_t turn, size_t dynamic_bytes) {
  {
    const Unseen unseen;
    block->threads = block->teams[turn % std::size(block->teams)].data();
    AddShared(kDynamic, dynamic_bytes, Where::current());
    for (int i = 0; i < block->count; ++i) {
      Thread& thread = *block->threads[i];
      PrepareFiber(thread.fiber, thread.stack, Run, run_switch == Switch::kAssembly);
      thread.state = State::kReady;
      thread.number = i;
      thread.mask = 0;
      thread.groups = 0;
      const unsigned u = static_cast<unsigned>(i);
      thread.index = {u % blockDim.x, u / blockDim.x % blockDim.y, u / blockDim.x / blockDim.y};
      if (!kTsan) continue;
      char name[64];
      snprintf(name, sizeof name, "block (%u,%u,%u) thread %d", blockIdx.x, blockIdx.y, blockIdx.z, i);
      NameFiber(thread.fiber, name);
    }
  }
  block->alive = block->count;
  block->at_barrier = 0;
  while (block->alive > 0) {
    bool ran = false;
    for (int i : block->turns) {
      Thread& thread = *block->threads[i];
      if (thread.state != State::kReady) continue;
      ran = true;
      block->running = &thread;
      threadIdx = thread.index;
      SwitchFiber(block->scheduler, thread.fiber, false);
    }
    if (!ran) FailDeadlock();
  }
  block->running = nullptr;
  const Unseen unseen;
  for (const SharedObject& object : block->shared) free(object.memory);
  block->shared.clear();
  block->shared_bytes = 0;
}

}  // namespace

void SetOrder(Order order) { run_order = order; }
void SetSwitch(Switch how) { run_switch = how; }

const char* Flavour() { return kAsan ? "asan" : kTsan ? "tsan" : "plain"; }

std::vector<Order> Orders() {
  if (kAsan) return {Order::kForward};
  if (kTsan) return {Order::kForward, Order::kRandom};
  return {Order::kForward, Order::kReverse, Order::kRandom};
}

void Fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("simt: ", stderr);
  vfprintf(stderr, format, arguments);
  fputs("\n", stderr);
  va_end(arguments);
  if (block != nullptr && block->running != nullptr) {
    fprintf(stderr, "simt: in block (%u, %u, %u) of (%u, %u, %u)\n", blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x,
            gridDim.y, gridDim.z);
  }
  fflush(nullptr);
  _Exit(kFailureExit);
}

void RunGrid(const dim3& grid, const dim3& block_dim, size_t dynamic_bytes, size_t shared_limit,
             const std::function<void()>& body) {
  block = &own_block;
  if (block->running != nullptr) Fail("a kernel launches a kernel");
  char* order = nullptr;
  {
    const Unseen unseen;
    order = static_cast<char*>(malloc(32));
    block->start = order;
    block->end = order + 8;
    block->fence = order + 16;
    gridDim = grid;
    blockDim = block_dim;
    block->body = &body;
    block->shared_limit = shared_limit;
    block->count = static_cast<int>(block_dim.x * block_dim.y * block_dim.z);
    for (Team& team : block->teams) {
      while (team.size() < static_cast<size_t>(block->count)) team.push_back(std::make_unique<Thread>());
    }
    block->turns.resize(block->count);
    std::iota(block->turns.begin(), block->turns.end(), 0);
    block->block_turns.resize(static_cast<size_t>(grid.x) * grid.y * grid.z);
    std::iota(block->block_turns.begin(), block->block_turns.end(), 0);
    Reorder(block->turns);
    Reorder(block->block_turns);
  }
  AdoptFiber(block->scheduler);
  ReleaseMemory(block->start);
  for (size_t turn = 0; turn < block->block_turns.size(); ++turn) {
    const int64_t at = block->block_turns[turn];
    blockIdx = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                static_cast<unsigned>(at / grid.x / grid.y)};
    if (run_order == Order::kRandom) Reorder(block->turns);
    RunBlock(turn, dynamic_bytes);
  }
  AcquireMemory(block->end);
  const Unseen unseen;
  free(order);
}

void SyncThreads(Where where) {
  Thread& thread = Running("__syncthreads");
  thread.where = where;
  thread.state = State::kAtBarrier;
  ++block->at_barrier;
  Join(thread, block->meeting);
  OpenBarrierIfFull();
  if (thread.state == State::kAtBarrier) Pause(thread);
  Part(thread);
}

void SyncWarp(unsigned mask, Where where) { Collect(Running("__syncwarp"), mask, nullptr, nullptr, 0, where, true); }

void Exchange(unsigned mask, const void* mine, void* all, size_t bytes, Where where) {
  Collect(Running("a collective"), mask, mine, all, bytes, where, false);
}

void Fence() {
  Running("__threadfence");
  AcquireMemory(block->fence);
  ReleaseMemory(block->fence);
}

int Lane() { return LaneOf(Running("a collective")); }

void* SharedBytes(int id, size_t bytes, const Where& where) {
  Running("shared memory");
  for (const SharedObject& object : block->shared) {
    if (object.id == id && object.line == where.line && strcmp(object.file, where.file) == 0) {
      if (object.bytes == bytes) return object.memory;
      Fail("%s:%u: shared memory of %zu bytes, but another thread made it of %zu", Name(where), where.line, bytes,
           object.bytes);
    }
  }
  if (block->shared_bytes + bytes > block->shared_limit) {
    Fail("%s:%u: %zu bytes of shared memory, with the %zu that the block has more than its limit of %zu", Name(where),
         where.line, bytes, block->shared_bytes, block->shared_limit);
  }
  return AddShared(id, bytes, where);
}

char* DynamicShared() {
  Running("shared memory");
  return block->shared.front().memory;
}

void CopyAsync(void* shared, const void* global, int bytes, int source_bytes, Where where) {
  Thread& thread = Running("cp.async");
  const auto to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
  if (bytes != 4 && bytes != 8 && bytes != 16) Fail("%s:%u: cp.async of %d bytes", Name(where), where.line, bytes);
  if (source_bytes < 0 || source_bytes > bytes) {
    Fail("%s:%u: cp.async of %d bytes from %d", Name(where), where.line, bytes, source_bytes);
  }
  if (to % bytes != 0 || from % bytes != 0) {
    Fail("%s:%u: cp.async of %d bytes from %p to %p: not aligned to %d", Name(where), where.line, bytes, global, shared,
         bytes);
  }
  const bool inside = std::any_of(block->shared.begin(), block->shared.end(), [&](const SharedObject& object) {
    const auto begin = reinterpret_cast<uintptr_t>(object.memory);
    return to >= begin && to + bytes <= begin + object.bytes;
  });
  if (!inside) Fail("%s:%u: cp.async to %p, which is not shared memory", Name(where), where.line, shared);
  const Unseen unseen;
  thread.copies.push_back(
      {static_cast<char*>(shared), static_cast<const char*>(global), bytes, source_bytes, thread.groups});
}

void CommitCopies() { ++Running("cp.async").groups; }

void WaitCopies(int most_groups_left) {
  Thread& thread = Running("cp.async");
  size_t kept = 0;
  for (size_t i = 0; i < thread.copies.size(); ++i) {
    const Copy copy = thread.copies[i];
    if (copy.group >= thread.groups - most_groups_left) {
      thread.copies[kept++] = copy;
      continue;
    }
    // Seen by the sanitizers, as reads and writes of this thread.
    if (copy.source_bytes != 0) memcpy(copy.to, copy.from, copy.source_bytes);  // else it may start at null
    memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
  }
  const Unseen unseen;
  thread.copies.resize(kept);
}

}  // namespace simt
