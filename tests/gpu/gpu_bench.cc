// Measures the kernels on a real device, each beside what the device can do at most. Exit codes as gpu_test's.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

constexpr char kUsage[] = R"(usage: gpu_bench [--quick | --small]

Measures the first device's floors (memory, PCIe, cuBLASLt, launches), then each kernel at the released model's geometry,
and prints Markdown tables: times, and how near to the floor they come. Takes about a minute and some 8 GiB of the
device's memory, 2 GiB of pinned host memory. Let nothing else use the device.

  --quick   fewer lengths and smaller tables: seconds
  --small   a tiny layer, which shows that all of it works; its figures mean nothing
)";

constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;

int Measure(const Device& device, const Sizes& sizes) {
  const auto began = std::chrono::steady_clock::now();
  try {
    const Stopwatch stopwatch(device, sizes);
    Floors floors = MeasureFloors(device, sizes, stopwatch);
    const Workload workload(device, sizes);
    const auto side = static_cast<double>(sizes.square);
    floors.flops = 2 * side * side * side / SquareSeconds(device, stopwatch, workload.values(), sizes.square);
    ReportFloors(device, sizes, floors);
    const std::vector<Bar> bars = ReportStages(device, sizes, stopwatch, floors, workload);
    int met = 0;
    for (const Bar& bar : bars) met += bar.met ? 1 : 0;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("\n%d of %zu bars met; measured in %.0f s\n", met, bars.size(), took.count());
    return 0;
  } catch (const std::exception& failure) {
    std::fflush(stdout);
    std::fprintf(stderr, "gpu_bench: %s\n", failure.what());
    return 1;
  }
}

int Run(const Sizes& sizes) {
  std::unique_ptr<const Device> device;
  try {
    device = std::make_unique<const Device>();
  } catch (const CudaFailure& failure) {
    std::fprintf(stderr, "gpu_bench: no device: %s\n", failure.what());
    return 3;
  }
  return Measure(*device, sizes);
}

}  // namespace

Sizes ReleasedSizes() {
  return {.name = "the released layer",
          .columns = 24,
          .dim = 5120,
          .copies = 4,
          .tokens = {1, 4, 16, 64, 128, 256, 4096},
          .table_bytes = 4 * kGiB,
          .pinned_bytes = 2 * kGiB,
          .spread_bytes = 256 * kMiB,
          .stream_bytes = kGiB,
          .transfer_bytes = 256 * kMiB,
          .square = 8192,
          .least_launches = 8,
          .most_launches = 128,
          .seconds = 0.1};
}

Sizes QuickSizes() {
  Sizes sizes = ReleasedSizes();
  sizes.name = "the released layer, quick";
  sizes.tokens = {1, 16, 64, 256};
  sizes.table_bytes = kGiB;
  sizes.pinned_bytes = kGiB / 2;
  sizes.seconds = 0.02;
  return sizes;
}

Sizes SmallSizes() {
  return {.name = "a tiny layer, to show that all of it works",
          .columns = 1,
          .dim = 64,
          .copies = 1,
          .tokens = {1, 3, 128},
          .table_bytes = kMiB,
          .pinned_bytes = kMiB / 2,
          .spread_bytes = kMiB / 4,
          .stream_bytes = kMiB / 4,
          .transfer_bytes = kMiB / 4,
          .square = 64,
          .least_launches = 2,
          .most_launches = 3,
          .seconds = 0};
}

}  // namespace engram::gpu

int main(int argc, char** argv) {
  using namespace engram::gpu;
  Sizes sizes = ReleasedSizes();
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      sizes = QuickSizes();
    } else if (std::strcmp(argv[i], "--small") == 0) {
      sizes = SmallSizes();
    } else {
      const bool help = std::strcmp(argv[i], "--help") == 0;
      std::fputs(kUsage, help ? stdout : stderr);
      return help ? 0 : 2;
    }
  }
  return Run(sizes);
}
