// The server's own words: one line an event on stderr, "time level message key=value ...".
//
// Never token ids, tensors or session names. Thread-safe; a line is written whole.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace engram {

enum class LogLevel { kInfo, kWarning, kError };

using LogFields = std::initializer_list<std::pair<absl::string_view, std::string>>;

void Log(LogLevel level, absl::string_view message, LogFields fields = {});

}  // namespace engram
