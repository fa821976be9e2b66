#include "server/regions/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace engram {
namespace {

// Writes stay allowed: they are what a region is for.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status NoMemory(const char* call) {
  return absl::ResourceExhaustedError(absl::StrCat(call, ": ", std::strerror(errno)));
}

// Interrupted by a signal, it begins again.
int Allocate(int fd, int64_t bytes) {
  for (;;) {
    const int result = ::fallocate(fd, 0, 0, bytes);
    if (result == 0 || errno != EINTR) return result;
  }
}

}  // namespace

int64_t WholePages(int64_t bytes) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

absl::StatusOr<std::shared_ptr<Region>> Region::Create(int64_t bytes) {
  const int fd = ::memfd_create("engram-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return NoMemory("memfd_create");
  const auto fail = [fd](const char* call) {
    const absl::Status status = NoMemory(call);
    ::close(fd);
    return status;
  };
  if (::ftruncate(fd, bytes) != 0) return fail("ftruncate");
  if (Allocate(fd, bytes) != 0) return fail("fallocate");
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) return fail("F_ADD_SEALS");
  void* data =
      ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, /*offset=*/0);
  if (data == MAP_FAILED) return fail("mmap");
  return std::shared_ptr<Region>(new Region(fd, static_cast<char*>(data), bytes, {}));
}

std::shared_ptr<Region> Region::OnDevice(DeviceMemory memory, int64_t bytes) {
  char* const data = memory.data;
  return std::shared_ptr<Region>(new Region(-1, data, bytes, std::move(memory)));
}

Region::Region(int fd, char* data, int64_t bytes, DeviceMemory device)
    : fd_(fd), data_(data), bytes_(bytes), device_(std::move(device)) {}

Region::~Region() {
  if (fd_ < 0) {
    device_.free();
    return;
  }
  ::munmap(data_, static_cast<size_t>(bytes_));
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes_);
  ::close(fd_);
}

char* Region::At(uint64_t offset, uint64_t bytes) const {
  const auto all = static_cast<uint64_t>(bytes_);
  if (bytes > all || offset > all - bytes) return nullptr;  // as differences: a sum could wrap
  return data_ + offset;
}

}  // namespace engram
