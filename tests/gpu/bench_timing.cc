#include <algorithm>
#include <chrono>

#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

constexpr int kLeastRuns = 5, kMostRuns = 200;

int64_t LaunchesFor(const Sizes& sizes, int64_t bytes) {
  const int64_t spread = (sizes.spread_bytes + bytes - 1) / std::max<int64_t>(bytes, 1);
  return std::clamp<int64_t>(spread, sizes.least_launches, sizes.most_launches);
}

}  // namespace

Stopwatch::Stopwatch(const Device& device, const Sizes& sizes)
    : device_(device), sizes_(sizes), other_memory_(device, sizes.spread_bytes) {
  Must(device.module().create_event(&begin_, true), "create_event");
  Must(device.module().create_event(&end_, true), "create_event");
}

Stopwatch::~Stopwatch() {
  device_.module().destroy_event(begin_);
  device_.module().destroy_event(end_);
}

double Stopwatch::Median(int64_t launches, const std::function<void()>& all) const {
  const kernels::cuda::Module& module = device_.module();
  std::vector<double> runs;
  double spent = 0;
  for (int run = -1; run < kMostRuns && (run < kLeastRuns || spent < sizes_.seconds); ++run) {
    // While it reads, what follows is handed over: the runs begin at once.
    LaunchRead(device_, other_memory_.data(), sizes_.spread_bytes);
    Must(module.record_event(begin_, device_.stream()), "record_event");
    all();
    Must(module.record_event(end_, device_.stream()), "record_event");
    Must(module.wait_event(end_), "wait_event");
    float seconds = 0;
    Must(module.event_seconds(begin_, end_, &seconds), "event_seconds");
    if (run < 0) continue;  // the first is for the clocks
    runs.push_back(seconds);
    spent += seconds;
  }
  std::nth_element(runs.begin(), runs.begin() + static_cast<int64_t>(runs.size() / 2), runs.end());
  return runs[runs.size() / 2] / static_cast<double>(launches);
}

double Stopwatch::InGraph(int64_t bytes, const LaunchOne& launch) const {
  const kernels::cuda::Module& module = device_.module();
  const int64_t launches = LaunchesFor(sizes_, bytes);
  launch(0);  // whatever is done once at the first launch is not to be done while recording
  device_.Wait();
  Must(module.begin_graph(device_.stream()), "begin_graph");
  for (int64_t i = 0; i < launches; ++i) launch(i);
  CUgraphExec_st* graph = nullptr;
  Must(module.end_graph(device_.stream(), &graph), "end_graph");
  const double seconds = Median(launches, [&] { Must(module.launch_graph(graph, device_.stream()), "launch_graph"); });
  Must(module.destroy_graph(graph), "destroy_graph");
  return seconds;
}

double Stopwatch::OneByOne(int64_t bytes, const LaunchOne& launch) const {
  const int64_t launches = LaunchesFor(sizes_, bytes);
  return Median(launches, [&] {
    for (int64_t i = 0; i < launches; ++i) launch(i);
  });
}

}  // namespace engram::gpu
