// Everything about a server that an operator can say, with its defaults.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/backend_factory.h"

namespace engram {

struct ServerOptions {
  std::string model;  // a .gguf, or shard 1 of a split
  std::vector<std::string> listen = {"127.0.0.1:8001"};
  std::string http_listen = "127.0.0.1:8002";  // "off": none
  bool insecure = false;
  std::string shm_listen = "off";  // or "unix:/path": shared memory for workers on this host
  int64_t shm_memory_bytes = int64_t{1} << 30;

  BackendKind backend = BackendKind::kAuto;
  TableHome residency = TableHome::kUnsaid;
  std::vector<int64_t> layers;  // by layer_id; empty: all of the model
  int device = 0;
  std::string cuda_module;       // "": beside the executable, or where the loader looks
  std::string cpu_isa = "best";  // or a CpuTwin's instructions
  int threads = 1;               // the default is UsableCores()
  int64_t max_batch_tokens = 1024;

  int64_t max_queue_tokens = 65536;
  int64_t max_queue_bytes = int64_t{1} << 30;
  int64_t max_message_bytes = int64_t{64} << 20;
  int64_t max_connection_age_secs = 3600;  // 0: never
  int64_t max_connection_age_grace_secs = 60;

  int64_t session_ttl_secs = 600;
  int64_t session_memory_bytes = int64_t{1} << 30;
  int64_t session_window = 8192;
  int64_t position_limit = 1 << 20;

  int64_t prepare_memory_bytes = int64_t{1} << 30;
  int64_t ticket_ttl_ms = 10000;

  int64_t drain_delay_secs = 5;
  int64_t drain_timeout_secs = 30;

  int64_t probe_interval_secs = 300;  // 0: only at load

  bool check_config = false;
};

// What the command line asks for.
struct CommandLine {
  ServerOptions options;
  bool exit = false;  // --help, --version, or a mistake: print `text` and exit with `exit_code`
  int exit_code = 0;
  std::string text;
};

// Flags, then environment, then defaults. A mistake is one line that names the flag, its value and what was expected.
CommandLine ParseCommandLine(int argc, char** argv);

}  // namespace engram
