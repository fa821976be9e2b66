#include "server/options_cores.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace engram {
namespace {

// A control group file system of a test's own.
class UsableCoresTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "engram-cgroup-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  int Cores() { return CoresOfQuota(root_.string(), (root_ / "self").string()); }

  std::filesystem::path root_;
};

TEST_F(UsableCoresTest, NoControlGroupsAreNoQuota) {
  EXPECT_EQ(Cores(), 0);
  EXPECT_GE(UsableCores(), 1);
}

TEST_F(UsableCoresTest, Version2TakesTheSmallestOnTheWayUpAndRoundsUp) {
  Write("self", "0::/kubepods/pod1/container\n");
  Write("kubepods/pod1/container/cpu.max", "max 100000\n");
  EXPECT_EQ(Cores(), 0);
  Write("kubepods/pod1/cpu.max", "350000 100000\n");
  EXPECT_EQ(Cores(), 4);
  Write("kubepods/cpu.max", "6400000 100000\n");
  EXPECT_EQ(Cores(), 4);
  Write("kubepods/pod1/container/cpu.max", "50000 100000\n");
  EXPECT_EQ(Cores(), 1);
}

TEST_F(UsableCoresTest, InAContainersNamespaceTheRootIsItsOwnGroup) {
  Write("self", "0::/\n");
  Write("cpu.max", "200000 100000\n");
  EXPECT_EQ(Cores(), 2);
  Write("self", "0::/../../elsewhere\n");
  EXPECT_EQ(Cores(), 2);
}

TEST_F(UsableCoresTest, Version1) {
  Write("self", "12:pids:/a\n4:cpu,cpuacct:/docker/abc\n");
  Write("cpu/docker/abc/cpu.cfs_quota_us", "-1\n");
  Write("cpu/docker/abc/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Cores(), 0);
  Write("cpu/docker/abc/cpu.cfs_quota_us", "800000\n");
  EXPECT_EQ(Cores(), 8);
}

TEST_F(UsableCoresTest, WhatIsNoNumberIsNoQuota) {
  Write("self", "0::/g\nnonsense\n::\n0:\n");
  for (const char* text : {"", "x y", "0 0", "-5 100000", "100000", "9223372036854775807 1 1", "1 0"}) {
    Write("g/cpu.max", text);
    EXPECT_EQ(Cores(), 0) << text;
  }
}

}  // namespace
}  // namespace engram
