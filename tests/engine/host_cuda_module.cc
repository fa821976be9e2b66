// The table of kernels/cuda/module.h without a GPU: memory is the host's, a stream is a thread that works through its
// queue, and the arithmetic is that of the CPU. What the server does with a device is thereby run in earnest: copies
// and kernels happen later and in another thread, so whoever forgets to wait reads what is not there yet.
//
// SIMT_DEVICE_BYTES: of the device's memory (1 GiB); SIMT_FAIL_AFTER: after so many copies and kernels, each fails, and
// the context is broken; SIMT_DEVICES: how many there are (1); SIMT_DRIVER=0: no driver.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/cuda/module.h"
#include "kernels/kernels.h"

namespace {

using engram::kernels::Bf16;
using engram::kernels::CpuKernels;
using engram::kernels::GateWeights;
using engram::kernels::kQ2KBlockBytes;
using engram::kernels::kRowValues;
using engram::kernels::ProjectionWeights;
using engram::kernels::ReferenceKernels;
using engram::kernels::Workers;
using engram::kernels::cuda::DeviceInfo;
using engram::kernels::cuda::GateToken;
using engram::kernels::cuda::GateTokens;
using engram::kernels::cuda::GatherCall;
using engram::kernels::cuda::Gemm;
using engram::kernels::cuda::GemmClass;
using engram::kernels::cuda::GemmInfo;
using engram::kernels::cuda::Module;
using engram::kernels::cuda::TiledWeights;
using engram::kernels::cuda::TileSource;

enum Error : int { kOk = 0, kInvalidValue = 1, kNoMemory = 2, kNoDevice = 100, kBroken = 700 };

constexpr int64_t kPadding = 16;  // tokens, of a GEMM

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

// What is left of SIMT_FAIL_AFTER; below 0: everything works.
std::atomic<int64_t> work_left{FromEnvironment("SIMT_FAIL_AFTER", -1)};
std::atomic<bool> broken{false};

int Spend() {
  if (work_left >= 0 && work_left-- == 0) broken = true;
  return broken ? kBroken : kOk;
}

struct Memory {
  std::mutex mutex;
  std::map<void*, int64_t> blocks;
  int64_t taken = 0;
};
Memory& DeviceMemory() {
  static auto* memory = new Memory;
  return *memory;
}
int64_t TotalBytes() { return FromEnvironment("SIMT_DEVICE_BYTES", int64_t{1} << 30); }

using Work = std::function<void()>;

}  // namespace

struct CUgraphExec_st {
  std::vector<Work> work;
};

struct CUevent_st {
  void Record(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    passed = number;
    when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void Await(int64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed >= number; });
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int64_t> recorded{0};
  int64_t passed = 0;
  std::chrono::steady_clock::time_point when;
};

struct CUstream_st {
  CUstream_st() : thread([this] { Loop(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  // Later, on the stream's thread; or into the graph that is being recorded.
  void Do(Work work) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (recording) return recording->work.push_back(std::move(work));
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void Await() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
  }
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      const Work work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      work();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool busy = false, stopping = false;
  std::unique_ptr<CUgraphExec_st> recording;
  std::thread thread;
};

namespace engram::kernels::cuda {
struct Gemm {
  const Bf16* wkv = nullptr;
  int64_t outputs = 0, inputs = 0, most_tokens = 0;
};
}  // namespace engram::kernels::cuda

namespace {

int Enqueue(CUstream_st* stream, Work work) {
  if (const int error = Spend(); error != kOk) return error;
  stream->Do(std::move(work));
  return kOk;
}

int Allocate(int64_t bytes, void** memory) {
  Memory& device = DeviceMemory();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (device.taken + bytes > TotalBytes()) return kNoMemory;
  *memory = std::aligned_alloc(256, static_cast<size_t>((bytes + 255) / 256 * 256));
  if (*memory == nullptr) return kNoMemory;
  std::memset(*memory, 0xEE, static_cast<size_t>(bytes));
  device.blocks[*memory] = bytes;
  device.taken += bytes;
  return kOk;
}

int Free(void* memory) {
  if (memory == nullptr) return kOk;
  Memory& device = DeviceMemory();
  const std::lock_guard<std::mutex> lock(device.mutex);
  const auto found = device.blocks.find(memory);
  if (found == device.blocks.end()) return kInvalidValue;
  device.taken -= found->second;
  device.blocks.erase(found);
  std::free(memory);
  return kOk;
}

int AllocatePinned(int64_t bytes, void** memory) {
  *memory = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
  return *memory == nullptr ? kNoMemory : kOk;
}

int Info(int device, DeviceInfo* info) {
  if (device != 0) return kInvalidValue;
  *info = {};
  std::strcpy(info->name, "the host, as a device");
  info->compute_major = static_cast<int>(FromEnvironment("SIMT_COMPUTE_MAJOR", 9));
  info->multiprocessors = 4;
  info->total_bytes = TotalBytes();
  Memory& memory = DeviceMemory();
  const std::lock_guard<std::mutex> lock(memory.mutex);
  info->free_bytes = info->total_bytes - memory.taken;
  return kOk;
}

int RecordEvent(CUevent_st* event, CUstream_st* stream) {
  if (broken) return kBroken;
  const int64_t number = ++event->recorded;
  stream->Do([event, number] { event->Record(number); });
  return kOk;
}

int StreamWaits(CUstream_st* stream, CUevent_st* event) {
  if (broken) return kBroken;
  stream->Do([event, number = event->recorded.load()] { event->Await(number); });
  return kOk;
}

int WaitEvent(CUevent_st* event) {
  event->Await(event->recorded);
  return broken ? kBroken : kOk;
}

int EventSeconds(CUevent_st* begin, CUevent_st* end, float* seconds) {
  const std::scoped_lock lock(begin->mutex, end->mutex);
  *seconds = std::chrono::duration<float>(end->when - begin->when).count();
  return *seconds < 0 ? kInvalidValue : kOk;
}

int Copy2d(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t row_bytes, int64_t rows,
           CUstream_st* stream) {
  if (row_bytes > to_pitch || row_bytes > from_pitch) return kInvalidValue;
  return Enqueue(stream, [=] {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(static_cast<char*>(to) + r * to_pitch, static_cast<const char*>(from) + r * from_pitch,
                  static_cast<size_t>(row_bytes));
    }
  });
}

int GatherRows(const GatherCall& call, Bf16* out, CUstream_st* stream) {
  return Enqueue(stream, [=] {
    Workers alone(1);
    for (int64_t i = 0; i < call.count; ++i) {
      const int64_t id = call.ids == nullptr ? i : call.ids[i];
      ReferenceKernels().gather_rows({call.table, INT64_MAX}, &id, 1, 1, 1, out + i * kRowValues, alone);
    }
  });
}

int CopyRows(const GatherCall& call, uint8_t* out, CUstream_st* stream) {
  return Enqueue(stream, [=] {
    Workers alone(1);
    engram::kernels::CopyRows({call.table, INT64_MAX}, call.ids, 1, call.count, 1, out, alone);
  });
}

// wkv as CpuKernels() reads it, made when it is first used: the reference takes minutes for what tests compute.
struct Packs {
  std::mutex mutex;
  std::map<const uint8_t*, std::shared_ptr<uint8_t>> by_tiles;
};
Packs& AllPacks() {
  static auto* packs = new Packs;
  return *packs;
}

void ForgetPack(const uint8_t* tiles) {
  const std::lock_guard<std::mutex> lock(AllPacks().mutex);
  AllPacks().by_tiles.erase(tiles);
}

std::shared_ptr<uint8_t> PackOf(const uint8_t* tiles, const ProjectionWeights& weights, Workers& workers) {
  const std::lock_guard<std::mutex> lock(AllPacks().mutex);
  std::shared_ptr<uint8_t>& pack = AllPacks().by_tiles[tiles];
  if (pack == nullptr) {
    const auto bytes = static_cast<size_t>((CpuKernels().packed_bytes(weights) + 63) / 64 * 64);
    pack = {static_cast<uint8_t*>(std::aligned_alloc(64, bytes)), std::free};
    CpuKernels().pack(weights, pack.get(), workers);
  }
  return pack;
}

// Tiles are the weights as they were, output after output.
int TileQ2K(const uint8_t* blocks, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
            CUstream_st* stream) {
  const int64_t row = weights.inputs / kRowValues * kQ2KBlockBytes;
  if (weights.source != TileSource::kQ2K || first % 16 != 0) return kInvalidValue;
  return Enqueue(stream, [=] {
    std::memcpy(tiles + first * row, blocks, static_cast<size_t>(count * row));
    ForgetPack(tiles);
  });
}

int TileBf16(const Bf16* wkv, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
             CUstream_st* stream) {
  const int64_t row = weights.inputs * 2;
  if (weights.source != TileSource::kBf16 || first % 16 != 0) return kInvalidValue;
  return Enqueue(stream, [=] {
    std::memcpy(tiles + first * row, wkv, static_cast<size_t>(count * row));
    ForgetPack(tiles);
  });
}

int Project(const TiledWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int multiprocessors,
            CUstream_st* stream) {
  if (multiprocessors < 1 || reinterpret_cast<uintptr_t>(x) % 16 != 0) return kInvalidValue;
  return Enqueue(stream, [=] {
    Workers alone(1);
    ProjectionWeights plain;
    plain.outputs = weights.outputs;
    plain.inputs = weights.inputs;
    if (weights.source == TileSource::kQ2K) plain.q2k = weights.tiles;
    if (weights.source == TileSource::kBf16) plain.bf16 = reinterpret_cast<const Bf16*>(weights.tiles);
    const std::shared_ptr<uint8_t> pack = PackOf(weights.tiles, plain, alone);
    plain.packed = pack.get();
    std::vector<Bf16> scratch(static_cast<size_t>(tokens * weights.inputs));
    CpuKernels().project(plain, x, tokens, kv, scratch.data(), alone);
  });
}

int ApplyGate(const GateWeights& weights, const GateTokens& call, CUstream_st* stream) {
  return Enqueue(stream, [=] {
    Workers alone(1);
    std::vector<float> unwanted(static_cast<size_t>(weights.copies));
    for (int64_t t = 0; t < call.count; ++t) {
      const GateToken& token = call.tokens[t];
      const uint8_t live = token.live != 0;
      ReferenceKernels().apply_gate(weights,
                                    {.kv = token.kv,
                                     .token_mask = &live,
                                     .tokens = 1,
                                     .type = call.type,
                                     .highway = token.highway,
                                     .out = token.out,
                                     .gates = token.gates},
                                    alone);
    }
  });
}

float F32(Bf16 bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &word, 4);
  return value;
}

constexpr int kSums = 8;  // at a time: one alone waits for itself

// Sums from the other end where the class is long, so that whoever picks the wrong class gets other bits.
int RunGemm(const Gemm* gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void* workspace,
            CUstream_st* stream) {
  if (tokens < 1 || tokens > gemm->most_tokens || workspace == nullptr) return kInvalidValue;
  return Enqueue(stream, [=] {
    const int64_t padded = (tokens + kPadding - 1) / kPadding * kPadding;
    for (int64_t t = 0; t < padded; ++t) {
      for (int64_t o = 0; o < gemm->outputs; ++o) {
        float sums[kSums] = {};
        for (int64_t i = 0; i < gemm->inputs; ++i) {
          const int64_t k = shape == GemmClass::kMedium ? i : gemm->inputs - 1 - i;
          sums[i % kSums] += F32(gemm->wkv[o * gemm->inputs + k]) * F32(x[t * gemm->inputs + k]);
        }
        float sum = 0;
        for (const float part : sums) sum += part;
        uint32_t word = 0;
        std::memcpy(&word, &sum, 4);
        kv[t * gemm->outputs + o] = static_cast<Bf16>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
      }
    }
  });
}

Module MakeModule() {
  Module m;
  m.version = static_cast<int32_t>(FromEnvironment("SIMT_MODULE_VERSION", engram::kernels::cuda::kModuleVersion));
  m.error_text = [](int error) {
    switch (error) {
      case kOk:
        return "no error";
      case kNoMemory:
        return "out of memory";
      case kNoDevice:
        return "no CUDA-capable device is detected";
      case kBroken:
        return "an illegal memory access was encountered";
      default:
        return "invalid argument";
    }
  };
  m.sticky = [](int error) { return error == kBroken; };
  m.versions = [](int* driver, int* runtime) -> int {
    *driver = FromEnvironment("SIMT_DRIVER", 1) == 0 ? 0 : 13000;
    *runtime = 13000;
    return kOk;
  };
  m.device_count = [](int* count) -> int {
    *count = static_cast<int>(FromEnvironment("SIMT_DEVICES", 1));
    return *count == 0 ? kNoDevice : kOk;
  };
  m.device_info = Info;
  m.use_device = [](int device) -> int { return device == 0 ? kOk : kInvalidValue; };
  m.check_device = []() -> int { return broken ? kBroken : kOk; };
  m.allocate = Allocate;
  m.free = Free;
  m.allocate_pinned = AllocatePinned;
  m.free_pinned = [](void* memory) -> int { return std::free(memory), kOk; };
  m.pin = [](void*, int64_t) -> int { return kOk; };
  m.unpin = [](void*) -> int { return kOk; };
  m.export_memory = [](void*, uint8_t*) -> int { return kInvalidValue; };
  m.open_memory = [](const uint8_t*, void**) -> int { return kInvalidValue; };
  m.close_memory = [](void*) -> int { return kInvalidValue; };
  m.create_stream = [](CUstream_st** stream) -> int { return *stream = new CUstream_st, kOk; };
  m.destroy_stream = [](CUstream_st* stream) -> int { return delete stream, kOk; };
  m.wait_stream = [](CUstream_st* stream) -> int { return stream->Await(), broken ? kBroken : kOk; };
  m.create_event = [](CUevent_st** event, bool) -> int { return *event = new CUevent_st, kOk; };
  m.destroy_event = [](CUevent_st* event) -> int { return delete event, kOk; };
  m.record_event = RecordEvent;
  m.stream_waits = StreamWaits;
  m.wait_event = WaitEvent;
  m.event_seconds = EventSeconds;
  m.copy = [](void* to, const void* from, int64_t bytes, CUstream_st* stream) {
    return Copy2d(to, bytes, from, bytes, bytes, 1, stream);
  };
  m.copy_2d = Copy2d;
  m.fill = [](void* memory, int value, int64_t bytes, CUstream_st* stream) {
    return Enqueue(stream, [=] { std::memset(memory, value, static_cast<size_t>(bytes)); });
  };
  m.begin_graph = [](CUstream_st* stream) -> int {
    const std::lock_guard<std::mutex> lock(stream->mutex);
    stream->recording = std::make_unique<CUgraphExec_st>();
    return kOk;
  };
  m.end_graph = [](CUstream_st* stream, CUgraphExec_st** graph) -> int {
    const std::lock_guard<std::mutex> lock(stream->mutex);
    *graph = stream->recording.release();
    return kOk;
  };
  m.launch_graph = [](CUgraphExec_st* graph, CUstream_st* stream) -> int {
    for (const Work& work : graph->work) {
      if (const int error = Enqueue(stream, work); error != kOk) return error;
    }
    return kOk;
  };
  m.destroy_graph = [](CUgraphExec_st* graph) -> int { return delete graph, kOk; };
  m.gather_rows = GatherRows;
  m.copy_rows = CopyRows;
  m.tile_q2k = TileQ2K;
  m.tile_bf16 = TileBf16;
  m.project = Project;
  m.apply_gate = ApplyGate;
  m.create_gemm = [](const Bf16* wkv, int64_t outputs, int64_t inputs, int64_t most_tokens, Gemm** gemm) -> int {
    *gemm = new Gemm{wkv, outputs, inputs, most_tokens};
    return kOk;
  };
  m.destroy_gemm = [](Gemm* gemm) -> int { return delete gemm, kOk; };
  m.gemm_info = [](const Gemm*, GemmInfo* info) -> int {
    *info = {"host-1", {"ascending", "descending"}};
    return kOk;
  };
  m.gemm_workspace_bytes = []() -> int64_t { return 4096; };
  m.padded_tokens = [](int64_t tokens) { return (tokens + kPadding - 1) / kPadding * kPadding; };
  m.run_gemm = RunGemm;
  return m;
}

}  // namespace

extern "C" const Module* engram_cuda_module() {
  static const Module* module = new Module(MakeModule());
  return module;
}
