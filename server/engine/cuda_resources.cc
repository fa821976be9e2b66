#include "server/engine/cuda_resources.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/status_macros.h"

namespace engram {

absl::StatusOr<CudaMemory> CudaMemory::Make(std::shared_ptr<const CudaDevice> device, bool pinned, int64_t bytes,
                                            const std::string& what) {
  CudaMemory memory;
  if (bytes == 0) return memory;
  RETURN_IF_ERROR(device->Use());
  void* data = nullptr;
  const kernels::cuda::Module& module = device->module();
  const int error = pinned ? module.allocate_pinned(bytes, &data) : module.allocate(bytes, &data);
  if (error != 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        what, ": no ", bytes, " bytes of ", pinned ? "pinned host" : "device", " memory: ", module.error_text(error)));
  }
  memory.data_ = {static_cast<uint8_t*>(data), CudaMemoryEnd{std::move(device), pinned}};
  memory.bytes_ = bytes;
  return memory;
}

absl::StatusOr<CudaMemory> CudaMemory::OnDevice(std::shared_ptr<const CudaDevice> device, int64_t bytes,
                                                const std::string& what) {
  return Make(std::move(device), /*pinned=*/false, bytes, what);
}

absl::StatusOr<CudaMemory> CudaMemory::Pinned(std::shared_ptr<const CudaDevice> device, int64_t bytes,
                                              const std::string& what) {
  return Make(std::move(device), /*pinned=*/true, bytes, what);
}

// What gives back can do nothing about a failure: the context is broken then, and the process about to end.
void CudaMemoryEnd::operator()(uint8_t* data) const {
  if (!device->Use().ok()) return;
  static_cast<void>(pinned ? device->module().free_pinned(data) : device->module().free(data));
}

absl::StatusOr<CudaStream> MakeCudaStream(std::shared_ptr<const CudaDevice> device) {
  CUstream_st* stream = nullptr;
  RETURN_IF_ERROR(device->ToStatus(device->module().create_stream(&stream), "create_stream"));
  return CudaStream(stream, CudaStreamEnd{std::move(device)});
}

void CudaStreamEnd::operator()(CUstream_st* stream) const {
  static_cast<void>(device->module().destroy_stream(stream));
}

absl::StatusOr<CudaEvent> MakeCudaEvent(std::shared_ptr<const CudaDevice> device) {
  CUevent_st* event = nullptr;
  RETURN_IF_ERROR(device->ToStatus(device->module().create_event(&event, /*timing=*/true), "create_event"));
  return CudaEvent(event, CudaEventEnd{std::move(device)});
}

void CudaEventEnd::operator()(CUevent_st* event) const { static_cast<void>(device->module().destroy_event(event)); }

void CudaGraphEnd::operator()(CUgraphExec_st* graph) const { static_cast<void>(device->module().destroy_graph(graph)); }

}  // namespace engram
