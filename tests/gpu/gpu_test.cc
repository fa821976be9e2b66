// Correctness of the kernels and of cuBLASLt's use on a real device, against the CPU's reference.
//
// For a machine that has CUDA's toolkit and nothing else. A line for each check; exit 0 where all passed, 1 where one
// failed, 2 for a wrong argument, 3 where there is no device.
#include <cstdio>
#include <cstring>
#include <string>

#include "tests/gpu/checks.h"

namespace engram::gpu {
namespace {

constexpr char kUsage[] = R"(usage: gpu_test [--quick] [--list] [TEXT]

Compares the CUDA kernels with the CPU's reference on the first device; prints PASS, FAIL or SKIP for each check.

  --quick   only the small ones, for compute-sanitizer
  --list    names of the checks, nothing is run
  TEXT      only checks whose name holds it
)";

int Run(bool quick, const std::string& text) {
  int passed = 0, failed = 0, skipped = 0;
  try {
    const Device device;
    std::printf("device: %s, sm_%d%d, %d multiprocessors\n", device.info().name, device.info().compute_major,
                device.info().compute_minor, device.multiprocessors());
    for (const auto& group : {InstructionChecks(), RowChecks(), ProjectionChecks(), GemmChecks(), GateChecks()}) {
      for (const Check& check : group) {
        if ((quick && !check.quick) || check.name.find(text) == std::string::npos) continue;
        try {
          check.run(device);
          device.Wait();
          std::printf("PASS %s\n", check.name.c_str());
          ++passed;
        } catch (const Skipped& why) {
          std::printf("SKIP %s: %s\n", check.name.c_str(), why.what());
          ++skipped;
        } catch (const CudaFailure& failure) {
          std::printf("FAIL %s: %s\n", check.name.c_str(), failure.what());
          ++failed;
          if (device.module().sticky(failure.error)) {
            std::printf("FAIL the device's context is broken: the checks behind this one were not run\n");
            return 1;
          }
        } catch (const std::exception& failure) {
          std::printf("FAIL %s: %s\n", check.name.c_str(), failure.what());
          ++failed;
        }
        std::fflush(stdout);
      }
    }
  } catch (const CudaFailure& failure) {
    std::fprintf(stderr, "gpu_test: %s\n", failure.what());
    return 3;
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  if (passed + failed + skipped == 0) std::fprintf(stderr, "gpu_test: no check is named like '%s'\n", text.c_str());
  return failed > 0 || passed == 0 ? 1 : 0;
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
      using namespace engram::gpu;
      for (const auto& group : {InstructionChecks(), RowChecks(), ProjectionChecks(), GemmChecks(), GateChecks()}) {
        for (const Check& check : group) std::printf("%s%s\n", check.name.c_str(), check.quick ? " (quick)" : "");
      }
      return 0;
    } else if (argv[i][0] == '-' || !text.empty()) {
      std::fputs(engram::gpu::kUsage, std::strcmp(argv[i], "--help") == 0 ? stdout : stderr);
      return std::strcmp(argv[i], "--help") == 0 ? 0 : 2;
    } else {
      text = argv[i];
    }
  }
  return engram::gpu::Run(quick, text);
}
