#include "server/options_cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace engram {
namespace {

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// ceil(quota / period); 0 where it is no quota.
int Cores(const std::string& quota, const std::string& period) {
  int64_t q = 0, p = 0;
  if (!absl::SimpleAtoi(quota, &q) || !absl::SimpleAtoi(period, &p) || q <= 0 || p <= 0) return 0;
  return static_cast<int>(std::min<int64_t>((q - 1) / p + 1, 1 << 20));
}

int Smaller(int a, int b) {
  if (a == 0 || b == 0) return std::max(a, b);
  return std::min(a, b);
}

// The paths "/a/b" of the hierarchies in /proc/self/cgroup: "0::PATH" in version 2, "N:cpu,cpuacct:PATH" in version 1.
struct Groups {
  std::string unified, cpu;
};

Groups ReadGroups(const std::string& proc_cgroup) {
  Groups groups;
  std::ifstream file(proc_cgroup);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    if (fields[1].empty()) groups.unified = fields[2];
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (std::count(controllers.begin(), controllers.end(), "cpu") > 0) groups.cpu = fields[2];
  }
  return groups;
}

// `read(folder)` for the group and every one above it, the root included: in a container the path may lie outside of
// what is mounted, and then the root is the container's own group.
template <typename Read>
int SmallestUpwards(const std::string& root, std::string path, Read read) {
  int cores = 0;
  while (!path.empty() && path != "/") {
    cores = Smaller(cores, read(root + path));
    path.resize(path.rfind('/'));
  }
  return Smaller(cores, read(root));
}

}  // namespace

int CoresOfQuota(const std::string& cgroup_root, const std::string& proc_cgroup) {
  const Groups groups = ReadGroups(proc_cgroup);
  const int unified = SmallestUpwards(cgroup_root, groups.unified, [](const std::string& folder) {
    const std::vector<std::string> fields = absl::StrSplit(FirstLine(folder + "/cpu.max"), ' ');
    return fields.size() == 2 ? Cores(fields[0], fields[1]) : 0;
  });
  const int legacy = SmallestUpwards(cgroup_root + "/cpu", groups.cpu, [](const std::string& folder) {
    return Cores(FirstLine(folder + "/cpu.cfs_quota_us"), FirstLine(folder + "/cpu.cfs_period_us"));
  });
  return Smaller(unified, legacy);
}

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int scheduled = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::max(1, Smaller(scheduled, CoresOfQuota("/sys/fs/cgroup", "/proc/self/cgroup")));
}

}  // namespace engram
