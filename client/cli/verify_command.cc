// engram-cli verify: a fixture through the network, every value compared.

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "client/verify/replay.h"

namespace engram::client {
namespace {

struct NamedMode {
  ReplayMode mode;
  const char* title;
  const char* short_name;
};

constexpr NamedMode kModes[] = {
    {ReplayMode::kLookback, "stateless with look-back", "lookback"},
    {ReplayMode::kSession, "through sessions, without look-back", "session"},
    {ReplayMode::kTogether, "all cases in one call, with look-back", "together"},
};

void PrintStage(const StageResult& stage) {
  if (stage.values() == 0) {
    absl::PrintF("  %-26s none      0 values\n", stage.name());
    return;
  }
  absl::PrintF("  %-26s %s %8d values  largest %.3f", stage.name(), stage.passed() ? "PASS" : "FAIL", stage.values(),
               stage.largest());
  if (stage.misses() > 0) absl::PrintF("  %d misses", stage.misses());
  if (stage.largest() > 0) absl::PrintF("  at %s", stage.where());
  absl::PrintF("\n");
}

void PrintReport(const NamedMode& mode, const ReplayReport& report) {
  absl::PrintF("%s: %s\n", mode.title, Count(report.calls, "message"));
  PrintStage(report.kv);
  PrintStage(report.f32);
  PrintStage(report.f32_rounded);
  PrintStage(report.bf16);
  PrintStage(report.masked);
  absl::PrintF("  gates: %d judged by the fixture's f64 gate", report.exact_gates);
  if (report.bounded_gates > 0) {
    absl::PrintF("; %d whose key is not the fixture's bits: one gate for all values, bounds up to %.2g wide",
                 report.bounded_gates, report.widest_key_bound);
  }
  absl::PrintF("\n");
}

int64_t Calls(const Fixture& fixture) {
  int64_t calls = 0;
  for (const FixtureCase& fixture_case : fixture.cases) calls += static_cast<int64_t>(fixture_case.calls.size());
  return calls;
}

// Nobody answered, or not in time: the server was not measured. Any other refusal of a good call is a miss.
bool IsConnectionError(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
}

}  // namespace

int RunVerify(const ConnectionFlags& connection, const VerifyFlags& flags) {
  absl::StatusOr<Fixture> fixture = LoadFixture(flags.expected_json);
  if (!fixture.ok()) return PrintMistake(fixture.status().message());
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  PrintExcluded(**client);
  const ModelInfo& model = (*client)->model();
  if (absl::Status status = CheckSameModel(model, *fixture); !status.ok()) return PrintError(status);

  absl::PrintF("fixture %s: %s, %s, %s, dim %d, hc %d; the server's geometry is the same\n", fixture->name,
               Count(static_cast<int64_t>(fixture->cases.size()), "case"), Count(Calls(*fixture), "call"),
               Count(static_cast<int64_t>(fixture->layer_ids.size()), "layer"), fixture->dim, fixture->hc);
  absl::PrintF("server  %s: version %s, %s, config digest %s\n", absl::StrJoin(connection.targets, ", "),
               Printable(model.server_version), Printable(model.numerics_id),
               absl::BytesToHexString(model.config_digest.substr(0, 8)));
  absl::PrintF("errors are in units of the tolerance; above 1 is a miss\n\n");
  if (fixture->kv_tolerance != kKvToleranceText || fixture->out_tolerance != kOutToleranceText) {
    absl::PrintF(
        "note: the file words its tolerances otherwise than this tool, whose own are applied:\n  kv: %s\n  out: %s\n",
        kKvToleranceText, kOutToleranceText);
  }

  std::random_device random;
  const std::string prefix = absl::StrFormat("verify-%08x%08x", random(), random());
  bool passed = true;
  double widest = 0;
  for (const NamedMode& mode : kModes) {
    ReplayReport report;
    const absl::Status status = Replay(**client, *fixture, mode.mode, absl::StrCat(prefix, "-", mode.short_name),
                                       absl::Seconds(connection.timeout_secs), &report);
    if (!status.ok()) {
      std::fflush(stdout);
      PrintError(status);
      if (IsConnectionError(status)) return kExitError;
      absl::PrintF("%s: FAIL, a call was refused\n", mode.title);
      passed = false;
      continue;
    }
    PrintReport(mode, report);
    passed = passed && report.passed();
    widest = std::max(widest, report.widest_rounding_bound);
  }
  absl::PrintF(
      "\nhighway with bf16 values: the fixture has no gate for a rounded input, so each copy must be h + g * value for "
      "one g,\nwithin bounds up to %.2g wide around the fixture's gate; the bf16 reply is then judged by that g\n",
      widest);
  absl::PrintF("%s\n", passed ? "PASS" : "FAIL");
  return passed ? kExitOk : kExitMiss;
}

}  // namespace engram::client
