#include "client/bench/load_command.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "client/bench/command.h"
#include "client/bench/interruption.h"
#include "client/bench/load.h"
#include "client/bench/load_options.h"
#include "client/bench/report.h"
#include "client/cli/output_file.h"

namespace engram::bench {
namespace {

// The flags whose text is taken apart later.
struct LoadFlags {
  LoadOptions options;
  std::string forms = "highway";
  std::string tokens = "1";
  std::string concurrency = "1";
  std::string dtype = "f32";
  std::string arrivals = "poisson";
  std::string baseline = "none";
  std::string layers;
  std::map<std::string, const CLI::Option*> given;  // options that some combinations leave without effect

  bool Has(const std::string& flag) const { return given.at(flag)->count() > 0; }
};

constexpr int64_t kMostConcurrency = 65536;
constexpr int64_t kMostTokens = int64_t{1} << 24;

int Mistake(const absl::Status& status) {
  const std::string code = status.code() == absl::StatusCode::kInvalidArgument
                               ? ""
                               : absl::StrCat(absl::StatusCodeToString(status.code()), ": ");
  std::fprintf(stderr, "engram-bench: %s%s\n", code.c_str(), std::string(status.message()).c_str());
  return kExitError;
}

absl::Status Prefixed(absl::string_view flag, const absl::Status& status) {
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", status.message()));
}

// Flags that would change nothing: whoever gave one expects that it does.
absl::Status CheckEffects(const LoadFlags& flags) {
  const LoadOptions& options = flags.options;
  const auto useless = [](const std::string& flag, absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, " is given, but ", why));
  };
  for (const char* flag : {"tokens-per-call", "sequences-per-call", "ngram-pool"}) {
    if (!options.trace.empty() && flags.Has(flag)) return useless(flag, "the steps of --trace have their own");
  }
  if (options.rate > 0 && flags.Has("concurrency")) {
    return useless("concurrency", "--rate asks for an open loop, which --max-outstanding bounds");
  }
  if (options.rate == 0 && flags.Has("arrivals")) return useless("arrivals", "not --rate");
  // A trace at its own times is an open loop too.
  const bool closed = options.rate == 0 && (options.trace.empty() || flags.Has("concurrency"));
  if (closed && flags.Has("max-outstanding")) return useless("max-outstanding", "not --rate");
  if (flags.baseline == "none" && flags.Has("rounds")) return useless("rounds", "not --baseline echo");
  return absl::OkStatus();
}

absl::StatusOr<LoadOptions> OptionsOf(const LoadFlags& flags) {
  if (absl::Status status = CheckEffects(flags); !status.ok()) return status;
  LoadOptions options = flags.options;
  auto forms = ParseForms(flags.forms);
  if (!forms.ok()) return Prefixed("--form", forms.status());
  options.forms = *std::move(forms);
  auto tokens = ParseCounts(flags.tokens, kMostTokens);
  if (!tokens.ok()) return Prefixed("--tokens-per-call", tokens.status());
  options.tokens_per_call = *std::move(tokens);
  auto concurrency = ParseCounts(flags.concurrency, kMostConcurrency);
  if (!concurrency.ok()) return Prefixed("--concurrency", concurrency.status());
  options.concurrency = *std::move(concurrency);
  options.dtype = flags.dtype == "bf16" ? client::HighwayDtype::kBf16 : client::HighwayDtype::kF32;
  options.arrivals = flags.arrivals == "constant" ? ArrivalKind::kConstant : ArrivalKind::kPoisson;
  // A trace has times of its own; another loop is asked for by its flag.
  if (!options.trace.empty() && options.rate == 0 && !flags.Has("concurrency")) {
    options.arrivals = ArrivalKind::kTrace;
  }
  options.echo = flags.baseline == "echo";
  if (!flags.layers.empty()) {
    auto layers = ParseCounts(flags.layers, 1 << 30);
    if (!layers.ok()) return Prefixed("--layers", layers.status());
    options.layers.assign(layers->begin(), layers->end());
  }
  if (absl::Status status = CheckLoadOptions(options); !status.ok()) return status;
  return options;
}

// The report as far as it goes, and where it is to be written. Thread-safe: a signal may end the run at any time.
class Reports {
 public:
  // A file that cannot be written is better known now than after an hour; what it holds stays until there is a report.
  absl::Status Open(const LoadOptions& options) {
    const absl::MutexLock lock(&mutex_);
    absl::Status status = Open(options.json, &files_[0]);
    return status.ok() ? Open(options.html, &files_[1]) : status;
  }

  void Measured(Report report) {
    const absl::MutexLock lock(&mutex_);
    report_ = std::move(report);
  }

  // Once; files that are new are removed where no point was measured.
  absl::Status Write() {
    const absl::MutexLock lock(&mutex_);
    absl::Status first;
    if (report_.has_value()) {
      std::fputs(TextReport(*report_).c_str(), stdout);
      std::fflush(stdout);
    }
    for (File& file : files_) {
      if (!file.output.has_value()) continue;
      const absl::Status status = report_.has_value() ? file.output->Write({file.text(*report_)}) : absl::OkStatus();
      if (!status.ok() && first.ok()) {
        first = absl::UnavailableError(absl::StrCat(file.flag, " ", status.message()));
      }
      file.output.reset();
    }
    report_.reset();
    return first;
  }

 private:
  struct File {
    const char* flag;
    std::string (*text)(const Report&);
    std::optional<client::OutputFile> output = {};  // none where the flag is not given
  };

  static absl::Status Open(const std::string& path, File* file) {
    if (path.empty()) return absl::OkStatus();
    const absl::Status status = file->output.emplace().Open(path);
    return status.ok() ? status : absl::InvalidArgumentError(absl::StrCat(file->flag, " ", status.message()));
  }

  absl::Mutex mutex_;
  std::optional<Report> report_ ABSL_GUARDED_BY(mutex_);
  File files_[2] ABSL_GUARDED_BY(mutex_) = {{"--json", &JsonReport}, {"--html", &HtmlReport}};
};

int RunLoadCommand(const LoadFlags& flags, const std::string& command_line) {
  const absl::StatusOr<LoadOptions> options = OptionsOf(flags);
  if (!options.ok()) return Mistake(options.status());
  Reports reports;
  if (absl::Status status = reports.Open(*options); !status.ok()) return Mistake(status);
  const Interruption interruption([&reports] {
    if (const absl::Status status = reports.Write(); !status.ok()) Mistake(status);
  });
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const auto progress = [terminal](const std::string& line) {
    std::fprintf(stderr, terminal ? "\r\x1b[K%s" : "%s\n", line.c_str());
  };
  const absl::StatusOr<Report> report = RunLoad(*options, progress, [&](Report so_far) {
    so_far.command = command_line;
    reports.Measured(std::move(so_far));
  });
  if (terminal) std::fprintf(stderr, "\r\x1b[K");
  // What was measured before a later point failed is told too.
  const absl::Status written = reports.Write();
  if (!report.ok()) return Mistake(report.status());
  if (!written.ok()) return Mistake(written);
  return report->wrong_replies() ? kExitMiss : kExitOk;
}

CLI::Validator AtLeast(double low, bool above) {
  return CLI::Validator(
      [low, above](const std::string& text) {
        double value = 0;
        if (!CLI::detail::lexical_cast(text, value)) return absl::StrCat(text, " is no number");
        if (!std::isfinite(value)) return absl::StrCat(text, " is not finite");
        if (above ? value > low : value >= low) return std::string();
        return absl::StrCat(text, " is not ", above ? "above " : "at least ", low);
      },
      "");
}

}  // namespace

std::function<int()> AddLoadFlags(CLI::App& app, std::string command_line) {
  auto flags = std::make_shared<LoadFlags>();
  LoadOptions& options = flags->options;
  app.add_option("--target", options.targets, "Server: host:port or unix:/path; several share the connections")
      ->delimiter(',')
      ->expected(1)
      ->take_all()
      ->type_name("ADDR")
      ->capture_default_str()
      ->group("Connection");
  app.add_option("--channels", options.channels, "Connections to each target")
      ->check(CLI::Range(1, 64))
      ->capture_default_str()
      ->group("Connection");
  app.add_option("--client-threads", options.client_threads, "Threads on which replies arrive")
      ->check(CLI::Range(1, 256))
      ->capture_default_str()
      ->group("Connection");
  app.add_option("--connect-timeout", options.connect_timeout_secs, "Seconds to wait for a server that is starting")
      ->check(AtLeast(0, true))
      ->capture_default_str()
      ->group("Connection");
  app.add_option("--timeout", options.timeout_secs, "Seconds a call may take")
      ->check(AtLeast(0, true))
      ->capture_default_str()
      ->group("Connection");

  app.add_option("--form", flags->forms,
                 "What replies hold, a list: highway, update, gate (Apply); kv, rows-native, rows-bf16 (Lookup)")
      ->type_name("LIST")
      ->capture_default_str()
      ->group("Calls");
  flags->given["tokens-per-call"] =
      app.add_option("--tokens-per-call", flags->tokens, "Tokens of a call: 1,16,128 or ranges FROM:TO:STEP")
          ->type_name("LIST")
          ->capture_default_str()
          ->group("Calls");
  flags->given["sequences-per-call"] =
      app.add_option("--sequences-per-call", options.sequences_per_call, "Sequences that share a call's tokens")
          ->check(CLI::Range(int64_t{1}, kMostTokens))
          ->capture_default_str()
          ->group("Calls");
  app.add_option("--dtype", flags->dtype, "Of the highway: f32, bf16")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str()
      ->group("Calls");
  app.add_option("--layers", flags->layers, "Engram layers of a call: 1,14; default all")
      ->type_name("LIST")
      ->group("Calls");
  app.add_option("--sessions", options.sessions,
                 "Sessions that the servers keep, each going on where it was; 0: stateless, with look-back")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str()
      ->group("Calls");
  app.add_flag("--prepare", options.prepare,
               "Prepare the tokens first, timed apart; what is measured is Apply by ticket")
      ->group("Calls");
  flags->given["ngram-pool"] =
      app.add_option("--ngram-pool", options.ngram_pool,
                     "Make sequences of this many phrases of 8 tokens, frequent and rare; 0: token by token")
          ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
          ->capture_default_str()
          ->group("Calls");
  app.add_option("--seed", options.seed, "Of tokens, highways and arrivals: the same seed sends the same calls")
      ->capture_default_str()
      ->group("Calls");

  app.add_option("--trace", options.trace,
                 "JSON lines of steps, made instead of calls of --tokens-per-call: at their own times, or as --rate or "
                 "--concurrency says")
      ->check(CLI::ExistingFile)
      ->type_name("FILE")
      ->group("Calls");
  flags->given["concurrency"] = app.add_option("--concurrency,--concurrency-range", flags->concurrency,
                                               "Closed loop: calls under way at a time: 1,4,16 or ranges FROM:TO:STEP")
                                    ->type_name("LIST")
                                    ->capture_default_str()
                                    ->group("When");
  app.add_option("--rate", options.rate, "Open loop: calls per second, whatever the server does")
      ->check(AtLeast(0, true))
      ->group("When");
  flags->given["arrivals"] = app.add_option("--arrivals", flags->arrivals, "With --rate: poisson, constant")
                                 ->check(CLI::IsMember({"poisson", "constant"}))
                                 ->capture_default_str()
                                 ->group("When");
  flags->given["max-outstanding"] = app.add_option("--max-outstanding", options.max_outstanding,
                                                   "Open loop: calls under way at most; reaching it is told")
                                        ->check(CLI::Range(int64_t{1}, kMostConcurrency))
                                        ->capture_default_str()
                                        ->group("When");
  app.add_option("--duration", options.duration_secs, "Seconds measured for each combination")
      ->check(AtLeast(0, true))
      ->capture_default_str()
      ->group("When");
  app.add_option("--warmup", options.warmup_secs, "Seconds of the same load before, not measured")
      ->check(AtLeast(0, false))
      ->capture_default_str()
      ->group("When");

  app.add_option("--baseline", flags->baseline,
                 "echo: alternate with calls of the same sizes to a server that computes nothing; none")
      ->check(CLI::IsMember({"none", "echo"}))
      ->capture_default_str()
      ->group("Compared with");
  flags->given["rounds"] = app.add_option("--rounds", options.rounds,
                                          "With --baseline: how often service and echo alternate in the duration")
                               ->check(CLI::Range(1, 1000))
                               ->capture_default_str()
                               ->group("Compared with");
  app.add_option("--echo-target", options.echo_target,
                 "With --baseline: an `engram-bench echo-server` that runs already, for targets on other machines")
      ->type_name("ADDR")
      ->group("Compared with");
  app.add_option("--verify-fraction", options.verify_fraction,
                 "Share of the replies, 0 to 1, that is recomputed from --model and compared; exit code 1 on a miss")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str()
      ->group("Compared with");
  app.add_option("--model", options.model, "The model's .gguf (or its first shard) that the server serves")
      ->type_name("PATH")
      ->group("Compared with");
  app.add_option("--metrics", options.metrics, "The server's --http-listen: its stages, CPU and memory are reported")
      ->type_name("HOST:PORT")
      ->group("Compared with");

  app.add_option("--json", options.json, "Write the report here, as JSON")->type_name("FILE")->group("Reports");
  app.add_option("--html", options.html, "Write the report here, as one page with plots")
      ->type_name("FILE")
      ->group("Reports");
  return [flags, command_line = std::move(command_line)] { return RunLoadCommand(*flags, command_line); };
}

}  // namespace engram::bench
