// Memory in huge pages where the system gives them, as the server keeps tables and packed weights.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace engram::kernels {

class HugePages {
 public:
  explicit HugePages(int64_t bytes) {
    constexpr size_t kPage = size_t{2} << 20;
    const size_t size = (static_cast<size_t>(bytes) + kPage - 1) / kPage * kPage;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kPage, size));
    if (data_ == nullptr) throw std::bad_alloc();
    ::madvise(data_, size, MADV_HUGEPAGE);  // without them it is only slower
  }
  ~HugePages() { std::free(data_); }
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  uint8_t* data() const { return data_; }  // not initialised; aligned to 2 MiB

 private:
  uint8_t* data_ = nullptr;
};

}  // namespace engram::kernels
