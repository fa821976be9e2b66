#include <omp.h>

#include <cstring>
#include <dnnl.hpp>
#include <memory>

#include "tests/bench/peers.h"

namespace engram::kernels {
namespace {

struct Matmul {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::matmul matmul;
  dnnl::memory x, w, kv;
};

}  // namespace

std::function<void()> PrepareOneDnn(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, int threads) try {
  using dnnl::memory;
  omp_set_num_threads(threads);
  const auto bf16 = memory::data_type::bf16;
  const memory::desc x_desc({tokens, weights.inputs}, bf16, memory::format_tag::ab);
  const memory::desc kv_desc({tokens, weights.outputs}, bf16, memory::format_tag::ab);
  const memory::desc any_desc({weights.inputs, weights.outputs}, bf16, memory::format_tag::any);
  const memory::desc ours_desc({weights.inputs, weights.outputs}, bf16, memory::format_tag::ba);

  auto work = std::make_shared<Matmul>();
  const dnnl::matmul::primitive_desc plan({x_desc, any_desc, kv_desc}, work->engine);
  work->matmul = dnnl::matmul(plan);
  memory ours(ours_desc, work->engine, const_cast<Bf16*>(weights.bf16));
  work->w = memory(plan.weights_desc(), work->engine);
  dnnl::reorder(ours, work->w).execute(work->stream, ours, work->w);
  work->x = memory(x_desc, work->engine);
  std::memcpy(work->x.get_data_handle(), x, static_cast<size_t>(tokens * weights.inputs) * sizeof *x);
  work->kv = memory(kv_desc, work->engine);
  work->stream.wait();
  return [work] {
    work->matmul.execute(work->stream,
                         {{DNNL_ARG_SRC, work->x}, {DNNL_ARG_WEIGHTS, work->w}, {DNNL_ARG_DST, work->kv}});
    work->stream.wait();
  };
} catch (const dnnl::error&) {
  return {};  // no bf16 on this machine
}

}  // namespace engram::kernels
