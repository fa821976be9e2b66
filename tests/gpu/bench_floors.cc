#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

// Bytes per second of `bytes` up and down at once, on two streams.
void BothWays(const Device& device, Guarded<uint8_t>& memory, Guarded<uint8_t>& host, int64_t bytes, double& up,
              double& down) {
  const kernels::cuda::Module& module = device.module();
  CUstream_st* other = nullptr;
  CUevent_st *begin = nullptr, *up_end = nullptr, *down_end = nullptr;
  Must(module.create_stream(&other), "create_stream");
  for (CUevent_st** event : {&begin, &up_end, &down_end}) Must(module.create_event(event, true), "create_event");
  up = down = 0;
  for (int run = 0; run < 5; ++run) {
    Must(module.record_event(begin, device.stream()), "record_event");
    Must(module.stream_waits(other, begin), "stream_waits");
    Must(module.copy(memory.data(), host.data(), bytes, device.stream()), "copy up");
    Must(module.copy(host.data() + bytes, memory.data() + bytes, bytes, other), "copy down");
    Must(module.record_event(up_end, device.stream()), "record_event");
    Must(module.record_event(down_end, other), "record_event");
    Must(module.wait_event(up_end), "wait_event");
    Must(module.wait_event(down_end), "wait_event");
    float up_seconds = 0, down_seconds = 0;
    Must(module.event_seconds(begin, up_end, &up_seconds), "event_seconds");
    Must(module.event_seconds(begin, down_end, &down_seconds), "event_seconds");
    up = std::max(up, static_cast<double>(bytes) / up_seconds);
    down = std::max(down, static_cast<double>(bytes) / down_seconds);
  }
  for (CUevent_st* event : {begin, up_end, down_end}) module.destroy_event(event);
  module.destroy_stream(other);
}

}  // namespace

Floors MeasureFloors(const Device& device, const Sizes& sizes, const Stopwatch& stopwatch) {
  const kernels::cuda::Module& module = device.module();
  Floors floors = {};
  floors.empty_in_graph = stopwatch.InGraph(1, [&](int64_t) { LaunchNothing(device); });
  floors.empty_alone = stopwatch.OneByOne(1, [&](int64_t) { LaunchNothing(device); });
  const auto bytes = static_cast<double>(sizes.stream_bytes);
  {
    const Guarded<uint8_t> from(device, sizes.stream_bytes), to(device, sizes.stream_bytes);
    floors.read = bytes / stopwatch.OneByOne(sizes.stream_bytes,
                                             [&](int64_t) { LaunchRead(device, from.data(), sizes.stream_bytes); });
    floors.copy = 2 * bytes / stopwatch.OneByOne(sizes.stream_bytes, [&](int64_t) {
      Must(module.copy(to.data(), from.data(), sizes.stream_bytes, device.stream()), "copy");
    });
  }
  {
    const int64_t half = sizes.transfer_bytes;
    Guarded<uint8_t> memory(device, 2 * half), host(device, 2 * half, 0, Place::kPinned);
    floors.up = static_cast<double>(half) / stopwatch.OneByOne(half, [&](int64_t) {
      Must(module.copy(memory.data(), host.data(), half, device.stream()), "copy up");
    });
    floors.down = static_cast<double>(half) / stopwatch.OneByOne(half, [&](int64_t) {
      Must(module.copy(host.data(), memory.data(), half, device.stream()), "copy down");
    });
    BothWays(device, memory, host, half, floors.up_both, floors.down_both);
  }
  return floors;
}

}  // namespace engram::gpu
