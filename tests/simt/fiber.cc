#include "tests/simt/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#ifdef ENGRAM_SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef ENGRAM_SIMT_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#ifdef __x86_64__
// Saves what a call must preserve on the old stack and takes it from the new one. The floating-point control words stay
// the thread's: fibers share them.
extern "C" void engram_simt_switch(void** save, void* to);
asm(R"(
.text
.globl engram_simt_switch
.type engram_simt_switch, @function
engram_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size engram_simt_switch, . - engram_simt_switch
)");
constexpr bool kHasAssembly = true;
#else
static void engram_simt_switch(void**, void*) {}
constexpr bool kHasAssembly = false;
#endif

namespace simt {

void PrepareFiber(Fiber& fiber, const Stack& stack, void (*entry)(), bool by_assembly) {
  fiber.stack_bottom = stack.bottom();
  fiber.stack_bytes = Stack::kBytes;
  fiber.fake_stack = nullptr;
  fiber.by_assembly = by_assembly && kHasAssembly;
  if (fiber.by_assembly) {
    // Six registers, the address to return to, and the word that a caller would have pushed: the entry finds the stack
    // as a call leaves it, 8 short of a multiple of 16.
    auto* top = reinterpret_cast<uintptr_t*>(stack.bottom() + Stack::kBytes - 64);
    for (int i = 0; i < 8; ++i) top[i] = 0;
    top[6] = reinterpret_cast<uintptr_t>(entry);
    static_assert(sizeof(uintptr_t) * 7 % 16 == 8);
    fiber.stack_pointer = top;
  } else {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack.bottom();
    fiber.context.uc_stack.ss_size = Stack::kBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
  }
#ifdef ENGRAM_SIMT_TSAN
  if (fiber.tsan == nullptr) fiber.tsan = __tsan_create_fiber(0);
#endif
}

void EnterFiber([[maybe_unused]] Fiber& from) {
#ifdef ENGRAM_SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &from.stack_bottom, &from.stack_bytes);
#endif
}

void SwitchFiber(Fiber& from, Fiber& to, [[maybe_unused]] bool for_good) {
  const bool by_assembly = from.by_assembly || to.by_assembly;  // one of the two is the thread's own stack
#ifdef ENGRAM_SIMT_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#ifdef ENGRAM_SIMT_TSAN
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
  if (by_assembly) {
    engram_simt_switch(&from.stack_pointer, to.stack_pointer);
  } else {
    swapcontext(&from.context, &to.context);
  }
#ifdef ENGRAM_SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

#ifdef ENGRAM_SIMT_TSAN
void AdoptFiber(Fiber& fiber) { fiber.tsan = __tsan_get_current_fiber(); }
void NameFiber(Fiber& fiber, const char* name) { __tsan_set_fiber_name(fiber.tsan, name); }
void DropFiber(Fiber& fiber) {
  if (fiber.tsan != nullptr) __tsan_destroy_fiber(fiber.tsan);
}
void ReleaseMemory(void* address) { __tsan_release(address); }
void AcquireMemory(void* address) { __tsan_acquire(address); }
Unseen::Unseen() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Unseen::~Unseen() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
void AdoptFiber(Fiber&) {}
void NameFiber(Fiber&, const char*) {}
void DropFiber(Fiber&) {}
void ReleaseMemory(void*) {}
void AcquireMemory(void*) {}
Unseen::Unseen() {}
Unseen::~Unseen() {}
#endif

Stack::Stack() {
  void* memory =
      mmap(nullptr, kGuard + kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
    perror("simt: a fiber's stack");
    abort();
  }
  memory_ = static_cast<char*>(memory);
}

Stack::~Stack() { munmap(memory_, kGuard + kBytes); }

}  // namespace simt
