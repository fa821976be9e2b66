// The tokens of a command: what its flags and files say, read before any server is asked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/commands.h"
#include "client/engram_client.h"

namespace engram::client {

struct TokenInputs {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> mask;      // empty: all live
  std::vector<int32_t> lookback;  // empty: not given
  std::vector<int32_t> layers;    // empty: all

  int64_t count() const { return static_cast<int64_t>(tokens.size()); }

  // Borrows from this.
  SequenceRun Run(const TokenFlags& flags) const;
  std::vector<int32_t> LayersOf(const ModelInfo& model) const;
};

// An error names the flag or the file, and the entry.
absl::StatusOr<TokenInputs> ReadTokenInputs(const TokenFlags& flags);

// The whole file, or its first `most` + 1 bytes where it has more: a pipe or a device may never end.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t most);

}  // namespace engram::client
