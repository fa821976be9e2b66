// engram-cli: talks to an engram server from a terminal.

#include <cctype>
#include <string>

#include "CLI/CLI.hpp"
#include "client/cli/commands.h"
#include "client/cli/parse_error.h"

namespace engram::client {
namespace {

// Every flag can come from the environment too: --connect-timeout is ENGRAM_CONNECT_TIMEOUT, apply's --start-pos
// ENGRAM_CLI_APPLY_START_POS: what is set for one command means nothing to another.
void NameEnvironmentTwins(CLI::App* app, const std::string& prefix) {
  for (CLI::Option* option : app->get_options()) {
    if (option->get_lnames().empty()) continue;
    const std::string& flag = option->get_lnames().front();
    if (flag == "help" || flag == "version") continue;
    std::string name = prefix + flag;
    for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    option->envname(name);
  }
}

void AddConnection(CLI::App* app, ConnectionFlags* flags) {
  app->add_option("--target", flags->targets,
                  "Server: host:port or unix:/path; several, or a name with several addresses, are replicas")
      ->delimiter(',')
      ->expected(1)
      ->take_all()
      ->type_name("ADDR")
      ->capture_default_str()
      ->group("Connection");
  app->add_option("--connect-timeout", flags->connect_timeout_secs, "Seconds to wait for a server that is starting")
      ->capture_default_str()
      ->check(AboveZero())
      ->group("Connection");
  app->add_option("--timeout", flags->timeout_secs, "Seconds a call may take")
      ->capture_default_str()
      ->check(AboveZero())
      ->group("Connection");
  app->add_option("--hash-digest", flags->hash_digest, "Refuse a server whose hash digest is not these 64 hex digits")
      ->group("Connection");
  app->add_option("--config-digest", flags->config_digest,
                  "Refuse a server whose config digest is not these 64 hex digits; else the first that answers decides")
      ->group("Connection");
}

CLI::App* AddModel(CLI::App* app, ModelFlags* flags) {
  CLI::App* command = app->add_subcommand("model", "What is served: geometry, layers, digests, limits");
  command->add_flag("--json", flags->json, "Print JSON");
  command->footer("Example:\n  engram-cli model --target unix:/run/engram.sock");
  return command;
}

void AddTokens(CLI::App* command, TokenFlags* flags) {
  CLI::Option* tokens =
      command->add_option("--tokens", flags->tokens, "Token ids: 5,6,7; this or a file is required")->group("Tokens");
  command->add_option("--tokens-file", flags->tokens_file, "File of token ids, separated by commas or white space")
      ->check(CLI::ExistingFile)
      ->excludes(tokens)
      ->group("Tokens");
  command->add_option("--start-pos", flags->start_pos, "Position of the first token")
      ->capture_default_str()
      ->group("Sequence");
  command->add_option("--mask", flags->mask, "Per token 1 (live) or 0 (masked): 1,0,1; default all live")
      ->group("Sequence");
  command
      ->add_option("--lookback", flags->lookback,
                   "The N-1 ids before --start-pos, newest first, -1 = masked or before the start: 7,6,-1")
      ->group("Sequence");
  command
      ->add_option("--session", flags->session,
                   "Let the server keep the history under this name; with several targets each run may reach another "
                   "replica, which does not know it")
      ->group("Sequence");
  command->add_option("--layer", flags->layers, "Layer ids: 1,14; repeatable; default all layers")
      ->type_name("INTS")
      ->expected(1)
      ->take_all()
      ->group("What is computed");
}

CLI::App* AddApply(CLI::App* app, ApplyFlags* flags) {
  CLI::App* command = app->add_subcommand("apply", "One call: token ids in; the updated highway, its parts or kv out");
  AddTokens(command, flags);
  command->add_option("--form", flags->form, "What the reply holds: highway, kv, update, gate, auto")
      ->capture_default_str()
      ->check(CLI::IsMember({"highway", "kv", "update", "gate", "auto"}))
      ->group("What is computed");
  command->add_option("--dtype", flags->dtype, "Of the highway: f32, bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->group("What is computed");
  CLI::Option* highway =
      command
          ->add_option("--highway", flags->highway_file,
                       "Raw little-endian [tokens, hc, dim] in --dtype: one for all layers, or one per layer")
          ->check(CLI::ExistingFile)
          ->group("Tensors");
  command->add_option("--highway-fill", flags->highway_fill, "Without --highway: the value it is filled with")
      ->capture_default_str()
      ->check(FiniteF32())
      ->excludes(highway)
      ->group("Tensors");
  command->add_option("--out", flags->out_file, "Write the reply's tensors here, raw, layer after layer")
      ->group("Tensors");
  command->footer(
      "Examples:\n"
      "  engram-cli apply --tokens 5,6,7 --highway-fill 0.5\n"
      "  engram-cli apply --tokens 8 --start-pos 3 --lookback 7,6,5 --form kv --layer 1 --out kv.bin");
  return command;
}

CLI::App* AddLookup(CLI::App* app, LookupFlags* flags) {
  CLI::App* command = app->add_subcommand("lookup", "One call: token ids in, table rows or kv out; no highway");
  AddTokens(command, flags);
  command->add_option("--form", flags->form, "What the reply holds: rows-native, rows-bf16, kv")
      ->capture_default_str()
      ->check(CLI::IsMember({"rows-native", "rows-bf16", "kv"}))
      ->group("What is computed");
  command->add_option("--out", flags->out_file, "Write the reply's tensors here, raw, layer after layer")
      ->group("Tensors");
  command->footer("Example:\n  engram-cli lookup --tokens 5,6,7 --form rows-bf16 --layer 1 --out rows.bin");
  return command;
}

CLI::App* AddVerify(CLI::App* app, VerifyFlags* flags) {
  CLI::App* command = app->add_subcommand(
      "verify", "Replay a fixture through the server and compare every value; exit 1 on a miss, 2 on an error");
  command->add_option("FIXTURE", flags->expected_json, "expected.json; expected.bin lies beside it")
      ->required()
      ->check(CLI::ExistingFile);
  command->footer("Example:\n  engram-cli verify tests/data/tiny/expected.json --target unix:/run/engram.sock");
  return command;
}

// What no flag's own check can see. Empty: all is well.
std::string TokensMistake(const CLI::App& command) {
  if (command.count("--tokens") + command.count("--tokens-file") > 0) return "";
  return command.get_name() + ": --tokens or --tokens-file is required (" + command.get_name() +
         " --help lists the flags)";
}

std::string ApplyMistake(const CLI::App& command, const ApplyFlags& flags) {
  if (std::string mistake = TokensMistake(command); !mistake.empty()) return mistake;
  if (flags.form != "kv") return "";
  for (const char* flag : {"--highway", "--highway-fill", "--dtype"}) {
    if (command.count(flag) > 0) {
      return std::string("apply: ") + flag + " is given, but --form kv sends no highway (apply --help lists the flags)";
    }
  }
  return "";
}

int Main(int argc, char** argv) {
  CLI::App app("Talks to an engram server. Every flag has an environment twin, which stands with it; the flag wins.",
               "engram-cli");
  app.set_version_flag("--version", "engram-cli " ENGRAM_VERSION);
  ConnectionFlags connection;
  ModelFlags model;
  ApplyFlags apply;
  LookupFlags lookup;
  VerifyFlags verify;
  AddConnection(&app, &connection);
  CLI::App* model_command = AddModel(&app, &model);
  CLI::App* apply_command = AddApply(&app, &apply);
  CLI::App* lookup_command = AddLookup(&app, &lookup);
  CLI::App* verify_command = AddVerify(&app, &verify);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  engram-cli model\n"
      "  engram-cli apply --tokens 5,6,7 --highway-fill 0.5\n"
      "  engram-cli lookup --tokens 5,6,7\n"
      "  engram-cli verify tests/data/tiny/expected.json\n"
      "engram-cli COMMAND --help says more.");
  NameEnvironmentTwins(&app, "ENGRAM_");
  for (CLI::App* command : {model_command, apply_command, lookup_command, verify_command}) {
    command->fallthrough();  // --target may stand behind the command too
    // Only when it is the one given: CLI11 checks the twins of all that have any.
    command->preparse_callback(
        [command](size_t) { NameEnvironmentTwins(command, "ENGRAM_CLI_" + command->get_name() + "_"); });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    return PrintMistake(ParseErrorText(app, error));
  }
  if (model_command->parsed()) return RunModel(connection, model);
  if (apply_command->parsed()) {
    const std::string mistake = ApplyMistake(*apply_command, apply);
    return mistake.empty() ? RunApply(connection, apply) : PrintMistake(mistake);
  }
  if (lookup_command->parsed()) {
    const std::string mistake = TokensMistake(*lookup_command);
    return mistake.empty() ? RunLookup(connection, lookup) : PrintMistake(mistake);
  }
  return RunVerify(connection, verify);
}

}  // namespace
}  // namespace engram::client

int main(int argc, char** argv) { return engram::client::Main(argc, argv); }
