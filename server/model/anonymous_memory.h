// Memory for tables and weights: anonymous pages of exactly the asked size, huge where the system has them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace engram {

class AnonymousMemory {
 public:
  // Zeroed, page-aligned; its pages go round the memory nodes of a machine that has several, since every thread reads
  // random rows of it. `what` names the use in the error: "the table of layer 1".
  static absl::StatusOr<std::unique_ptr<AnonymousMemory>> Allocate(int64_t bytes, const std::string& what);
  ~AnonymousMemory();
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  AnonymousMemory(uint8_t* data, int64_t size) : data_(data), size_(size) {}

  uint8_t* const data_;
  const int64_t size_;
};

}  // namespace engram
