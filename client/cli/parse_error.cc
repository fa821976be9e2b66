#include "client/cli/parse_error.h"

#include <cmath>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/commands.h"

namespace engram::client {
namespace {

// The first word that no option and no command took; empty where there is none.
std::string FirstUnknown(const CLI::App& app) {
  for (const std::string& word : app.remaining(true)) {
    if (word != "--") return word;
  }
  return "";
}

// `fault` gives the text for what is wrong with a number; what is no number is left to CLI11.
template <typename Fault>
CLI::Validator NumberCheck(Fault fault) {
  return CLI::Validator(
      [fault](const std::string& text) {
        double value = 0;
        const char* wrong = absl::SimpleAtod(text, &value) ? fault(value) : nullptr;
        return wrong == nullptr ? std::string() : absl::StrCat(text, " ", wrong);
      },
      "");
}

}  // namespace

std::string ParseErrorText(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const std::string unknown = Printable(FirstUnknown(app));
  const bool flag = unknown.size() > 1 && unknown.front() == '-';
  if (chosen.empty()) {
    if (flag) return absl::StrCat("there is no flag \"", unknown, "\" (--help lists the flags)");
    if (!unknown.empty()) return absl::StrCat("there is no command \"", unknown, "\" (--help lists the commands)");
    if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
      return "a command is missing (--help lists the commands)";
    }
    return absl::StrCat(Printable(error.what()), " (--help lists the flags)");
  }
  const std::string& command = chosen.front()->get_name();
  const std::string help = absl::StrCat(" (", command, " --help lists the flags)");
  if (flag) return absl::StrCat(command, ": there is no flag \"", unknown, "\"", help);
  if (!unknown.empty()) return absl::StrCat(command, ": the argument \"", unknown, "\" is not expected", help);
  return absl::StrCat(Printable(error.what()), help);
}

CLI::Validator AboveZero() {
  return NumberCheck([](double value) -> const char* {
    if (!(value > 0)) return "is not above 0";
    return std::isinf(value) ? "is not finite" : nullptr;
  });
}

CLI::Validator FiniteF32() {
  return NumberCheck([](double value) -> const char* {
    return std::isfinite(static_cast<float>(value)) ? nullptr : "is not finite in f32";
  });
}

}  // namespace engram::client
