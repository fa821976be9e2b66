#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstring>
#include <memory>
#include <vector>

#include "tests/bench/peers.h"

namespace engram::kernels {
namespace {

// Everything that one mul_mat needs. Weights lie in a buffer of their own: its type decides their layout.
class MulMat {
 public:
  MulMat(const ProjectionWeights& weights, int64_t tokens, int threads)
      : backend_(ggml_backend_cpu_init()),
        w_context_(ggml_init({ggml_tensor_overhead() * 4, nullptr, true})),
        context_(ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true})) {
    ggml_backend_cpu_set_n_threads(backend_, threads);
    w_ = ggml_new_tensor_2d(w_context_, GGML_TYPE_Q2_K, weights.inputs, weights.outputs);
    x_ = ggml_new_tensor_2d(context_, GGML_TYPE_F32, weights.inputs, tokens);
  }
  ~MulMat() {
    ggml_backend_buffer_free(buffer_);
    ggml_backend_buffer_free(w_buffer_);
    ggml_free(context_);
    ggml_free(w_context_);
    ggml_backend_free(backend_);
  }
  MulMat(const MulMat&) = delete;
  MulMat& operator=(const MulMat&) = delete;

  // False where a buffer of that type cannot hold or multiply such weights.
  bool Fill(ggml_backend_buffer_type_t type, const uint8_t* q2k, const std::vector<float>& x) {
    w_buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(w_context_, type);
    if (w_buffer_ == nullptr) return false;
    ggml_backend_buffer_set_usage(w_buffer_, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_tensor* kv = ggml_mul_mat(context_, w_, x_);
    graph_ = ggml_new_graph(context_);
    ggml_build_forward_expand(graph_, kv);
    if (!ggml_backend_supports_op(backend_, kv)) return false;
    ggml_backend_tensor_set(w_, q2k, 0, ggml_row_size(GGML_TYPE_Q2_K, w_->ne[0]) * static_cast<size_t>(w_->ne[1]));
    buffer_ = ggml_backend_alloc_ctx_tensors(context_, backend_);
    if (buffer_ == nullptr) return false;
    ggml_backend_tensor_set(x_, x.data(), 0, x.size() * sizeof(float));
    return true;
  }

  void Run() { ggml_backend_graph_compute(backend_, graph_); }

 private:
  ggml_backend_t backend_;
  ggml_context* w_context_;
  ggml_context* context_;
  ggml_tensor* w_;
  ggml_tensor* x_;
  ggml_cgraph* graph_ = nullptr;
  ggml_backend_buffer_t w_buffer_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
};

std::function<void()> Prepare(ggml_backend_buffer_type_t type, const ProjectionWeights& weights, const Bf16* x,
                              int64_t tokens, int threads) {
  std::vector<float> values(static_cast<size_t>(tokens * weights.inputs));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t bits = uint32_t{x[i]} << 16;
    std::memcpy(&values[i], &bits, sizeof bits);
  }
  auto work = std::make_shared<MulMat>(weights, tokens, threads);
  if (!work->Fill(type, weights.q2k, values)) return {};
  return [work] { work->Run(); };
}

}  // namespace

std::function<void()> PrepareGgml(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, int threads) {
  return Prepare(ggml_backend_cpu_buffer_type(), weights, x, tokens, threads);
}

std::function<void()> PrepareGgmlRepacked(const ProjectionWeights& weights, const Bf16* x, int64_t tokens,
                                          int threads) {
  ggml_backend_reg_t registry = ggml_backend_cpu_reg();
  auto extra_types = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
  if (extra_types == nullptr) return {};
  ggml_backend_buffer_type_t* types = extra_types(ggml_backend_reg_dev_get(registry, 0));
  for (; types != nullptr && *types != nullptr; ++types) {
    if (std::strcmp(ggml_backend_buft_name(*types), "CPU_REPACK") == 0) {
      return Prepare(*types, weights, x, tokens, threads);
    }
  }
  return {};
}

}  // namespace engram::kernels
