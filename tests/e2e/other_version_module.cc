// A CUDA module of a version that no server expects: nothing of its table may be called.
#include "kernels/cuda/module.h"

extern "C" __attribute__((visibility("default"))) const engram::kernels::cuda::Module* engram_cuda_module() {
  static const engram::kernels::cuda::Module module = [] {
    engram::kernels::cuda::Module made{};
    made.version = 99;
    return made;
  }();
  return &module;
}
