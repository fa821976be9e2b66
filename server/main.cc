#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/observe/log.h"
#include "server/options.h"
#include "server/server.h"

namespace {

// A setting, a model or an address that cannot be used.
constexpr int kExitUnusable = 2;
// The GPU's context is beyond repair: a new process may serve again.
constexpr int kExitBroken = 3;

int Unusable(const absl::Status& status) {
  std::fprintf(stderr, "engram-server: %.*s\n", static_cast<int>(status.message().size()), status.message().data());
  return kExitUnusable;
}

// What ends the service. The first of `signals`: while the server still loads it ends the process at once (nobody is
// served yet); after that it is waited for. A second one always ends the process at once.
class StopSignal {
 public:
  explicit StopSignal(const sigset_t& signals) : signals_(signals) {
    std::thread([this] { Watch(); }).detach();
  }

  void Served() { served_.store(true); }
  // Ends the wait as a signal would. Any thread.
  void Broken() { End(Reason::kBroken); }
  // True: a signal came first.
  bool Await() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](Reason* reason) { return *reason != Reason::kNone; }, &reason_));
    return reason_ == Reason::kSignal;
  }

 private:
  void Watch() {
    int signal = 0;
    sigwait(&signals_, &signal);
    if (!served_.load()) {
      engram::Log(engram::LogLevel::kInfo, "stopped while loading");
      std::_Exit(128 + signal);
    }
    End(Reason::kSignal);
    sigwait(&signals_, &signal);
    std::_Exit(1);
  }

  enum class Reason { kNone, kSignal, kBroken };

  void End(Reason reason) {
    absl::MutexLock lock(&mutex_);
    if (reason_ == Reason::kNone) reason_ = reason;
  }

  const sigset_t signals_;
  std::atomic<bool> served_{false};
  absl::Mutex mutex_;
  Reason reason_ ABSL_GUARDED_BY(mutex_) = Reason::kNone;
};

// Connections are file descriptors, and gRPC stops accepting for good when it meets the limit once: take all there are.
void RaiseOpenFilesLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// By default the C library gives every block of 128 KiB and up back to the system when it is freed, so gRPC's messages
// of megabytes fault in fresh pages for each call: some 780 faults for a call of 1 MB, about 4 with these thresholds,
// and two to four times the throughput. What is kept so is bounded by the messages under way at the busiest time. Few
// arenas, since each keeps what its own threads freed.
void KeepFreedMemory() {
#if defined(__GLIBC__)
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most there may be
  ::mallopt(M_TRIM_THRESHOLD, 256 << 20);
  ::mallopt(M_ARENA_MAX, 4);
#endif
}

// What the standard library throws where memory or threads run out is one line here too.
absl::StatusOr<std::unique_ptr<engram::Server>> Start(const engram::ServerOptions& options, StopSignal& stop) {
  try {
    return engram::Server::BuildAndStart(options, [&stop] { stop.Broken(); });
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("not enough memory for this model and --max-batch-tokens");
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(std::string("cannot start threads: ") + error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const engram::CommandLine line = engram::ParseCommandLine(argc, argv);
  if (line.exit) {
    std::fputs(line.text.c_str(), line.exit_code == 0 ? stdout : stderr);
    return line.exit_code;
  }
  // Blocked before any thread starts, so that only StopSignal's takes them. A reader that went away (a pipe on
  // stdout or stderr) must not end the server.
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTERM);
  sigaddset(&stop, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  // gRPC's own lines on stderr say nothing to an operator that ours do not; GRPC_VERBOSITY brings them back.
  ::setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);

  RaiseOpenFilesLimit();
  KeepFreedMemory();
  // Debian builds Abseil with it on, and gRPC takes such a mutex everywhere: some 5 % of a small call.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  static StopSignal stop_signal(stop);  // its thread may outlive main's frame

  if (line.options.check_config) {
    const absl::Status status = engram::Server::CheckConfig(line.options);
    if (!status.ok()) return Unusable(status);
    std::puts("configuration and model are good");
    return 0;
  }
  absl::StatusOr<std::unique_ptr<engram::Server>> server = Start(line.options, stop_signal);
  if (!server.ok()) return Unusable(server.status());
  stop_signal.Served();
  for (const std::string& address : (*server)->addresses()) std::printf("listening on %s\n", address.c_str());
  if (const std::string http = (*server)->http_address(); !http.empty()) {
    std::printf("metrics on http://%s/metrics\n", http.c_str());
  }
  if (const std::string shm = (*server)->shm_address(); !shm.empty()) std::printf("shared memory on %s\n", shm.c_str());
  std::puts("ready");
  std::fflush(stdout);

  if (!stop_signal.Await()) {
    (*server)->DrainNow();
    return kExitBroken;
  }
  (*server)->Drain();
  return 0;
}
