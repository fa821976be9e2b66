#include "server/engine/cuda_model.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/model/chunk_threads.h"
#include "server/model/status_macros.h"
#include "server/observe/log.h"

namespace engram {
namespace {

using kernels::Bf16;
using kernels::kQ2KBlockBytes;
using kernels::kRowValues;
using kernels::cuda::TiledBytes;
using kernels::cuda::TileSource;

// One thread's read of a chunk: a disk streams, and 16 MiB keep up to eight threads busy.
constexpr int64_t kReadBytes = int64_t{2} << 20;
// Outputs of wkv that tiles are made of.
constexpr int64_t kTileOutputs = 16;

}  // namespace

// Two pinned buffers in turn: while the device takes one, the other is filled.
class CudaModel::Uploader {
 public:
  // Writes bytes [at, at + bytes) of what is uploaded to `to`.
  using Read = std::function<absl::Status(int64_t at, uint8_t* to, int64_t bytes)>;

  Uploader(std::shared_ptr<const CudaDevice> device, int threads, int64_t total)
      : device_(std::move(device)), threads_(threads), total_(total) {}

  // With `blocks`, a piece of device memory for wkv's Q2_K on its way to being tiles.
  absl::Status Prepare(bool blocks) {
    for (Buffer& buffer : buffers_) {
      ASSIGN_OR_RETURN(buffer.memory, CudaMemory::Pinned(device_, kUploadBytes, "upload buffers"));
      ASSIGN_OR_RETURN(buffer.taken, MakeCudaEvent(device_));
    }
    ASSIGN_OR_RETURN(stream_, MakeCudaStream(device_));
    if (blocks) {
      ASSIGN_OR_RETURN(blocks_, CudaMemory::OnDevice(device_, kUploadBytes, "upload buffer"));
    }
    return absl::OkStatus();
  }

  CUstream_st* stream() const { return stream_.get(); }
  uint8_t* blocks() const { return blocks_.data(); }

  // In pieces of up to kUploadBytes, in the stream's order.
  absl::Status Copy(uint8_t* to, int64_t bytes, const Read& read) {
    for (int64_t at = 0; at < bytes;) {
      const int64_t piece = std::min(kUploadBytes, bytes - at);
      Buffer& buffer = buffers_[next_];
      next_ ^= 1;
      if (buffer.used) RETURN_IF_ERROR(device_->ToStatus(module().wait_event(buffer.taken.get()), "wait_event"));
      RETURN_IF_ERROR(RunChunks((piece + kReadBytes - 1) / kReadBytes, threads_, [&](int64_t chunk) {
        const int64_t begin = chunk * kReadBytes;
        return read(at + begin, buffer.memory.data() + begin, std::min(kReadBytes, piece - begin));
      }));
      RETURN_IF_ERROR(
          device_->ToStatus(module().copy(to + at, buffer.memory.data(), piece, stream_.get()), "copy of the model"));
      RETURN_IF_ERROR(device_->ToStatus(module().record_event(buffer.taken.get(), stream_.get()), "record_event"));
      buffer.used = true;
      at += piece;
      done_ += piece;
      Report(false);
    }
    return absl::OkStatus();
  }

  absl::Status CopyMemory(uint8_t* to, const void* from, int64_t bytes) {
    return Copy(to, bytes, [from](int64_t at, uint8_t* out, int64_t count) {
      std::memcpy(out, static_cast<const uint8_t*>(from) + at, static_cast<size_t>(count));
      return absl::OkStatus();
    });
  }

  absl::Status Finish() {
    RETURN_IF_ERROR(device_->ToStatus(module().wait_stream(stream_.get()), "upload of the model"));
    Report(true);
    return absl::OkStatus();
  }

 private:
  struct Buffer {
    CudaMemory memory;
    CudaEvent taken;
    bool used = false;
  };

  const kernels::cuda::Module& module() const { return device_->module(); }

  void Report(bool over) {
    const absl::Time now = absl::Now();
    if (!over && now - last_line_ < absl::Seconds(2)) return;
    last_line_ = now;
    const double seconds = std::max(absl::ToDoubleSeconds(now - start_), 1e-9);
    const double rate = static_cast<double>(done_) / seconds;
    Log(LogLevel::kInfo, "uploading",
        {{"done", absl::StrFormat("%.1f%%", 100.0 * static_cast<double>(done_) / static_cast<double>(total_))},
         {"rate", absl::StrFormat("%.2f GB/s", rate / 1e9)},
         {"left", absl::StrFormat("%.0f s", rate > 0 ? static_cast<double>(total_ - done_) / rate : 0)}});
  }

  const std::shared_ptr<const CudaDevice> device_;
  const int threads_;
  const int64_t total_;
  const absl::Time start_ = absl::Now();
  absl::Time last_line_ = start_;
  int64_t done_ = 0;
  CudaStream stream_;
  Buffer buffers_[2];
  size_t next_ = 0;
  CudaMemory blocks_;
};

absl::StatusOr<std::unique_ptr<CudaModel>> CudaModel::Upload(std::shared_ptr<const CudaDevice> device,
                                                             std::shared_ptr<const EngramModel> model,
                                                             bool tables_on_device, int64_t most_rows, int threads) {
  RETURN_IF_ERROR(device->Use());
  const kernels::cuda::Module& module = device->module();
  std::unique_ptr<CudaModel> uploaded(new CudaModel(device, model));
  const EngramGeometry& g = model->geometry();
  const int64_t wkv_values = g.outputs() * g.inputs();
  const int64_t qk_bytes = g.highway_values() * static_cast<int64_t>(sizeof(float));
  int64_t total = 0;
  bool q2k = false;
  for (const EngramLayer& layer : model->layers()) {
    if (tables_on_device) total += layer.table.rows * kQ2KBlockBytes;
    total += layer.wkv.q2k != nullptr ? wkv_values / kRowValues * kQ2KBlockBytes : wkv_values * 2;
    total += qk_bytes;
    q2k |= layer.wkv.q2k != nullptr;
  }
  Uploader uploader(device, threads, total);
  RETURN_IF_ERROR(uploader.Prepare(q2k));

  const auto take = [&](int64_t bytes, const char* what, int64_t layer_id) -> absl::StatusOr<uint8_t*> {
    ASSIGN_OR_RETURN(CudaMemory memory,
                     CudaMemory::OnDevice(device, bytes, absl::StrCat(what, " of layer ", layer_id)));
    uploaded->memory_.push_back(std::move(memory));
    return uploaded->memory_.back().data();
  };
  if (!tables_on_device) RETURN_IF_ERROR(uploaded->PinTables());
  for (size_t i = 0; i < model->layers().size(); ++i) {
    const EngramLayer& from = model->layers()[i];
    Layer layer;
    layer.table = from.table.bytes;
    if (tables_on_device) {
      const int64_t bytes = from.table.rows * kQ2KBlockBytes;
      ASSIGN_OR_RETURN(uint8_t * table, take(bytes, "the table", from.layer_id));
      // Past the mapping, which is for random reads: it would read single pages.
      RETURN_IF_ERROR(uploader.Copy(table, bytes, [&](int64_t at, uint8_t* to, int64_t count) {
        return model->ReadTableFromFile(i, at, count, to);
      }));
      layer.table = table;
    }

    const TileSource source = from.wkv.q2k != nullptr ? TileSource::kQ2K : TileSource::kBf16;
    layer.wkv = {source, nullptr, g.outputs(), g.inputs()};
    ASSIGN_OR_RETURN(uint8_t * tiles, take(TiledBytes(source, g.outputs(), g.inputs()), "wkv in tiles", from.layer_id));
    ASSIGN_OR_RETURN(uint8_t * bf16, take(wkv_values * 2, "wkv as bf16", from.layer_id));
    layer.wkv.tiles = tiles;
    auto* values = reinterpret_cast<Bf16*>(bf16);
    if (source == TileSource::kBf16) {
      RETURN_IF_ERROR(uploader.CopyMemory(bf16, from.wkv.bf16, wkv_values * 2));
      RETURN_IF_ERROR(
          device->ToStatus(module.tile_bf16(values, 0, g.outputs(), layer.wkv, tiles, uploader.stream()), "tile_bf16"));
    } else {
      const int64_t row_bytes = g.columns * kQ2KBlockBytes;  // of one output
      const int64_t most = std::max(kTileOutputs, kUploadBytes / row_bytes / kTileOutputs * kTileOutputs);
      if (most * row_bytes > kUploadBytes) {
        return absl::OutOfRangeError(
            absl::StrCat("layer ", from.layer_id, ": wkv of ", g.inputs(), " inputs is wider than the upload buffer"));
      }
      for (int64_t first = 0; first < g.outputs(); first += most) {
        const int64_t count = std::min(most, g.outputs() - first);
        RETURN_IF_ERROR(uploader.CopyMemory(uploader.blocks(), from.wkv.q2k + first * row_bytes, count * row_bytes));
        RETURN_IF_ERROR(device->ToStatus(
            module.tile_q2k(uploader.blocks(), first, count, layer.wkv, tiles, uploader.stream()), "tile_q2k"));
        RETURN_IF_ERROR(device->ToStatus(module.gather_rows({uploader.blocks(), nullptr, count * g.columns},
                                                            values + first * g.inputs(), uploader.stream()),
                                         "gather_rows of wkv"));
      }
    }

    ASSIGN_OR_RETURN(uint8_t * qk, take(qk_bytes, "q and k", from.layer_id));
    RETURN_IF_ERROR(uploader.CopyMemory(qk, from.gate.qk, qk_bytes));
    layer.gate = from.gate;
    layer.gate.qk = reinterpret_cast<float*>(qk);

    RETURN_IF_ERROR(device->ToStatus(module.wait_stream(uploader.stream()), "upload of the model"));
    kernels::cuda::Gemm* gemm = nullptr;
    RETURN_IF_ERROR(
        device->ToStatus(module.create_gemm(values, g.outputs(), g.inputs(), most_rows, &gemm), "create_gemm"));
    uploaded->gemms_.push_back(gemm);
    layer.gemm = gemm;
    uploaded->layers_.push_back(layer);
  }
  RETURN_IF_ERROR(uploader.Finish());
  return uploaded;
}

CudaModel::~CudaModel() {
  if (!device_->Use().ok()) return;
  for (kernels::cuda::Gemm* gemm : gemms_) static_cast<void>(device_->module().destroy_gemm(gemm));
  for (void* table : pinned_) static_cast<void>(device_->module().unpin(table));
}

// The model's tables begin on a page and own their last one (AnonymousMemory).
absl::Status CudaModel::PinTables() {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  for (const EngramLayer& layer : model_->layers()) {
    void* table = const_cast<uint8_t*>(layer.table.bytes);
    const int64_t bytes = (layer.table.rows * kQ2KBlockBytes + page - 1) / page * page;
    if (const int error = device_->module().pin(table, bytes); error != 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "--residency host: cannot pin the ", bytes, " bytes of the table of layer ", layer.layer_id, ": ",
          device_->module().error_text(error), " (does a limit on locked memory stand against it?)"));
    }
    pinned_.push_back(table);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CudaModel::GemmNames() const {
  std::vector<std::string> names;
  std::string library;
  for (const kernels::cuda::Gemm* gemm : gemms_) {
    kernels::cuda::GemmInfo info;
    RETURN_IF_ERROR(device_->ToStatus(device_->module().gemm_info(gemm, &info), "gemm_info"));
    library = info.library;
    names.push_back(absl::StrCat(info.algorithms[0], "|", info.algorithms[1]));
  }
  if (std::set<std::string>(names.begin(), names.end()).size() == 1) names.resize(1);
  return absl::StrCat(library, ":", absl::StrJoin(names, ";"));
}

}  // namespace engram
