// Rows of a table on the device: the bits of the CPU's, wherever the table stands.
#include "kernels/kernels.h"
#include "tests/gpu/checks.h"
#include "tests/kernels/twins.h"

namespace engram::gpu {
namespace {

using kernels::kQ2KBlockBytes;
using kernels::kRowValues;
using kernels::Random;

constexpr int64_t kRows = 3000;
constexpr int64_t kCounts[] = {0, 1, 2, 3, 4, 5, 31, 32, 33, 127, 1000, 5000};

// Finite scales, and in a tenth of the rows any: infinities and NaNs are rows too.
std::vector<uint8_t> Table(Random& random) {
  std::vector<uint8_t> table = kernels::RandomQ2K(random, kRows);
  for (int64_t row = 0; row < kRows; row += 10) {
    for (int64_t at = 80; at < 84; ++at)
      table[static_cast<size_t>(row * kQ2KBlockBytes + at)] = static_cast<uint8_t>(random());
  }
  return table;
}

std::vector<int64_t> Ids(Random& random, int64_t count) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(random() % 9 == 0 ? -1 : kernels::Below(random, kRows));
  if (count > 0) ids[static_cast<size_t>(count / 2)] = kRows - 1;
  return ids;
}

void RowsFrom(const Device& device, Place place) {
  Random random(10);
  const std::vector<uint8_t> table = Table(random);
  const Guarded<uint8_t> on_device(device, table, 0, place);
  kernels::Workers workers(1);
  for (const int64_t count : kCounts) {
    for (const bool by_id : {true, false}) {
      if (!by_id && count > kRows) continue;
      std::vector<int64_t> ids = Ids(random, count);
      for (int64_t i = 0; i < count && !by_id; ++i) ids[static_cast<size_t>(i)] = i;
      const Guarded<int64_t> on_ids(device, ids);
      const kernels::cuda::GatherCall call = {on_device.data(), by_id ? on_ids.data() : nullptr, count};
      const std::string what = std::to_string(count) + (by_id ? " rows by id" : " rows in order");

      const Guarded<Bf16> out(device, count * kRowValues);
      Must(device.module().gather_rows(call, out.data(), device.stream()), "gather_rows");
      std::vector<Bf16> want(static_cast<size_t>(count * kRowValues));
      kernels::ReferenceKernels().gather_rows({table.data(), kRows}, ids.data(), 1, count, 1, want.data(), workers);
      ExpectSame(out.Read(), want, what);

      const Guarded<uint8_t> bytes(device, count * kQ2KBlockBytes);
      Must(device.module().copy_rows(call, bytes.data(), device.stream()), "copy_rows");
      std::vector<uint8_t> want_bytes(static_cast<size_t>(count * kQ2KBlockBytes));
      kernels::CopyRows({table.data(), kRows}, ids.data(), 1, count, 1, want_bytes.data(), workers);
      Expect(bytes.Read() == want_bytes, what + ": the file's bytes differ");
    }
  }
}

void RowsOfADeviceTable(const Device& device) { RowsFrom(device, Place::kDevice); }
void RowsOfAPinnedTable(const Device& device) { RowsFrom(device, Place::kPinned); }

// Offsets beyond 2^32 bytes and beyond 2^31 words: only the rows around these edges are written.
void LastRowsOfALargeTable(const Device& device) {
  constexpr int64_t kBytes = (int64_t{9} << 30) / kQ2KBlockBytes * kQ2KBlockBytes;
  constexpr int64_t kAll = kBytes / kQ2KBlockBytes;
  const int64_t free_bytes = device.FreeBytes();
  if (free_bytes < kBytes + (int64_t{1} << 30)) {
    throw Skipped("needs 10 GiB, " + std::to_string(free_bytes >> 30) + " are free");
  }
  Random random(11);
  void* memory = nullptr;
  Must(device.module().allocate(kBytes, &memory), "allocating 9 GiB");
  const struct Freed {
    ~Freed() { device.module().free(memory); }
    const Device& device;
    void* memory;
  } freed = {device, memory};
  std::vector<int64_t> ids;
  for (const int64_t edge :
       {int64_t{1}, (int64_t{1} << 32) / kQ2KBlockBytes, (int64_t{1} << 33) / kQ2KBlockBytes, kAll - 2}) {
    for (int64_t id = edge - 1; id <= edge + 1; ++id) ids.push_back(id);
  }
  const auto count = static_cast<int64_t>(ids.size());
  const std::vector<uint8_t> rows = kernels::RandomQ2K(random, count);
  for (int64_t i = 0; i < count; ++i) {
    Must(device.module().copy(static_cast<uint8_t*>(memory) + ids[static_cast<size_t>(i)] * kQ2KBlockBytes,
                              rows.data() + i * kQ2KBlockBytes, kQ2KBlockBytes, device.stream()),
         "copy");
  }
  const Guarded<int64_t> on_ids(device, ids);
  const Guarded<Bf16> out(device, count * kRowValues);
  Must(device.module().gather_rows({static_cast<uint8_t*>(memory), on_ids.data(), count}, out.data(), device.stream()),
       "gather_rows");
  std::vector<int64_t> order;
  for (int64_t i = 0; i < count; ++i) order.push_back(i);
  std::vector<Bf16> want(static_cast<size_t>(count * kRowValues));
  kernels::Workers workers(1);
  kernels::ReferenceKernels().gather_rows({rows.data(), count}, order.data(), 1, count, 1, want.data(), workers);
  ExpectSame(out.Read(), want, "rows around 2^32 bytes, 2^33 bytes and the end");
}

}  // namespace

std::vector<Check> RowChecks() {
  return {{"rows: bits of the reference, a table on the device", true, RowsOfADeviceTable},
          {"rows: bits of the reference, a table in pinned host memory", true, RowsOfAPinnedTable},
          {"rows: around 4 GiB, 8 GiB and the end of a 9 GiB table", false, LastRowsOfALargeTable}};
}

}  // namespace engram::gpu
