#include "server/model/anonymous_memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace engram {
namespace {

constexpr int kMostNodes = 1024;
constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of <linux/mempolicy.h>
using NodeMask = std::array<unsigned long, kMostNodes / (8 * sizeof(unsigned long))>;

// The nodes of a list like "0-1,4"; how many.
int ReadNodes(const std::string& list, NodeMask& mask) {
  int nodes = 0;
  for (const absl::string_view range : absl::StrSplit(list, ',')) {
    const std::pair<std::string, std::string> ends = absl::StrSplit(range, absl::MaxSplits('-', 1));
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.first, &first) ||
        !absl::SimpleAtoi(ends.second.empty() ? ends.first : ends.second, &last)) {
      return 0;
    }
    for (int node = first; node >= 0 && node <= last && node < kMostNodes; ++node, ++nodes) {
      mask[static_cast<size_t>(node) / (8 * sizeof(unsigned long))] |= 1ul << (node % (8 * sizeof(unsigned long)));
    }
  }
  return nodes;
}

// A hint: where the kernel knows no policies (or a sandbox forbids them) pages lie where they are first touched.
void InterleaveOverNodes(void* pages, size_t bytes) {
  std::ifstream file("/sys/devices/system/node/has_memory");
  std::string list;
  std::getline(file, list);
  NodeMask mask{};
  if (ReadNodes(list, mask) < 2) return;
  syscall(SYS_mbind, pages, bytes, kInterleave, mask.data(), kMostNodes, 0u);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AnonymousMemory>> AnonymousMemory::Allocate(int64_t bytes, const std::string& what) {
  bytes = std::max<int64_t>(bytes, 1);
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", what, ", ", bytes, " bytes: ", strerror(errno)));
  }
  // A random row is a TLB miss: with 2 MiB pages a walk is one level shorter and its tables fit the cache. A hint.
  madvise(pages, bytes, MADV_HUGEPAGE);
  InterleaveOverNodes(pages, static_cast<size_t>(bytes));
  return std::unique_ptr<AnonymousMemory>(new AnonymousMemory(static_cast<uint8_t*>(pages), bytes));
}

AnonymousMemory::~AnonymousMemory() { munmap(data_, size_); }

}  // namespace engram
