// One stack to run on, and how to change to another: a few instructions on x86-64, ucontext elsewhere or on demand.
// Tells AddressSanitizer and ThreadSanitizer which stack and which thread they look at.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace simt {

// A thread's own stack (default-constructed) or a fiber's. Stays where it is while it is in use.
struct Fiber {
  void* stack_pointer = nullptr;
  ucontext_t context;
  bool by_assembly = false;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan = nullptr;        // ThreadSanitizer's fiber
};

class Stack;

// `entry` is called by the first SwitchFiber to it, calls EnterFiber first, and never returns. A fiber that was left
// for good may be prepared again: for ThreadSanitizer it stays the same thread.
void PrepareFiber(Fiber& fiber, const Stack& stack, void (*entry)(), bool by_assembly);
void EnterFiber(Fiber& from);

// Leaves `from`, which is running, for `to`; for good: `from` will not run again.
void SwitchFiber(Fiber& from, Fiber& to, bool for_good);

// ThreadSanitizer's side; nothing in other builds. Adopt is for the stack that a thread was born with.
void AdoptFiber(Fiber& fiber);
void NameFiber(Fiber& fiber, const char* name);
void DropFiber(Fiber& fiber);

// Orders memory: who acquires an address sees what was done before it was released.
void ReleaseMemory(void* address);
void AcquireMemory(void* address);

// While one lives, the executor's own use of memory (and malloc's and memcpy's in its name) is no part of the kernel.
class Unseen {
 public:
  Unseen();
  ~Unseen();
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;
};

#ifdef ENGRAM_SIMT_TSAN
inline constexpr bool kTsan = true;
#else
inline constexpr bool kTsan = false;
#endif
#ifdef ENGRAM_SIMT_ASAN
inline constexpr bool kAsan = true;
#else
inline constexpr bool kAsan = false;
#endif

// Twice as deep under a sanitizer, whose frames are wider. Below it lies a page that cannot be touched.
class Stack {
 public:
  static constexpr size_t kBytes = kAsan || kTsan ? 128 << 10 : 64 << 10;

  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* bottom() const { return memory_ + kGuard; }

 private:
  static constexpr size_t kGuard = 4096;
  char* memory_;
};

}  // namespace simt
