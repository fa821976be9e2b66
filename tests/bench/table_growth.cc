#include "tests/bench/table_growth.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/bench/bench_setup.h"
#include "tests/bench/machine_limits.h"

namespace engram::kernels {
namespace {

constexpr int kColumns = 24;
constexpr int64_t kTokens = 256;
constexpr int64_t kIdSets = 256;  // 1.6 M rows or 130 MB of table: no call finds its rows in a cache

int64_t MemInfo(const std::string& field) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  for (std::string line; std::getline(file, line);) {
    if (std::istringstream(line) >> name >> kib && name == field + ":") return kib << 10;
  }
  return 0;
}

// A table of random rows in anonymous pages of one kind.
class Table {
 public:
  Table(int64_t gib, bool huge) : bytes_(gib << 30), rows_(bytes_ / kQ2KBlockBytes) {
    void* at = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return;
    data_ = static_cast<uint8_t*>(at);
    advised_ = ::madvise(at, static_cast<size_t>(bytes_), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0;
    const int64_t huge_before = MemInfo("AnonHugePages");
    Fill();
    huge_bytes_ = std::max<int64_t>(0, MemInfo("AnonHugePages") - huge_before);
  }
  ~Table() {
    if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(bytes_));
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  bool ok() const { return data_ != nullptr && advised_; }
  const uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int64_t rows() const { return rows_; }
  // As the system says, which other programs' pages disturb a little.
  double huge_share() const { return static_cast<double>(huge_bytes_) / static_cast<double>(bytes_); }

 private:
  // Some thousand different rows over and over: what a row holds costs nothing, where it lies does.
  void Fill() {
    constexpr int64_t kPattern = 4096;
    Random random;
    std::vector<uint8_t> pattern(kPattern * kQ2KBlockBytes);
    for (uint8_t& byte : pattern) byte = static_cast<uint8_t>(random.Next());
    const uint16_t scales[2] = {0x2000, 0x2400};  // f16 d and dmin
    for (int64_t row = 0; row < kPattern; ++row) {
      std::memcpy(&pattern[static_cast<size_t>(row * kQ2KBlockBytes + 80)], scales, sizeof scales);
    }
    Pool().ForEachRange(rows_, kPattern, [&](int64_t begin, int64_t end) {
      std::memcpy(data_ + begin * kQ2KBlockBytes, pattern.data(), static_cast<size_t>((end - begin) * kQ2KBlockBytes));
    });
  }

  const int64_t bytes_;
  const int64_t rows_;
  uint8_t* data_ = nullptr;
  bool advised_ = false;
  int64_t huge_bytes_ = 0;
};

// The table of the benchmark that runs: repetitions of it share one, the next one's takes its place.
struct Current {
  int64_t gib = 0;
  bool huge = false;
  double touches = 0;  // per second, on this very memory
  std::unique_ptr<Table> table;
};

Current& Make(int64_t gib, bool huge) {
  static Current current;
  if (current.table != nullptr && current.gib == gib && current.huge == huge) return current;
  current.table.reset();
  current.gib = gib;
  current.huge = huge;
  if (MemInfo("MemAvailable") < (gib << 30) + (int64_t{2} << 30)) return current;
  current.table = std::make_unique<Table>(gib, huge);
  if (current.table->ok()) current.touches = MeasureTouches(Pool(), current.table->data(), current.table->bytes());
  return current;
}

void GatherGrowth(benchmark::State& state, int64_t gib, bool huge) {
  const Current& current = Make(gib, huge);
  if (current.table == nullptr) {
    state.SkipWithError("less free memory than the table and 2 GiB");
    return;
  }
  if (!current.table->ok()) {
    state.SkipWithError("no pages of this kind");
    return;
  }
  const TableView view = {current.table->data(), current.table->rows()};
  Random random;
  std::vector<int64_t> ids(static_cast<size_t>(kIdSets * kTokens * kColumns));
  for (int64_t& id : ids) id = static_cast<int64_t>(random.Next() % static_cast<uint64_t>(view.rows));
  std::vector<Bf16> out(static_cast<size_t>(kTokens * kColumns * kRowValues));
  int64_t set = 0;
  for (auto _ : state) {
    CpuKernels().gather_rows(view, &ids[static_cast<size_t>(set * kTokens * kColumns)], kColumns, kTokens, kColumns,
                             out.data(), Pool());
    benchmark::DoNotOptimize(out.data());
    set = (set + 1) % kIdSets;
  }
  state.counters["rows/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * kTokens * kColumns), benchmark::Counter::kIsRate);
  state.counters["touch_M/s"] = current.touches / 1e6;
  state.counters["huge_share"] = current.table->huge_share();
  CompareWithLimit(state, kTokens * kColumns / current.touches);
}

}  // namespace

void RegisterTableGrowth() {
  const char* sizes = std::getenv("ENGRAM_BENCH_TABLE_GIB");
  if (sizes == nullptr) return;
  std::istringstream list(sizes);
  for (std::string size; std::getline(list, size, ',');) {
    const int64_t gib = std::atoll(size.c_str());
    if (gib < 1 || gib > 1024) continue;
    for (const bool huge : {false, true}) {
      const std::string name = std::string("gather_growth/") + (huge ? "huge/" : "4KiB/") + std::to_string(gib);
      benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { GatherGrowth(state, gib, huge); })
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace engram::kernels
