// engram-model: looks at model files and makes them. Flags in, one call, text out.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/model/content_digest.h"
#include "server/model/inspect.h"
#include "server/model/progress_meter.h"
#include "server/model/synth.h"

namespace engram {
namespace {

constexpr int kExitBad = 2;

constexpr const char* kSynthExamples = R"(
The constants (multipliers, primes, offsets) are made as the released model's are; token map, rows and weights are seeded
random numbers of realistic scale. The same flags and seed give the same bytes, whatever --threads is.

Examples:
  engram-model synth --preset tiny --out tiny.gguf
      a model of 2.7 MB with all the shapes of the real one, for tests
  engram-model synth --preset v41 --rows-scale 0.1 --out v41-tenth.gguf
      the released geometry with a tenth of its rows: 6 GiB, larger than any cache
  engram-model synth --preset v41 --wkv-type bf16 --split 3 --out v41.gguf
      full size, 61 GiB, as v41-00001-of-00003.gguf and two more
)";

constexpr const char* kInspectExamples = R"(
Reads headers and the small tensors, never the tables, so it takes a second for a file of any size. Exits 2, with one line
that names file, key or tensor, where the file would not load.

Examples:
  engram-model inspect model.gguf
  engram-model inspect model-00001-of-00004.gguf --json | jq .config_digest
)";

constexpr const char* kDigestExamples = R"(
Reads all of the tables, with all threads. The digests are those that engram-server has for the model; docs/formats.md
defines them. With --write they are kept in PATH.digest, which tells a server that maps the files (--residency mmap) what
they hold, as long as their sizes and times are the same, and lets one that reads them notice that they rotted.

Examples:
  engram-model digest model.gguf
  engram-model digest model-00001-of-00004.gguf --write
  engram-model digest model.gguf --json | jq -r .content_digest
)";

// Every flag's twin in the environment: synth's --rows-scale is ENGRAM_MODEL_SYNTH_ROWS_SCALE. Named when the command
// is the one given: CLI11 checks the twins of all commands that have any.
void AddEnvironmentTwins(CLI::App& command) {
  command.preparse_callback([&command](size_t) {
    for (CLI::Option* option : command.get_options()) {
      if (option->get_lnames().empty() || option->get_lnames().front() == "help") continue;
      std::string name = absl::StrCat("ENGRAM_MODEL_", command.get_name(), "_", option->get_lnames().front());
      for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      option->envname(name);
    }
  });
}

int Fail(absl::string_view text) {
  std::fprintf(stderr, "engram-model: %s\n", std::string(text).c_str());
  return kExitBad;
}

int Fail(const absl::Status& status) { return Fail(status.message()); }

// What is wrong with a command line, in one line. CLI11 looks for what is required before it looks at what it did not
// understand, and would call a mistyped command or flag another one missing.
std::string ParseErrorText(const CLI::App& app, const CLI::ParseError& error) {
  std::string unknown;
  for (const std::string& word : app.remaining(true)) {
    if (unknown.empty() && word != "--") unknown = absl::Utf8SafeCHexEscape(word);
  }
  const bool flag = unknown.size() > 1 && unknown.front() == '-';
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const std::string command = chosen.empty() ? "" : chosen.front()->get_name();
  const std::string before = chosen.empty() ? "" : absl::StrCat(command, ": ");
  const std::string help =
      chosen.empty() ? " (--help lists the commands)" : absl::StrCat(" (", command, " --help lists the flags)");
  if (flag) return absl::StrCat(before, "there is no flag \"", unknown, "\"", help);
  if (!unknown.empty() && chosen.empty()) return absl::StrCat("there is no command \"", unknown, "\"", help);
  if (!unknown.empty()) return absl::StrCat(before, "the argument \"", unknown, "\" is not expected", help);
  if (chosen.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    return absl::StrCat("a command is missing", help);
  }
  return absl::StrCat(absl::Utf8SafeCHexEscape(error.what()), help);
}

struct InspectFlags {
  std::string path;
  bool json = false;
};

CLI::App* AddInspect(CLI::App& app, InspectFlags& flags) {
  CLI::App* command =
      app.add_subcommand("inspect", "Geometry, types, sizes, digests of a model file; checks every rule");
  command->add_option("PATH", flags.path, "A .gguf, or shard 1 of a split")->required();
  command->add_flag("--json", flags.json, "Print one JSON object, with all constants and extents");
  command->footer(kInspectExamples);
  AddEnvironmentTwins(*command);
  return command;
}

int RunInspect(const InspectFlags& flags) {
  const absl::StatusOr<Inspection> inspection = InspectModel(flags.path);
  if (!inspection.ok()) return Fail(inspection.status());
  std::puts((flags.json ? InspectionJson(*inspection) : InspectionText(*inspection)).c_str());
  return 0;
}

struct DigestFlags {
  std::string path;
  bool write = false, json = false;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
};

CLI::App* AddDigest(CLI::App& app, DigestFlags& flags) {
  CLI::App* command = app.add_subcommand("digest", "The three digests of a model, its tables' bytes included");
  command->add_option("PATH", flags.path, "A .gguf, or shard 1 of a split")->required();
  command->add_flag("--write", flags.write, "Keep them in PATH.digest, in place of what stands there");
  command->add_flag("--json", flags.json, "Print one JSON object");
  command->add_option("--threads", flags.threads, "Threads that read and digest")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->footer(kDigestExamples);
  AddEnvironmentTwins(*command);
  return command;
}

int RunDigest(const DigestFlags& flags) {
  const absl::StatusOr<Inspection> inspection = InspectModel(flags.path);
  if (!inspection.ok()) return Fail(inspection.status());
  absl::StatusOr<Digest> content;
  {
    ProgressMeter meter(absl::StrCat("reading ", flags.path));
    content = DigestTables(inspection->header, inspection->config_digest, flags.threads,
                           [&](int64_t done, int64_t total) { meter.Update(done, total); });
  }
  if (!content.ok()) return Fail(content.status());
  std::string sidecar;
  if (flags.write) {
    const absl::Status written = WriteSidecar(inspection->files, inspection->config_digest, *content);
    if (!written.ok()) return Fail(written);
    sidecar = SidecarPath(flags.path);
  }
  std::puts((flags.json ? DigestsJson(*inspection, *content, sidecar) : DigestsText(*inspection, *content)).c_str());
  return 0;
}

// The geometry flags stand apart from SynthOptions because a preset gives their defaults: what was given overrides it.
struct SynthFlags {
  std::string preset = "tiny";
  SynthOptions given;
  std::string wkv_type = "q2_k", qk_type = "f32";
};

CLI::App* AddSynth(CLI::App& app, SynthFlags& flags) {
  CLI::App* command = app.add_subcommand("synth", "Make a model file of any geometry with seeded contents");
  SynthOptions& o = flags.given;
  o.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  command->add_option("--preset", flags.preset, "Where the geometry comes from: tiny or v41; flags below override it")
      ->check(CLI::IsMember({"tiny", "v41"}))
      ->capture_default_str()
      ->group("Model");
  command
      ->add_option("--rows-scale", o.rows_scale, "Scales --engram-vocab-size, and so the tables, to the disk at hand")
      ->capture_default_str()
      ->group("Model");
  command->add_option("--seed", o.seed, "Seed of token map, rows and weights")->capture_default_str()->group("Model");

  const char* geometry = "Geometry (defaults: the preset's, tiny / v41)";
  command->add_option("--dim", o.dim, "Hidden size [64 / 5120]")->group(geometry);
  command->add_option("--hc", o.hc, "Highway copies, 1 to 8 [4 / 4]")->group(geometry);
  command->add_option("--layers", o.layers, "Layer ids, ascending [1,14 / 1,14]")->delimiter(',')->group(geometry);
  command->add_option("--max-ngram", o.max_ngram, "Longest n-gram, 2 to 8 [4 / 4]")->group(geometry);
  command->add_option("--heads", o.heads, "Hash heads per n-gram size [8 / 8]")->group(geometry);
  command->add_option("--vocab", o.vocab, "Tokens [512 / 129280]")->group(geometry);
  command->add_option("--compressed-vocab", o.compressed_vocab, "Compressed ids [400 / 99092]")->group(geometry);
  command->add_option("--dead-tokens", o.dead_tokens, "Tokens that map to -1 [0 / 0]")->group(geometry);
  command->add_option("--pad-id", o.pad_id, "Compressed pad id [2 / 2]")->group(geometry);
  command->add_option("--engram-vocab-size", o.engram_vocab_size, "Rows of a column, about [211 / 16000000]")
      ->group(geometry);
  command->add_option("--eps", o.eps, "RMS norm epsilon [1e-20 / 1e-20]")->group(geometry);

  command->add_option("--wkv-type", flags.wkv_type, "Type of wkv: q2_k, bf16, f32, f16, q8_0")
      ->check(CLI::IsMember({"q2_k", "bf16", "f32", "f16", "q8_0"}))
      ->capture_default_str()
      ->group("File");
  command->add_option("--qk-type", flags.qk_type, "Type of q and k: f32, bf16, f16")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->capture_default_str()
      ->group("File");
  command->add_option("--alignment", o.alignment, "Of tensors in the file, a power of two")
      ->capture_default_str()
      ->group("File");
  command->add_option("--split", o.split, "Number of shards, NAME-00001-of-0000N.gguf")
      ->capture_default_str()
      ->group("File");
  command->add_option("--out", o.out, "The file to write, NAME.gguf; required")->group("File");
  command->add_flag("--force", o.force, "Replace files that exist")->group("File");
  command->add_option("--threads", o.threads, "Threads that make rows")->capture_default_str()->group("File");
  command->footer(kSynthExamples);
  AddEnvironmentTwins(*command);
  return command;
}

GgufType TypeOf(const std::string& name) {
  if (name == "f32") return GgufType::kF32;
  if (name == "f16") return GgufType::kF16;
  if (name == "bf16") return GgufType::kBF16;
  return name == "q8_0" ? GgufType::kQ8_0 : GgufType::kQ2_K;
}

int RunSynth(const CLI::App& command, const SynthFlags& flags) {
  if (flags.given.out.empty()) return Fail("synth: --out is required (where to write the .gguf)");
  absl::StatusOr<SynthOptions> preset = SynthPreset(flags.preset);
  if (!preset.ok()) return Fail(preset.status());
  SynthOptions options = flags.given;
  const auto from_preset = [&](const char* flag, auto SynthOptions::*field) {
    if (command.count(flag) == 0) options.*field = *preset.*field;
  };
  from_preset("--dim", &SynthOptions::dim);
  from_preset("--hc", &SynthOptions::hc);
  from_preset("--layers", &SynthOptions::layers);
  from_preset("--max-ngram", &SynthOptions::max_ngram);
  from_preset("--heads", &SynthOptions::heads);
  from_preset("--vocab", &SynthOptions::vocab);
  from_preset("--compressed-vocab", &SynthOptions::compressed_vocab);
  from_preset("--dead-tokens", &SynthOptions::dead_tokens);
  from_preset("--pad-id", &SynthOptions::pad_id);
  from_preset("--engram-vocab-size", &SynthOptions::engram_vocab_size);
  from_preset("--eps", &SynthOptions::eps);
  options.wkv_type = TypeOf(flags.wkv_type);
  options.qk_type = TypeOf(flags.qk_type);

  absl::StatusOr<std::vector<std::string>> paths;
  {
    ProgressMeter meter(absl::StrCat("writing ", options.out));
    options.progress = [&](int64_t done, int64_t total) { meter.Update(done, total); };
    paths = WriteSynthModel(options);
  }
  if (!paths.ok()) return Fail(paths.status());
  for (const std::string& path : *paths) std::puts(path.c_str());
  return 0;
}

int Main(int argc, char** argv) {
  CLI::App app("Looks at engram model files and makes them.", "engram-model");
  app.require_subcommand(1);
  app.set_version_flag("--version", "engram-model " ENGRAM_VERSION);
  app.footer(
      "`engram-model COMMAND --help` explains a command. Every flag has an environment twin, which stands with it; "
      "the\n"
      "flag wins.");
  InspectFlags inspect_flags;
  DigestFlags digest_flags;
  SynthFlags synth_flags;
  const CLI::App* inspect = AddInspect(app, inspect_flags);
  const CLI::App* digest = AddDigest(app, digest_flags);
  const CLI::App* synth = AddSynth(app, synth_flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // CLI11's way to say "help" and "bad flag"
    return error.get_exit_code() == 0 ? app.exit(error) : Fail(ParseErrorText(app, error));
  }
  if (inspect->parsed()) return RunInspect(inspect_flags);
  return digest->parsed() ? RunDigest(digest_flags) : RunSynth(*synth, synth_flags);
}

}  // namespace
}  // namespace engram

int main(int argc, char** argv) { return engram::Main(argc, argv); }
