#include "tests/e2e/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

extern char** environ;

namespace engram::e2e {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Output goes to files: nothing of ours has to read along for the program to go on.
pid_t Spawn(const std::vector<std::string>& command, const std::string& out, const std::string& err) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  std::vector<char*> argv;
  for (const std::string& arg : command) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  pid_t pid = -1;
  if (posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid = -1;
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

// The exit code once it has ended, -1 while it runs.
int Ended(pid_t pid) {
  int status = 0;
  if (waitpid(pid, &status, WNOHANG) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int Await(pid_t pid, absl::Duration limit) {
  const absl::Time end = absl::Now() + limit;
  for (;;) {
    if (const int code = Ended(pid); code >= 0) return code;
    if (absl::Now() > end) break;
    absl::SleepFor(absl::Milliseconds(5));
  }
  kill(pid, SIGKILL);
  int status = 0;
  waitpid(pid, &status, 0);
  return 128 + SIGKILL;
}

}  // namespace

TempDir::TempDir() {
  std::string name = absl::StrCat(std::filesystem::temp_directory_path().string(), "/engram-test-XXXXXX");
  if (mkdtemp(name.data()) != nullptr) path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

Finished RunToEnd(const std::vector<std::string>& command, int timeout_seconds) {
  const TempDir dir;
  Finished finished;
  const pid_t pid = Spawn(command, dir.path() + "/out", dir.path() + "/err");
  if (pid < 0) {
    finished.err = absl::StrCat("cannot start ", command.front());
    return finished;
  }
  finished.exit_code = Await(pid, absl::Seconds(timeout_seconds));
  finished.out = ReadAll(dir.path() + "/out");
  finished.err = ReadAll(dir.path() + "/err");
  return finished;
}

// A table of 4 GiB on a machine busy with other builds was once read at 50 MB/s.
constexpr absl::Duration kReady = absl::Seconds(240);

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(const std::string& model,
                                                                    const std::vector<std::string>& args) {
  std::unique_ptr<ServerProcess> server(new ServerProcess);
  const std::string& dir = server->dir_.path();
  std::vector<std::string> command = {ENGRAM_SERVER, "--model",     model,           "--listen",   "unix:" + dir + "/s",
                                      "--listen",    "127.0.0.1:0", "--http-listen", "127.0.0.1:0"};
  if (std::find(args.begin(), args.end(), "--drain-delay-secs") == args.end()) {
    command.insert(command.end(), {"--drain-delay-secs", "0"});
  }
  command.insert(command.end(), args.begin(), args.end());
  server->pid_ = Spawn(command, dir + "/out", dir + "/err");
  if (server->pid_ < 0) return absl::NotFoundError(absl::StrCat("cannot start ", command.front()));
  const absl::Time end = absl::Now() + kReady;
  for (;;) {
    const std::string out = ReadAll(dir + "/out");
    if (absl::StrContains(out, "\nready\n")) {
      for (absl::string_view line : absl::StrSplit(out, '\n')) {
        if (absl::ConsumePrefix(&line, "listening on unix:")) {
          server->unix_address_ = absl::StrCat("unix:", line);
        } else if (absl::ConsumePrefix(&line, "listening on ")) {
          server->tcp_address_ = std::string(line);
        } else if (absl::ConsumePrefix(&line, "metrics on http://")) {
          absl::ConsumeSuffix(&line, "/metrics");
          server->metrics_address_ = std::string(line);
        }
      }
      return server;
    }
    if (const int code = Ended(server->pid_); code >= 0) {
      server->pid_ = -1;
      return absl::AbortedError(absl::StrCat("exit code ", code, ": ", ReadAll(dir + "/err")));
    }
    if (absl::Now() > end) return absl::DeadlineExceededError(absl::StrCat("not ready: ", ReadAll(dir + "/err")));
    absl::SleepFor(absl::Milliseconds(5));
  }
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) Stop(SIGKILL);
}

int ServerProcess::Stop(int signal) {
  kill(pid_, signal);
  const int code = Await(pid_, absl::Seconds(60));
  pid_ = -1;
  return code;
}

std::string ServerProcess::Log() const { return ReadAll(dir_.path() + "/err"); }

int64_t MemoryMebibytes(pid_t pid, const std::string& line) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  std::string word;
  while (status >> word && word != line) continue;
  int64_t kibibytes = 0;
  status >> kibibytes;
  return kibibytes / 1024;
}

}  // namespace engram::e2e
