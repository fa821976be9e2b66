// How many cores this process may keep busy: what the scheduler lets it run on, and what its control group's quota pays
// for. A container with a quota of 4 on a host of 128 cores would be throttled with 128 threads.
#pragma once

#include <string>

namespace engram {

// At least 1.
int UsableCores();

// The quota alone, rounded up; 0: none, or none that can be read. `cgroup_root` is /sys/fs/cgroup and
// `proc_cgroup` /proc/self/cgroup but in tests. Version 2 (cpu.max of the group and of every one above it) and version
// 1 (cpu.cfs_quota_us).
int CoresOfQuota(const std::string& cgroup_root, const std::string& proc_cgroup);

}  // namespace engram
