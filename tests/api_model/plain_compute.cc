#include "tests/api_model/plain_compute.h"

#include "server/engine/cpu_backend.h"

namespace engram {
namespace {

template <typename T>
void AppendBytes(const T* values, int64_t count, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(values), static_cast<size_t>(count) * sizeof(T));
}

}  // namespace

PlainCompute::PlainCompute(std::shared_ptr<const EngramModel> model)
    : model_(std::move(model)), shape_(ShapeOf(*model_)) {}

PlainToken PlainCompute::TokenAt(absl::Span<const int32_t> window, bool live) {
  std::vector<int64_t>& ids = ids_[{window.begin(), window.end()}];
  if (ids.empty()) {
    ids.resize(static_cast<size_t>(shape_.layers * shape_.columns));
    kernels::CpuKernels().hash_window(model_->hash_tables(), window.data(), 1, ids.data(), workers_);
  }
  return {ids, live};
}

const PlainCompute::Kv& PlainCompute::KvOf(const PlainToken& token, int layer) {
  const auto first = token.ids.begin() + int64_t{layer} * shape_.columns;
  Kv& kv = kv_[{layer, {first, first + shape_.columns}}];
  if (kv.empty()) {
    const EngramLayer& weights = model_->layers()[static_cast<size_t>(layer)];
    std::vector<kernels::Bf16> rows(static_cast<size_t>(model_->geometry().inputs()));
    kernels::CpuKernels().gather_rows(weights.table, &*first, shape_.columns, 1, shape_.columns, rows.data(), workers_);
    kv.resize(static_cast<size_t>(shape_.kv_values()));
    // The reference has the same bits and needs nothing packed.
    kernels::ReferenceKernels().project(weights.wkv, rows.data(), 1, kv.data(), nullptr, workers_);
  }
  return kv;
}

void PlainCompute::AppendGate(const PlainToken& token, int layer, const PlainForm& form, absl::string_view highway,
                              v1::LayerOutput& output) {
  const uint8_t mask = token.live ? 1 : 0;
  std::string out(highway.size(), '\0');
  std::vector<float> gates(static_cast<size_t>(shape_.copies));
  kernels::CpuKernels().apply_gate(model_->layers()[static_cast<size_t>(layer)].gate,
                                   {.kv = KvOf(token, layer).data(),
                                    .token_mask = &mask,
                                    .tokens = 1,
                                    .type = form.type,
                                    .highway = highway.data(),
                                    .out = form.form == Form::kHighway ? out.data() : nullptr,
                                    .gates = gates.data()},
                                   workers_);
  if (form.form == Form::kHighway) {
    output.mutable_highway()->append(out);
  } else {
    AppendBytes(gates.data(), shape_.copies, *output.mutable_gates());
  }
}

void PlainCompute::AppendRows(const int64_t* ids, int layer, const PlainForm& form, std::string& rows) {
  const kernels::TableView& table = model_->layers()[static_cast<size_t>(layer)].table;
  const int64_t end = form.slice.whole() ? shape_.columns : form.slice.end;
  for (int64_t column = form.slice.begin; column < end; ++column) {
    if (form.form == Form::kRowsBf16) {
      kernels::Bf16 row[kernels::kRowValues];
      kernels::CpuKernels().gather_rows(table, ids + column, 1, 1, 1, row, workers_);
      AppendBytes(row, kernels::kRowValues, rows);
    } else if (ids[column] < 0) {
      rows.append(kernels::kQ2KBlockBytes, '\0');
    } else {
      AppendBytes(table.bytes + ids[column] * kernels::kQ2KBlockBytes, kernels::kQ2KBlockBytes, rows);
    }
  }
}

void PlainCompute::Append(const PlainToken& token, int layer, const PlainForm& form, absl::string_view highway,
                          v1::LayerOutput& output) {
  switch (form.form) {
    case Form::kHighway:
    case Form::kGate:
    case Form::kUpdate:
      AppendGate(token, layer, form, highway, output);
      break;
    case Form::kKv: {
      const int64_t end = form.slice.whole() ? shape_.kv_values() : form.slice.end;
      AppendBytes(KvOf(token, layer).data() + form.slice.begin, end - form.slice.begin, *output.mutable_kv());
      break;
    }
    case Form::kRowsNative:
    case Form::kRowsBf16:
      AppendRows(token.ids.data() + int64_t{layer} * shape_.columns, layer, form, *output.mutable_rows());
      break;
    case Form::kPrepare:
      break;
  }
  if (form.form == Form::kUpdate || form.form == Form::kPrepare) {
    AppendBytes(KvOf(token, layer).data() + shape_.highway_values(), shape_.dim, *output.mutable_value());
  }
}

}  // namespace engram
