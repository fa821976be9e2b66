#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

using kernels::HighwayType;
using kernels::cuda::GemmClass;
using kernels::cuda::kProjectTokens;
using kernels::cuda::TileSource;

__attribute__((format(printf, 1, 2))) std::string Text(const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof(text), format, list);
  va_end(list);
  return text;
}

std::string Micros(double seconds) { return Text("%.2f", seconds * 1e6); }
std::string Ratio(double floor, double seconds) { return Text("%.2f", floor / seconds); }

void Row(const std::vector<std::string>& cells) {
  for (const std::string& cell : cells) std::printf("| %s ", cell.c_str());
  std::printf("|\n");
  std::fflush(stdout);
}

void Head(const char* title, const std::vector<std::string>& cells) {
  std::fprintf(stderr, "gpu_bench: %s\n", title);
  std::printf("\n### %s\n\n", title);
  Row(cells);
  Row(std::vector<std::string>(cells.size(), "---"));
}

// Measures stage after stage; what bars are about is kept.
class Report {
 public:
  Report(const Device& device, const Sizes& sizes, const Stopwatch& stopwatch, const Floors& floors,
         const Workload& workload)
      : device_(device), sizes_(sizes), stopwatch_(stopwatch), floors_(floors), workload_(workload), work_(sizes) {}

  void Rows() {
    Head("Rows: gather and decode", {"T", "rows", "device: floor us", "us", "of the floor", "M rows/s",
                                     "pinned host: floor us", "us", "of the floor", "M rows/s"});
    for (const int64_t tokens : sizes_.tokens) {
      const auto rows = static_cast<double>(tokens * sizes_.columns);
      std::vector<std::string> cells = {Text("%lld", static_cast<long long>(tokens)), Text("%.0f", rows)};
      for (const Place place : {Place::kDevice, Place::kPinned}) {
        const double floor = AtLeast(RowsFloor(tokens, place));
        const double seconds =
            stopwatch_.InGraph(RowBytes(tokens), [&](int64_t i) { workload_.Rows(i, tokens, place); });
        cells.insert(cells.end(),
                     {Micros(floor), Micros(seconds), Ratio(floor, seconds), Text("%.1f", rows / seconds / 1e6)});
        if (place == Place::kDevice && rows >= 50'000) {
          AddRatio(Text("gather + decode of %.0f rows, of the copy bandwidth", rows), 0.6,
                   RowsFloor(tokens, place) / seconds);
        }
      }
      Row(cells);
    }
  }

  void Projection() {
    Head("Projection", {"T", "Q2_K: floor us", "kernel us", "of the floor", "bf16: floor us", "kernel us",
                        "of the floor", "cuBLASLt medium us", "of the floor", "cuBLASLt long us", "of the floor"});
    for (const int64_t tokens : sizes_.tokens) {
      std::vector<std::string> cells = {Text("%lld", static_cast<long long>(tokens))};
      for (const TileSource source : {TileSource::kQ2K, TileSource::kBf16}) {
        const bool q2k = source == TileSource::kQ2K;
        const double floor = AtLeast(ProjectFloor(tokens, q2k));
        cells.push_back(Micros(floor));
        // Beyond it is passes of as many tokens, which is told for comparison, up to some.
        if (tokens > 4 * kProjectTokens) {
          cells.insert(cells.end(), {"", ""});
          continue;
        }
        const double seconds = stopwatch_.InGraph(static_cast<int64_t>(work_.ProjectBytes(tokens, q2k)),
                                                  [&](int64_t i) { workload_.ProjectByKernel(i, tokens, source); });
        cells.insert(cells.end(), {Micros(seconds), Ratio(floor, seconds)});
        if (q2k && tokens == 1) {
          AddRatio("projection of T = 1 from Q2_K, of reading it", 0.45, ProjectFloor(1, true) / seconds);
        }
        if (q2k && tokens == 16) AddTime("projection of T = 16 from Q2_K", 30e-6, seconds);
        if (q2k && tokens == 64) AddTime("projection of T = 64 from Q2_K", 55e-6, seconds);
      }
      const double floor = AtLeast(ProjectFloor(tokens, false));
      for (const GemmClass shape : {GemmClass::kMedium, GemmClass::kLong}) {
        const double seconds = stopwatch_.InGraph(static_cast<int64_t>(work_.ProjectBytes(tokens, false)),
                                                  [&](int64_t i) { workload_.ProjectByGemm(i, tokens, shape); });
        cells.insert(cells.end(), {Micros(seconds), Ratio(floor, seconds)});
        const bool medium = shape == GemmClass::kMedium;
        const auto t = static_cast<long long>(tokens);
        if (medium && tokens >= 64 && tokens <= 156) {
          AddRatio(Text("cuBLASLt, T = %lld, of max(memory, compute)", t), 0.8, ProjectFloor(tokens, false) / seconds);
        }
        if (tokens >= 256 && medium == (tokens <= 512)) {
          AddRatio(Text("cuBLASLt, T = %lld, of its own large square's rate", t), 0.85,
                   work_.ProjectFlops(tokens) / floors_.flops / seconds);
        }
      }
      Row(cells);
    }
    std::printf("\n%s\n", workload_.GemmText().c_str());
  }

  void Gates() {
    Head("Gate and update in place",
         {"T", "f32: floor us", "us", "of the floor", "bf16: floor us", "us", "of the floor"});
    for (const int64_t tokens : sizes_.tokens) {
      std::vector<std::string> cells = {Text("%lld", static_cast<long long>(tokens))};
      for (const HighwayType type : {HighwayType::kF32, HighwayType::kBf16}) {
        const double floor = AtLeast(GateFloor(tokens, type));
        const double seconds = stopwatch_.InGraph(static_cast<int64_t>(work_.GateBytes(tokens, type)),
                                                  [&](int64_t i) { workload_.Gate(i, tokens, type); });
        cells.insert(cells.end(), {Micros(floor), Micros(seconds), Ratio(floor, seconds)});
        if (type == HighwayType::kF32 && tokens >= 256) {
          AddRatio(Text("gate of T = %lld, f32, of the copy bandwidth", static_cast<long long>(tokens)), 0.8,
                   GateFloor(tokens, type) / seconds);
        }
      }
      Row(cells);
    }
  }

  void Steps() {
    Head("A layer's step: rows, projection, gate (f32)",
         {"T", "weights", "tables", "floor us", "in a graph us", "of the floor", "launched one by one us"});
    for (const int64_t tokens : sizes_.tokens) {
      for (const TileSource source : {TileSource::kQ2K, TileSource::kBf16}) {
        const bool kernel = tokens <= kProjectTokens;
        if (!kernel && source == TileSource::kQ2K) continue;
        for (const Place place : {Place::kDevice, Place::kPinned}) {
          Step(tokens, kernel ? source == TileSource::kQ2K ? "Q2_K" : "bf16" : "cuBLASLt", source, place);
        }
      }
    }
  }

  std::vector<Bar> bars;

 private:
  void Step(int64_t tokens, const char* weights, TileSource source, Place place) const {
    const HighwayType type = HighwayType::kF32;
    const bool q2k = source == TileSource::kQ2K;
    const double floor =
        AtLeast(RowsFloor(tokens, place)) + AtLeast(ProjectFloor(tokens, q2k)) + AtLeast(GateFloor(tokens, type));
    const auto bytes = RowBytes(tokens) + static_cast<int64_t>(work_.ProjectBytes(tokens, q2k));
    const auto launch = [&](int64_t i) { workload_.Step(i, tokens, place, source, type); };
    const double in_graph = stopwatch_.InGraph(bytes, launch), one_by_one = stopwatch_.OneByOne(bytes, launch);
    Row({Text("%lld", static_cast<long long>(tokens)), weights, place == Place::kDevice ? "device" : "pinned host",
         Micros(floor), Micros(in_graph), Ratio(floor, in_graph), Micros(one_by_one)});
  }

  int64_t RowBytes(int64_t tokens) const {
    return static_cast<int64_t>(work_.RowsRead(tokens) + work_.RowsWritten(tokens));
  }
  double RowsFloor(int64_t tokens, Place place) const {
    const double read = work_.RowsRead(tokens), written = work_.RowsWritten(tokens);
    return place == Place::kDevice ? (read + written) / floors_.copy
                                   : std::max(read / floors_.up, written / floors_.copy);
  }
  double ProjectFloor(int64_t tokens, bool q2k) const {
    return std::max(work_.ProjectBytes(tokens, q2k) / floors_.read, work_.ProjectFlops(tokens) / floors_.flops);
  }
  double GateFloor(int64_t tokens, HighwayType type) const { return work_.GateBytes(tokens, type) / floors_.copy; }
  double AtLeast(double floor) const { return std::max(floor, floors_.empty_in_graph); }

  void AddRatio(const std::string& what, double bar, double measured) {
    bars.push_back({what, Text(">= %.2f", bar), Text("%.2f", measured), measured >= bar});
  }
  void AddTime(const std::string& what, double bar, double seconds) {
    bars.push_back({what, Text("<= %.0f us (H200)", bar * 1e6), Micros(seconds) + " us", seconds <= bar});
  }

  const Device& device_;
  const Sizes& sizes_;
  const Stopwatch& stopwatch_;
  const Floors& floors_;
  const Workload& workload_;
  const Work work_;
};

}  // namespace

void ReportFloors(const Device& device, const Sizes& sizes, const Floors& floors) {
  const kernels::cuda::DeviceInfo& info = device.info();
  std::printf("%s, sm_%d%d, %d multiprocessors, %.1f GiB; sizes: %s\n", info.name, info.compute_major,
              info.compute_minor, info.multiprocessors, static_cast<double>(info.total_bytes) / (1 << 30), sizes.name);
  Head("Floors", {"what", "measured"});
  Row({"device memory, read", Text("%.0f GB/s", floors.read / 1e9)});
  Row({"device memory, copied (bytes read and written)", Text("%.0f GB/s", floors.copy / 1e9)});
  Row({"pinned host memory to the device", Text("%.1f GB/s", floors.up / 1e9)});
  Row({"device to pinned host memory", Text("%.1f GB/s", floors.down / 1e9)});
  Row({"both at once, up + down", Text("%.1f + %.1f GB/s", floors.up_both / 1e9, floors.down_both / 1e9)});
  Row({Text("bf16 products, cuBLASLt, a square of %lld", static_cast<long long>(sizes.square)),
       Text("%.1f TFLOP/s", floors.flops / 1e12)});
  Row({"an empty kernel in a graph", Micros(floors.empty_in_graph) + " us"});
  Row({"an empty kernel, launched one by one", Micros(floors.empty_alone) + " us"});
  const auto highway = static_cast<double>(sizes.dim * sizes.copies * 4);
  Row({"a token's f32 highway, up and down again at once",
       Micros(highway / std::min(floors.up_both, floors.down_both)) + " us"});
  std::printf(
      "\nA floor is the bytes that must move, or the operations, by these figures, and an empty kernel at the "
      "least.\nA row is read as 3.5 sectors of 32 bytes. Times are medians; L2 holds other memory at first.\n");
}

std::vector<Bar> ReportStages(const Device& device, const Sizes& sizes, const Stopwatch& stopwatch,
                              const Floors& floors, const Workload& workload) {
  Report report(device, sizes, stopwatch, floors, workload);
  report.Rows();
  report.Projection();
  report.Gates();
  report.Steps();
  Head("Bars", {"what", "bar", "measured", "met"});
  for (const Bar& bar : report.bars) Row({bar.what, bar.bar, bar.measured, bar.met ? "yes" : "no"});
  return report.bars;
}

}  // namespace engram::gpu
