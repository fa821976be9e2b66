// Correctness of the kernels and of cuBLASLt's use on a real device, against the CPU's reference.
//
// For a machine that has CUDA's toolkit and nothing else. A line for each check; exit 0 where all passed, 1 where one
// failed, 2 for a wrong argument, 3 where there is no device.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/checks.h"

namespace engram::gpu {
namespace {

constexpr char kUsage[] = R"(usage: gpu_test [--quick] [--list] [TEXT]

Compares the CUDA kernels with the CPU's reference on the first device; prints PASS, FAIL or SKIP for each check.

  --quick   only the small ones, for compute-sanitizer
  --list    names of the checks, nothing is run
  TEXT      only checks whose name holds it
)";

std::vector<Check> AllChecks() {
  std::vector<Check> all;
  for (const auto& group : {InstructionChecks(), RowChecks(), ProjectionChecks(), GemmChecks(), GateChecks()}) {
    all.insert(all.end(), group.begin(), group.end());
  }
  return all;
}

enum class Outcome { kPassed, kFailed, kSkipped, kBroken };

Outcome RunOne(const Device& device, const Check& check) {
  const auto began = std::chrono::steady_clock::now();
  try {
    check.run(device);
    device.Wait();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("PASS %s (%.1f s)\n", check.name.c_str(), took.count());
    return Outcome::kPassed;
  } catch (const Skipped& why) {
    std::printf("SKIP %s: %s\n", check.name.c_str(), why.what());
    return Outcome::kSkipped;
  } catch (const CudaFailure& failure) {
    std::printf("FAIL %s: %s\n", check.name.c_str(), failure.what());
    return device.module().sticky(failure.error) ? Outcome::kBroken : Outcome::kFailed;
  } catch (const std::exception& failure) {
    std::printf("FAIL %s: %s\n", check.name.c_str(), failure.what());
    return Outcome::kFailed;
  }
}

int RunAll(const Device& device, bool quick, const std::string& text) {
  std::printf("device: %s, sm_%d%d, %d multiprocessors\n", device.info().name, device.info().compute_major,
              device.info().compute_minor, device.multiprocessors());
  int passed = 0, failed = 0, skipped = 0;
  for (const Check& check : AllChecks()) {
    if ((quick && !check.quick) || check.name.find(text) == std::string::npos) continue;
    const Outcome outcome = RunOne(device, check);
    std::fflush(stdout);
    if (outcome == Outcome::kBroken) {
      std::printf("FAIL the device's context is broken: the checks behind this one were not run\n");
      return 1;
    }
    ++(outcome == Outcome::kPassed ? passed : outcome == Outcome::kSkipped ? skipped : failed);
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  if (passed + failed + skipped == 0) {
    std::fprintf(stderr, "gpu_test: no check's name holds '%s'\n", text.c_str());
    return 2;
  }
  return failed > 0 ? 1 : 0;
}

int Run(bool quick, const std::string& text) {
  std::unique_ptr<const Device> device;
  try {
    device = std::make_unique<const Device>();
  } catch (const CudaFailure& failure) {
    std::fprintf(stderr, "gpu_test: no device: %s\n", failure.what());
    return 3;
  }
  return RunAll(*device, quick, text);
}

int List() {
  for (const Check& check : AllChecks()) std::printf("%s%s\n", check.name.c_str(), check.quick ? " (quick)" : "");
  return 0;
}

}  // namespace
}  // namespace engram::gpu

int main(int argc, char** argv) {
  bool quick = false;
  std::string text;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--list") == 0) {
      return engram::gpu::List();
    } else if (argv[i][0] == '-' || !text.empty()) {
      std::fputs(engram::gpu::kUsage, std::strcmp(argv[i], "--help") == 0 ? stdout : stderr);
      return std::strcmp(argv[i], "--help") == 0 ? 0 : 2;
    } else {
      text = argv[i];
    }
  }
  return engram::gpu::Run(quick, text);
}
