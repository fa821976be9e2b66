#include "server/observe/log.h"

#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace engram {
namespace {

absl::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "ERROR";
}

// Quoted where a reader (or a field splitter) could be misled by what stands in it.
std::string Quoted(absl::string_view value) {
  for (const char c : value) {
    if (c <= ' ' || c == '"' || c == '=' || c == 0x7f) return absl::StrCat("\"", absl::CEscape(value), "\"");
  }
  return value.empty() ? "\"\"" : std::string(value);
}

}  // namespace

void Log(LogLevel level, absl::string_view message, LogFields fields) {
  std::string line = absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()), " ",
                                  LevelName(level), " ", absl::CEscape(message));
  for (const auto& [key, value] : fields) absl::StrAppend(&line, " ", key, "=", Quoted(value));
  line.push_back('\n');
  // One write, so that lines of several threads do not mix. A log that cannot be written is no reason to fail a call.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace engram
