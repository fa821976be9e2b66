// What the commands of engram-bench have in common.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace engram::bench {

inline constexpr int kExitOk = 0;
inline constexpr int kExitMiss = 1;   // a reply that is wrong
inline constexpr int kExitError = 2;  // usage, connection, a model that does not fit

// A command as its Add...Command(CLI::App& app) adds it to the program: `app` is the subcommand that was added, `run`
// does what its flags say once they are parsed, and returns the exit code.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

}  // namespace engram::bench
