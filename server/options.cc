#include "server/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/cpu_kernels.h"
#include "server/options_cores.h"
#include "server/transport/listeners.h"

namespace engram {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

// The largest message gRPC can carry: its length is an int32, and the envelope comes on top.
constexpr int64_t kMostMessageBytes = (int64_t{1} << 31) - 1 - kEnvelopeBytes;

// A number of bytes, with or without a unit: 1048576, 1MiB.
CLI::Validator SizeInBytes() { return CLI::AsSizeValue(false).description(""); }

// "portable, avx2": what this machine runs.
std::string CpuIsas() {
  std::vector<std::string> names;
  for (const kernels::CpuTwin& twin : kernels::SupportedCpuTwins()) names.push_back(twin.instructions);
  return absl::StrJoin(names, ", ");
}

// A flag with its environment twin: --max-batch-tokens, ENGRAM_MAX_BATCH_TOKENS.
template <typename Value>
CLI::Option* Flag(CLI::App& app, const std::string& name, Value& value, const std::string& help,
                  const std::string& group) {
  std::string twin = "ENGRAM_";
  for (const char c : name.substr(2)) twin.push_back(c == '-' ? '_' : static_cast<char>(std::toupper(c)));
  return app.add_option(name, value, help)->envname(twin)->group(group)->capture_default_str();
}

void Declare(CLI::App& app, ServerOptions& o) {
  const std::string model = "Model and compute";
  Flag(app, "--model", o.model, "The model file: a .gguf, or shard 1 of a split", model)->type_name("PATH");
  app.add_option(
         "--residency", o.residency,
         "Tables in anonymous memory (ram, the cpu's default) or as pages of the file (mmap); in a GPU's memory "
         "(device, cuda's default) or in pinned host memory that it reads (host)")
      ->transform(CLI::CheckedTransformer(std::map<std::string, TableHome>{{"ram", TableHome::kRam},
                                                                           {"mmap", TableHome::kMmap},
                                                                           {"device", TableHome::kDevice},
                                                                           {"host", TableHome::kHost}},
                                          CLI::ignore_case)
                      .description(""))
      ->envname("ENGRAM_RESIDENCY")
      ->group(model)
      ->type_name("ram|mmap|device|host")
      ->default_str("as the backend likes it best");
  app.add_option("--backend", o.backend, "Where steps are computed; auto: on a GPU if it can serve, else on the CPU")
      ->transform(CLI::CheckedTransformer(
                      std::map<std::string, BackendKind>{
                          {"auto", BackendKind::kAuto}, {"cpu", BackendKind::kCpu}, {"cuda", BackendKind::kCuda}},
                      CLI::ignore_case)
                      .description(""))
      ->envname("ENGRAM_BACKEND")
      ->group(model)
      ->type_name("auto|cpu|cuda")
      ->default_str("auto");
  Flag(app, "--device", o.device, "The GPU, by CUDA's number", model)->check(CLI::Range(0, 1023))->type_name("N");
  Flag(app, "--cuda-module", o.cuda_module,
       "libengram_cuda.so; default: beside the executable, else where the loader looks", model)
      ->type_name("PATH");
  Flag(app, "--layers", o.layers, "Engram layers to serve, by layer_id, with commas; default: all of the model", model)
      ->type_name("IDS")
      ->delimiter(',')
      ->default_str("");
  Flag(app, "--cpu-isa", o.cpu_isa, "Instruction set of the cpu backend; all give the same bits", model)
      ->check(CLI::IsMember({"best", "portable", "avx2", "avx512", "avx512_bf16"}).description(""))
      ->type_name("best|portable|avx2|avx512|avx512_bf16");
  Flag(app, "--threads", o.threads, "Compute threads; default: the cores of the affinity and the cgroup's quota", model)
      ->check(CLI::Range(1, 1024))
      ->type_name("N");
  Flag(app, "--max-batch-tokens", o.max_batch_tokens, "Tokens computed at once; longer calls are cut", model)
      ->check(CLI::Range(int64_t{1}, int64_t{65536}))
      ->type_name("TOKENS");
  app.add_flag("--check-config", o.check_config, "Check every setting, open the model, and exit: 0 or 2")->group(model);

  const std::string net = "Listeners";
  Flag(app, "--listen", o.listen, "host:port (port 0: any free one) or unix:/path; repeatable, or several with commas",
       net)
      ->type_name("ADDR")
      ->delimiter(',');
  Flag(app, "--http-listen", o.http_listen, "Where GET /metrics answers; off: nowhere", net)->type_name("ADDR|off");
  app.add_flag("--insecure", o.insecure, "Allow plaintext on addresses beyond loopback")
      ->envname("ENGRAM_INSECURE")
      ->group(net);
  Flag(app, "--max-message-bytes", o.max_message_bytes, "Payload of one request or reply", net)
      ->transform(SizeInBytes())
      ->check(CLI::Range(int64_t{4096}, kMostMessageBytes))
      ->type_name("BYTES");

  Flag(app, "--max-connection-age-secs", o.max_connection_age_secs,
       "Close connections older than that, so that clients spread over new servers; 0: never", net)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 21))
      ->type_name("SECONDS");
  Flag(app, "--max-connection-age-grace-secs", o.max_connection_age_grace_secs,
       "What is under way on such a connection may take this long", net)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 21))
      ->type_name("SECONDS");
  const std::string shm = "Shared memory";
  Flag(app, "--shm-listen", o.shm_listen, "unix:/path where workers on this host fetch memory shared with them", shm)
      ->type_name("ADDR|off");
  Flag(app, "--shm-memory-bytes", o.shm_memory_bytes, "Of all of it", shm)
      ->transform(SizeInBytes())
      ->check(CLI::Range(kMiB, 1024 * kGiB))
      ->type_name("BYTES");

  const std::string queue = "Queue";
  Flag(app, "--max-queue-tokens", o.max_queue_tokens, "Tokens admitted and not yet answered", queue)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->type_name("TOKENS");
  Flag(app, "--max-queue-bytes", o.max_queue_bytes,
       "Payload bytes admitted and not yet answered; four times as many may be arriving", queue)
      ->transform(SizeInBytes())
      ->check(CLI::Range(kMiB, int64_t{1} << 42))
      ->type_name("BYTES");

  const std::string sessions = "Sessions";
  Flag(app, "--session-ttl-secs", o.session_ttl_secs, "An idle session is forgotten after it", sessions)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 31))
      ->type_name("SECONDS");
  Flag(app, "--session-memory-bytes", o.session_memory_bytes, "Of all sessions; least recently used go first", sessions)
      ->transform(SizeInBytes())
      ->check(CLI::Range(kMiB, 1024 * kGiB))
      ->type_name("BYTES");
  Flag(app, "--session-window", o.session_window, "Positions a session keeps; a deeper rewind needs look-back",
       sessions)
      ->check(CLI::Range(int64_t{kernels::kMaxNgram}, int64_t{1} << 30))
      ->type_name("POSITIONS");
  Flag(app, "--position-limit", o.position_limit, "No sequence is longer", sessions)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->type_name("POSITIONS");

  const std::string prepared = "Prepared results";
  Flag(app, "--prepare-memory-bytes", o.prepare_memory_bytes, "Of all prepared results; then Prepare is refused",
       prepared)
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(kMiB, 1024 * kGiB))
      ->type_name("BYTES");
  Flag(app, "--ticket-ttl-ms", o.ticket_ttl_ms, "A ticket is good this long at the most", prepared)
      ->check(CLI::Range(int64_t{1}, int64_t{86'400'000}))
      ->type_name("MILLISECONDS");

  const std::string life = "Life cycle";
  Flag(app, "--drain-delay-secs", o.drain_delay_secs, "After SIGTERM, serve on this long while clients move away", life)
      ->check(CLI::Range(int64_t{0}, int64_t{86400}))
      ->type_name("SECONDS");
  Flag(app, "--drain-timeout-secs", o.drain_timeout_secs, "Then give calls in flight this long", life)
      ->check(CLI::Range(int64_t{0}, int64_t{86400}))
      ->type_name("SECONDS");
  Flag(app, "--probe-interval-secs", o.probe_interval_secs,
       "Read known rows and compute a known step through the engine this often; 0: only at load", life)
      ->check(CLI::Range(int64_t{0}, int64_t{86400}))
      ->type_name("SECONDS");
}

// What no single flag's check can see. Empty: all is well.
std::string Mistake(const ServerOptions& o) {
  if (o.model.empty()) return "--model is missing: name a .gguf file, or shard 1 of a split";
  const bool on_host = o.residency == TableHome::kRam || o.residency == TableHome::kMmap;
  if (o.backend == BackendKind::kCuda && on_host) {
    return absl::StrCat("--residency ", TableHomeName(o.residency), ": --backend cuda takes device or host");
  }
  if (o.backend == BackendKind::kCpu && !on_host && o.residency != TableHome::kUnsaid) {
    return absl::StrCat("--residency ", TableHomeName(o.residency), ": --backend cpu takes ram or mmap");
  }
  if (kernels::FindCpuTwin(o.cpu_isa) == nullptr) {
    return absl::StrCat("--cpu-isa ", o.cpu_isa, ": this machine has ", CpuIsas());
  }
  for (const std::string& address : o.listen) {
    if (const absl::Status status = CheckAddress(address, o.insecure); !status.ok()) {
      return std::string(status.message());
    }
  }
  if (o.http_listen != "off" && !o.insecure) {
    if (const absl::Status status = CheckAddress(o.http_listen, false);
        !status.ok() || o.http_listen.rfind("unix:", 0) == 0) {
      return absl::StrCat("--http-listen ", o.http_listen,
                          ": expected off or a loopback host:port (or --insecure for any other)");
    }
  }
  if (o.shm_listen != "off") {
    const absl::Status status = CheckAddress(o.shm_listen, o.insecure);
    if (!status.ok() || o.shm_listen.rfind("unix:", 0) != 0) {
      return absl::StrCat(
          "--shm-listen ", o.shm_listen,
          ": expected off or unix:/path (descriptors travel over nothing else), at most 107 bytes of it");
    }
  }
  if (o.max_message_bytes > o.max_queue_bytes) {
    return absl::StrCat("--max-message-bytes ", o.max_message_bytes, " is more than --max-queue-bytes ",
                        o.max_queue_bytes, ": such a message would never be admitted");
  }
  return "";
}

}  // namespace

CommandLine ParseCommandLine(int argc, char** argv) {
  CommandLine line;
  line.options.threads = UsableCores();
  CLI::App app{
      "engram-server holds the engram tables and wkv weights of a model once, for many inference workers.\n"
      "A flag may also be given as an environment variable, named in brackets; the flag wins.\n",
      "engram-server"};
  app.footer(
      "\nExample:\n"
      "  engram-server --model v41-00001-of-00004.gguf --listen 127.0.0.1:8001 --listen unix:/run/engram.sock\n"
      "Prints one line per listener and then \"ready\" on stdout; logs go to stderr. SIGTERM drains and exits 0;\n"
      "a setting or a model that cannot be used is one line on stderr and exit 2.\n");
  app.set_version_flag("--version", absl::StrCat("engram-server ", ENGRAM_VERSION, ", cpu-isa ",
                                                 kernels::FindCpuTwin("best")->instructions, " of ", CpuIsas()));
  Declare(app, line.options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return {{}, true, 0, app.help()};
  } catch (const CLI::CallForVersion& version) {
    return {{}, true, 0, absl::StrCat(version.what(), "\n")};
  } catch (const CLI::ParseError& error) {
    return {{}, true, 2, absl::StrCat("engram-server: ", error.what(), " (--help lists all flags)\n")};
  }
  if (const std::string mistake = Mistake(line.options); !mistake.empty()) {
    return {{}, true, 2, absl::StrCat("engram-server: ", mistake, "\n")};
  }
  return line;
}

}  // namespace engram
