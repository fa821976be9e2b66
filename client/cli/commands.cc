#include "client/cli/commands.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/error_details.h"

namespace engram::client {

std::string Printable(absl::string_view text) {
  std::string printable(text);
  for (char& c : printable) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return printable;
}

std::string Count(int64_t count, absl::string_view thing) {
  return absl::StrCat(count, " ", thing, count == 1 ? "" : "s");
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
                                       .hash_digest = flags.hash_digest,
                                       .config_digest = flags.config_digest}});
}

std::vector<ReplicaStatus> ReplicasAsked(const Client& client) {
  const auto waits = [](const ReplicaStatus& replica) {
    return replica.state == ReplicaState::kNew && replica.last_error.ok();
  };
  const absl::Time until = absl::Now() + absl::Seconds(1);
  std::vector<ReplicaStatus> replicas = client.Replicas();
  while (std::any_of(replicas.begin(), replicas.end(), waits) && absl::Now() < until) {
    absl::SleepFor(absl::Milliseconds(5));
    replicas = client.Replicas();
  }
  return replicas;
}

void PrintExcluded(const Client& client) {
  for (const ReplicaStatus& replica : ReplicasAsked(client)) {
    if (replica.state != ReplicaState::kOtherModel && replica.state != ReplicaState::kOtherNumerics) continue;
    absl::FPrintF(stderr, "engram-cli: excluded, %s: %s\n", ReplicaStateName(replica.state),
                  Printable(replica.last_error.message()));
  }
}

}  // namespace engram::client
