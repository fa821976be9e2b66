// What is wrong with a command line, in one line.
#pragma once

#include <string>

#include "CLI/CLI.hpp"

namespace engram::client {

// "apply: there is no flag \"--bogus\" (apply --help lists the flags)", from what parsing `app` threw. CLI11 looks for
// what is required before it looks at what it did not understand, and would call a mistyped flag another one missing.
std::string ParseErrorText(const CLI::App& app, const CLI::ParseError& error);

// Seconds above 0, finite.
CLI::Validator AboveZero();

// A number that is finite as an f32.
CLI::Validator FiniteF32();

}  // namespace engram::client
