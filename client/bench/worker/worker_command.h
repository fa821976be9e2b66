// `engram-bench worker`: what using an engram server does to a decode worker's step.
#pragma once

#include "client/bench/command.h"

namespace engram::bench {

Command AddWorkerCommand(CLI::App& app);

}  // namespace engram::bench
