#include "server/observe/process_usage.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>

namespace engram {
namespace {

double SecondsOf(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

int64_t CountDescriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  int64_t entries = 0;
  while (::readdir(folder) != nullptr) ++entries;
  ::closedir(folder);
  return entries - 3;  // ".", ".." and the one that reads
}

// Field 22 of /proc/self/stat: clock ticks from the machine's start to the process's.
double StartTicks() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  // The second field is the program's name in parentheses and may hold anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  size_t at = name_end + 1;
  for (int field = 3; field <= 22; ++field) {
    at = line.find_first_not_of(' ', at);
    if (at == std::string::npos) return 0;
    if (field == 22) return std::strtod(line.c_str() + at, nullptr);
    at = line.find(' ', at);
  }
  return 0;
}

double StartSeconds() {
  std::ifstream file("/proc/stat");
  for (std::string word; file >> word;) {
    double boot = 0;
    if (word == "btime" && file >> boot) return boot + StartTicks() / static_cast<double>(::sysconf(_SC_CLK_TCK));
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

}  // namespace

ProcessUsage ReadProcessUsage() {
  ProcessUsage usage;
  rusage times{};
  if (::getrusage(RUSAGE_SELF, &times) == 0) usage.cpu_seconds = SecondsOf(times.ru_utime) + SecondsOf(times.ru_stime);
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  if (file >> total >> resident) usage.resident_bytes = resident * ::sysconf(_SC_PAGESIZE);
  usage.open_fds = CountDescriptors();
  static const double start = StartSeconds();
  usage.start_seconds = start;
  return usage;
}

}  // namespace engram
