#include "client/cli/commands.h"

#include <array>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/error_details.h"

namespace engram::client {

std::string Printable(absl::string_view text) {
  std::string printable(text);
  for (char& c : printable) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return printable;
}

std::string ByteSize(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double size = static_cast<double>(bytes);
  size_t unit = 0;
  while (size >= 1024 && unit + 1 < kUnits.size()) {
    size /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.2f %s", size, kUnits[unit]);
}

int PrintError(const absl::Status& status) {
  // The server's messages begin with the reason already.
  std::string reason = ErrorReason(status);
  if (absl::StrContains(status.message(), reason)) reason.clear();
  absl::FPrintF(stderr, "engram-cli: %s%s: %s\n", absl::StatusCodeToString(status.code()),
                reason.empty() ? "" : absl::StrCat(": ", Printable(reason)), Printable(status.message()));
  for (const ErrorOffender& offender : ErrorOffenders(status)) {
    absl::FPrintF(stderr, "  %s: %s\n", Printable(offender.field), Printable(offender.description));
  }
  return kExitError;
}

int PrintMistake(absl::string_view text) {
  absl::FPrintF(stderr, "engram-cli: %s\n", Printable(text));
  return kExitError;
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const ConnectionFlags& flags) {
  return Client::Connect({.replicas = {.targets = flags.targets,
                                       .connect_timeout = absl::Seconds(flags.connect_timeout_secs),
                                       .hash_digest = flags.hash_digest}});
}

}  // namespace engram::client
