#include "client/bench/echo_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

extern char** environ;

namespace engram::bench {
namespace {

// Its first line: it says that it listens before anything else. Empty where it ended instead.
std::string FirstLine(int fd) {
  std::string line;
  char c = 0;
  while (::read(fd, &c, 1) == 1 && c != '\n') line.push_back(c);
  return line;
}

}  // namespace

std::string OwnProgram() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

absl::StatusOr<std::unique_ptr<EchoProcess>> EchoProcess::Start(const std::string& program, const std::string& like) {
  std::unique_ptr<EchoProcess> echo(new EchoProcess);
  std::string listen = "127.0.0.1:0";
  if (absl::StartsWith(like, "unix:")) {
    echo->folder_ = absl::StrCat(std::filesystem::temp_directory_path().string(), "/engram-bench-XXXXXX");
    if (::mkdtemp(echo->folder_.data()) == nullptr) {
      const std::string name = std::move(echo->folder_);
      echo->folder_.clear();
      return absl::UnavailableError(absl::StrCat("echo: cannot make the folder ", name, ": ", std::strerror(errno)));
    }
    listen = absl::StrCat("unix:", echo->folder_, "/echo");
  }
  int in[2], out[2];
  if (::pipe2(in, O_CLOEXEC) != 0) return absl::UnavailableError(absl::StrCat("echo: ", std::strerror(errno)));
  echo->stdin_ = in[1];
  if (::pipe2(out, O_CLOEXEC) != 0) {
    ::close(in[0]);
    return absl::UnavailableError(absl::StrCat("echo: ", std::strerror(errno)));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::string words[] = {program, "echo-server", "--listen", listen};
  char* argv[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
  const int error = ::posix_spawn(&echo->pid_, program.c_str(), &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(in[0]);
  ::close(out[1]);
  if (error != 0) echo->pid_ = -1;
  const std::string line = error == 0 ? FirstLine(out[0]) : "";
  ::close(out[0]);
  absl::string_view address = line;
  if (!absl::ConsumePrefix(&address, "listening on ")) {
    return absl::UnavailableError(absl::StrCat("echo: ", program, " echo-server did not start",
                                               error == 0 ? "" : absl::StrCat(": ", std::strerror(error))));
  }
  echo->address_ = std::string(address);
  return echo;
}

EchoProcess::~EchoProcess() {
  if (stdin_ >= 0) ::close(stdin_);
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);  // it keeps nothing that could be lost
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

}  // namespace engram::bench
