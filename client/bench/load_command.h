// The load generator's flags: engram-bench without a command.
#pragma once

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace engram::bench {

// Adds them to the program; what is returned does what they say once they are parsed, and returns the exit code.
// `command_line` stands in the reports.
std::function<int()> AddLoadFlags(CLI::App& app, std::string command_line);

}  // namespace engram::bench
