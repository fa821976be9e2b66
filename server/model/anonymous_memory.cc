#include "server/model/anonymous_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace engram {

absl::StatusOr<std::unique_ptr<AnonymousMemory>> AnonymousMemory::Allocate(int64_t bytes, const std::string& what) {
  bytes = std::max<int64_t>(bytes, 1);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", what, ", ", bytes, " bytes: ", strerror(errno)));
  }
  // A random row is a TLB miss: with 2 MiB pages a walk is one level shorter and its tables fit the cache. A hint.
  madvise(pages, bytes, MADV_HUGEPAGE);
  return std::unique_ptr<AnonymousMemory>(new AnonymousMemory(static_cast<uint8_t*>(pages), bytes));
}

AnonymousMemory::~AnonymousMemory() { munmap(data_, size_); }

}  // namespace engram
