// Which build notices which fault of a kernel (executor_faults.cc), and that none objects to the correct twin.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "tests/simt/executor.h"

namespace {

// What a build prints about it; null: it need not notice.
struct Fault {
  const char* name;
  const char* plain;
  const char* asan;
  const char* tsan;
};

constexpr char kWrong[] = "wrong result";
constexpr char kRace[] = "WARNING: ThreadSanitizer: data race";
constexpr char kOverflow[] = "ERROR: AddressSanitizer: heap-buffer-overflow";

constexpr Fault kFaults[] = {
    // name                      plain          asan           tsan
    {"missing_barrier", kWrong, kWrong, kRace},
    {"missing_second_barrier", kWrong, kWrong, kRace},
    {"wrong_mask", "which does not hold it", "which does not hold it", "which does not hold it"},
    {"exited_lane", "exited", "exited", "exited"},
    {"two_collectives", "lanes of one warp disagree", "lanes of one warp disagree", "lanes of one warp disagree"},
    {"deadlock", "deadlock in block", "deadlock in block", "deadlock in block"},
    {"past_the_last_row", nullptr, kOverflow, nullptr},
    {"past_shared_memory", nullptr, kOverflow, nullptr},
    {"unwritten_shared_memory", kWrong, kWrong, kWrong},
    {"only_a_shuffle_between", nullptr, nullptr, kRace},
    {"other_half_of_the_warp", nullptr, nullptr, kRace},
    {"two_blocks_one_address", nullptr, nullptr, kRace},
    {"no_fence", nullptr, nullptr, kRace},
    {"row_offset_of_32_bits", kWrong, kWrong, kWrong},
    {"missing_copy_wait", kWrong, kWrong, kWrong},
    {"waits_for_itself_alone", nullptr, nullptr, kRace},
    {"misaligned_copy", "not aligned to 16", "not aligned to 16", "not aligned to 16"},
};

struct Outcome {
  int status = -1;
  std::string output;
};

Outcome RunFault(const char* name, const char* variant) {
  const std::string command = std::string(ENGRAM_SIMT_FAULTS) + " " + name + " " + variant + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  Outcome outcome;
  char part[4096];
  while (const size_t got = fread(part, 1, sizeof part, pipe)) outcome.output.append(part, got);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.status = WEXITSTATUS(status);
  return outcome;
}

class Faults : public testing::TestWithParam<Fault> {};

TEST_P(Faults, AreNoticed) {
  const Fault& fault = GetParam();
  const std::string flavour = simt::Flavour();
  const char* report = flavour == "plain" ? fault.plain : flavour == "asan" ? fault.asan : fault.tsan;
  const Outcome faulty = RunFault(fault.name, "faulty");
  std::printf("%s: %s: exit %d\n", flavour.c_str(), fault.name, faulty.status);
  if (report != nullptr) {
    EXPECT_NE(faulty.status, 0);
    EXPECT_NE(faulty.output.find(report), std::string::npos) << report << " is missing in:\n" << faulty.output;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Faults, testing::ValuesIn(kFaults),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(FaultTable, NoBuildObjectsToTheCorrectTwins) {
  const Outcome correct = RunFault("all", "correct");
  EXPECT_EQ(correct.status, 0);
  std::string expected;
  for (const Fault& fault : kFaults) expected += std::string(fault.name) + "\n";
  EXPECT_EQ(correct.output, expected);
}

TEST(FaultTable, EachIsNoticedBySomeBuild) {
  for (const Fault& fault : kFaults) {
    EXPECT_TRUE(fault.plain != nullptr || fault.asan != nullptr || fault.tsan != nullptr) << fault.name;
  }
}

}  // namespace
