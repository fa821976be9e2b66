// The subcommands of engram-cli: each takes its flags as they were parsed, talks to the server, prints to stdout, and
// returns the exit code. Errors are one line on stderr, then the offenders the server listed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/engram_client.h"

namespace engram::client {

inline constexpr int kExitOk = 0;
inline constexpr int kExitMiss = 1;   // verify: a value outside its tolerance
inline constexpr int kExitError = 2;  // usage, connection, refusal

struct ConnectionFlags {
  std::vector<std::string> targets = {"127.0.0.1:8001"};
  double connect_timeout_secs = 5;
  double timeout_secs = 30;
  std::string hash_digest;
  std::string config_digest;
};

struct ModelFlags {
  bool json = false;
};

// The tokens of a command; tokens or a file of them are there.
struct TokenFlags {
  std::string tokens;
  std::string tokens_file;
  int64_t start_pos = 0;
  std::string mask;
  std::string lookback;
  std::string session;
  std::vector<std::string> layers;  // "1,14"; empty: all
};

// No highway is given with form kv.
struct ApplyFlags : TokenFlags {
  std::string form = "highway";
  std::string dtype = "f32";
  std::string highway_file;
  double highway_fill = 0;
  std::string out_file;
};

struct LookupFlags : TokenFlags {
  std::string form = "rows-native";
  std::string out_file;
};

struct VerifyFlags {
  std::string expected_json;
};

int RunModel(const ConnectionFlags& connection, const ModelFlags& flags);
int RunApply(const ConnectionFlags& connection, const ApplyFlags& flags);
int RunLookup(const ConnectionFlags& connection, const LookupFlags& flags);
int RunVerify(const ConnectionFlags& connection, const VerifyFlags& flags);

absl::StatusOr<std::unique_ptr<Client>> Connect(const ConnectionFlags& flags);

// The client's replicas when each has answered, or failed to, or a second is over: Connect() waits for the first alone.
std::vector<ReplicaStatus> ReplicasAsked(const Client& client);

// "engram-cli: excluded, other model: ..." on stderr for each replica that gets no calls for what it serves. Nothing is
// waited for or said of a single replica.
void PrintExcluded(const Client& client);

// "engram-cli: INVALID_ARGUMENT: TOKEN_OUT_OF_RANGE: ..." and a line per offender on stderr; returns kExitError.
int PrintError(const absl::Status& status);

// "engram-cli: ..." of what is wrong with the command line or a file it names; returns kExitError.
int PrintMistake(absl::string_view text);

// What a server sent, fit for a terminal: control characters become '?'.
std::string Printable(absl::string_view text);

// "1 token", "2 tokens".
std::string Count(int64_t count, absl::string_view thing);

// "30.04 GiB".
std::string ByteSize(int64_t bytes);

}  // namespace engram::client
