// gpu_bench: what the device can do at most, measured first, and how near to it each kernel comes (docs/gpu.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/gpu/device.h"

namespace engram::gpu {

// What is measured, and how long.
struct Sizes {
  const char* name;
  int64_t columns, dim;
  int copies;
  std::vector<int64_t> tokens;           // T
  int64_t table_bytes, pinned_bytes;     // of the tables on the device and in pinned host memory
  int64_t spread_bytes;                  // a multiple of L2: what is read and written before the same is again
  int64_t stream_bytes, transfer_bytes;  // of the memory floors on the device and over PCIe
  int64_t square;                        // of the largest product of matrices
  int least_launches, most_launches;     // of a graph
  double seconds;                        // that a figure's replays take at least

  int64_t inputs() const { return columns * kernels::kRowValues; }
  int64_t outputs() const { return dim * (copies + 1); }
  int64_t most_tokens() const { return tokens.back(); }
};

Sizes ReleasedSizes();  // of the released model's layer
Sizes QuickSizes();     // the same layer, fewer T, small tables
Sizes SmallSizes();     // shows that all of it works; its figures mean nothing

// Seconds of one launch among several, back to back. Medians of runs; L2 holds other memory when a run begins.
class Stopwatch {
 public:
  using LaunchOne = std::function<void(int64_t index)>;

  Stopwatch(const Device& device, const Sizes& sizes);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // As many launches as spread over Sizes::spread_bytes, where one touches `bytes`. As nodes of one graph, or one by
  // one. `launch(i)` puts its i-th into the device's stream; more than one kernel may be one.
  double InGraph(int64_t bytes, const LaunchOne& launch) const;
  double OneByOne(int64_t bytes, const LaunchOne& launch) const;

 private:
  double Median(int64_t launches, const std::function<void()>& all) const;

  const Device& device_;
  const Sizes& sizes_;
  Guarded<uint8_t> other_memory_;
  CUevent_st *begin_ = nullptr, *end_ = nullptr;
};

// Bytes and operations per second, and seconds; all measured.
struct Floors {
  double read, copy;                    // device memory; a copy's bytes count twice
  double up, down, up_both, down_both;  // pinned host memory over PCIe; one way alone, and both at once
  double flops;                         // bf16, cuBLASLt, a large square
  double empty_in_graph, empty_alone;   // a kernel that does nothing
};
Floors MeasureFloors(const Device& device, const Sizes& sizes, const Stopwatch& stopwatch);

// Kernels of the bench's own, into the device's stream.
void LaunchNothing(const Device& device);
void LaunchRead(const Device& device, const void* memory, int64_t bytes);

// Seconds of a product of two size x size matrices of bf16 by the fastest of what cuBLASLt proposes first.
double SquareSeconds(const Device& device, const Stopwatch& stopwatch, const Guarded<kernels::Bf16>& values,
                     int64_t size);

// A layer's weights, tables and steps on the device; random, and more of each than L2 holds.
class Workload {
 public:
  Workload(const Device& device, const Sizes& sizes);
  ~Workload();
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  // The i-th launch of each stage. Rows into x; x to kv; the highway in place by kv.
  void Rows(int64_t i, int64_t tokens, Place table) const;
  void ProjectByKernel(int64_t i, int64_t tokens, kernels::cuda::TileSource source) const;
  void ProjectByGemm(int64_t i, int64_t tokens, kernels::cuda::GemmClass shape) const;
  void Gate(int64_t i, int64_t tokens, kernels::HighwayType type) const;
  // The three, as the server chooses them by the number of tokens.
  void Step(int64_t i, int64_t tokens, Place table, kernels::cuda::TileSource source, kernels::HighwayType type) const;

  const Guarded<kernels::Bf16>& values() const { return kv_; }
  std::string GemmText() const;  // which algorithms cuBLASLt's are

 private:
  struct Weights;

  int64_t FirstToken(int64_t i, int64_t tokens) const;
  kernels::Bf16* X(int64_t i, int64_t tokens) const;

  const Device& device_;
  const Sizes& sizes_;
  const int64_t pool_tokens_;  // kv, highways and descriptors of so many
  const int64_t x_tokens_;
  Guarded<uint8_t> table_, pinned_table_;
  Guarded<int64_t> ids_, pinned_ids_;
  Guarded<kernels::Bf16> x_, kv_;
  Guarded<uint8_t> highway_;
  Guarded<float> qk_, gates_;
  Guarded<kernels::cuda::GateToken> f32_tokens_, bf16_tokens_;
  Guarded<uint8_t> workspace_;
  std::vector<std::unique_ptr<Weights>> q2k_, bf16_;
};

// Bytes that a stage has to move, at the least.
struct Work {
  explicit Work(const Sizes& of) : sizes(of) {}
  const Sizes& sizes;

  // 84 bytes at a random multiple of 4 stand in 3.5 sectors of 32 on average.
  static constexpr double kRowSectors = 112;
  double RowsRead(int64_t tokens) const { return static_cast<double>(tokens * sizes.columns) * (kRowSectors + 8); }
  double RowsWritten(int64_t tokens) const { return static_cast<double>(tokens * sizes.inputs() * 2); }
  double WeightBytes(bool q2k) const {
    const auto weights = static_cast<double>(sizes.inputs() * sizes.outputs());
    return q2k ? weights / kernels::kRowValues * kernels::kQ2KBlockBytes : weights * 2;
  }
  double ProjectBytes(int64_t tokens, bool q2k) const {
    return WeightBytes(q2k) + static_cast<double>(tokens * (sizes.inputs() + sizes.outputs()) * 2);
  }
  double ProjectFlops(int64_t tokens) const {
    return 2.0 * static_cast<double>(tokens * sizes.inputs() * sizes.outputs());
  }
  double GateBytes(int64_t tokens, kernels::HighwayType type) const {
    const int64_t highway = sizes.dim * sizes.copies * kernels::HighwayBytesPerValue(type);
    return static_cast<double>(tokens * (sizes.outputs() * 2 + 2 * highway));
  }
};

// One line of the GPU's bars (docs/gpu.md): a ratio to what was measured in the same run, or a time.
struct Bar {
  std::string what, bar, measured;
  bool met;
};

// Measures and prints, Markdown. The bars are those of the released layer.
void ReportFloors(const Device& device, const Sizes& sizes, const Floors& floors);
std::vector<Bar> ReportStages(const Device& device, const Sizes& sizes, const Stopwatch& stopwatch,
                              const Floors& floors, const Workload& workload);

}  // namespace engram::gpu
