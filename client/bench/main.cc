// engram-bench: measures an engram server as its callers see it.

#include <malloc.h>

#include <vector>

#include "CLI/CLI.hpp"
#include "client/bench/command.h"
#include "client/bench/worker/worker_command.h"

namespace engram::bench {
namespace {

int Main(int argc, char** argv) {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  CLI::App app("Measures an engram server as its callers see it.", "engram-bench");
  app.set_version_flag("--version", "engram-bench " ENGRAM_VERSION);
  app.require_subcommand(0, 1);
  const std::vector<Command> commands = {AddWorkerCommand(app)};
  CLI11_PARSE(app, argc, argv);
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return kExitOk;
}

}  // namespace
}  // namespace engram::bench

int main(int argc, char** argv) { return engram::bench::Main(argc, argv); }
