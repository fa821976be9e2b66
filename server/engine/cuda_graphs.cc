#include "server/engine/cuda_graphs.h"

#include "server/observe/log.h"

namespace engram {

absl::Status CudaGraphs::Run(const Key& key, CUstream_st* stream, const std::function<absl::Status(bool timed)>& launch,
                             bool& timed) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) {
    if (shapes_.size() == kMostShapes) {
      by_key_.erase(shapes_.back().key);
      shapes_.pop_back();
    }
    shapes_.push_front({.key = key, .graph = {}});
    by_key_.emplace(key, shapes_.begin());
  } else {
    shapes_.splice(shapes_.begin(), shapes_, found->second);
  }
  Shape& shape = shapes_.front();
  ++shape.uses;
  if (shape.uses == 2) shape.graph = Record(stream, launch);
  timed = shape.graph == nullptr || shape.uses % kReplaysPerTiming == 0;
  if (timed) return launch(true);
  return device_->ToStatus(device_->module().launch_graph(shape.graph.get(), stream), "launch_graph");
}

// Null where it cannot be recorded, which is no fault of the step.
CudaGraph CudaGraphs::Record(CUstream_st* stream, const std::function<absl::Status(bool timed)>& launch) const {
  absl::Status status = device_->ToStatus(device_->module().begin_graph(stream), "begin_graph");
  CUgraphExec_st* graph = nullptr;
  if (status.ok()) {
    status = launch(false);
    const int end = device_->module().end_graph(stream, &graph);
    if (status.ok()) status = device_->ToStatus(end, "end_graph");
  }
  if (!status.ok()) Log(LogLevel::kWarning, "a shape is not replayed", {{"reason", std::string(status.message())}});
  CudaGraph recorded(graph, CudaGraphEnd{device_});
  return status.ok() ? std::move(recorded) : CudaGraph(nullptr, CudaGraphEnd{device_});
}

}  // namespace engram
