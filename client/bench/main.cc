// engram-bench: measures an engram server as its callers see it.

#include <malloc.h>

#include <cctype>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/synchronization/mutex.h"
#include "client/bench/command.h"
#include "client/bench/echo_server.h"
#include "client/bench/load_command.h"
#include "client/bench/make_trace.h"
#include "client/bench/worker/worker_command.h"

namespace engram::bench {
namespace {

// Messages of a megabyte are allocations of a megabyte. By default malloc takes each from the kernel and gives it back,
// and most of a call's time is faulting its pages in: about 780 faults a call, with these thresholds about 4. A worker
// that cares sets them too. The values are engram-server's own, so that the echo server has neither more nor less.
void KeepFreedMemory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  mallopt(M_ARENA_MAX, 4);
#endif
}

// Every flag can come from the environment too: --target is ENGRAM_TARGET, as for engram-cli; --form ENGRAM_BENCH_FORM,
// worker's --depth ENGRAM_BENCH_WORKER_DEPTH: what is set for one command means nothing to another.
void NameEnvironmentTwins(CLI::App* app, const std::string& prefix) {
  for (CLI::Option* option : app->get_options()) {
    if (option->get_lnames().empty()) continue;
    const std::string& flag = option->get_lnames().front();
    if (flag == "help" || flag == "version") continue;
    std::string name = (flag == "target" ? "ENGRAM_" : prefix) + flag;
    for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    option->envname(name);
  }
}

std::string CommandLine(int argc, char** argv) {
  std::string line = "engram-bench";
  for (int i = 1; i < argc; ++i) line += std::string(" ") + argv[i];
  return line;
}

int Main(int argc, char** argv) {
  KeepFreedMemory();
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);  // as engram-server
  CLI::App app(
      "Measures an engram server as its callers see it. Without a command it makes calls, in a closed loop (the next "
      "when the last has ended) or an open one (--rate), and reports throughput and latency of every combination of "
      "--form, --tokens-per-call and --concurrency. Every flag has an environment twin; the flag wins. Exit code 1: a "
      "reply was wrong; 2: nothing was measured, or not all of it.",
      "engram-bench");
  app.set_version_flag("--version", "engram-bench " ENGRAM_VERSION);
  app.require_subcommand(0, 1);
  const std::function<int()> load = AddLoadFlags(app, CommandLine(argc, argv));
  const std::vector<Command> commands = {AddWorkerCommand(app), AddEchoServerCommand(app), AddMakeTraceCommand(app)};
  app.footer(
      "Examples:\n"
      "  engram-bench --form highway --tokens-per-call 1,16,128 --concurrency-range 1,4,16\n"
      "  engram-bench --target unix:/run/engram.sock --prepare --tokens-per-call 16 --baseline echo\n"
      "  engram-bench --form rows-native --tokens-per-call 64 --rate 500 --metrics 127.0.0.1:8002 --html bench.html\n"
      "  engram-bench echo-server --listen 0.0.0.0:9001      for --echo-target of another machine; ends with its "
      "stdin\n"
      "docs/bench.md says what each figure means.");
  NameEnvironmentTwins(&app, "ENGRAM_BENCH_");
  for (const Command& command : commands) {
    // Only when it is the one given: CLI11 checks the twins of all that have any.
    command.app->preparse_callback([app = command.app](size_t) {
      std::string name = app->get_name();
      for (char& c : name) c = c == '-' ? '_' : c;
      NameEnvironmentTwins(app, "ENGRAM_BENCH_" + name + "_");
    });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    const std::vector<CLI::App*> chosen = app.get_subcommands();
    const std::string command = chosen.empty() ? "" : chosen.front()->get_name() + " ";
    std::fprintf(stderr, "engram-bench: %s (%s--help lists the flags)\n", error.what(), command.c_str());
    return kExitError;
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return load();
}

}  // namespace
}  // namespace engram::bench

int main(int argc, char** argv) { return engram::bench::Main(argc, argv); }
