// cuBLASLt behind the module: near the exact sums, one algorithm per class whatever the number of tokens.
#include <algorithm>
#include <memory>

#include "tests/gpu/checks.h"
#include "tests/kernels/twins.h"

namespace engram::gpu {
namespace {

using kernels::Normal;
using kernels::Random;
using kernels::cuda::GemmClass;

struct Gemm {
  Gemm(const Device& on, int64_t outputs_, int64_t inputs_, int64_t most_)
      : device(on), outputs(outputs_), inputs(inputs_), most(most_), workspace(on, on.module().gemm_workspace_bytes()) {
    Random random(30);
    for (int64_t i = 0; i < outputs * inputs; ++i) weights.push_back(kernels::Bf16FromF32(Normal(random) * 0.1F));
    for (int64_t i = 0; i < most * inputs; ++i) x.push_back(kernels::Bf16FromF32(Normal(random)));
    wkv.emplace_back(new Guarded<Bf16>(device, weights));
    Must(device.module().create_gemm(wkv[0]->data(), outputs, inputs, most, &gemm), "create_gemm");
  }
  ~Gemm() { device.module().destroy_gemm(gemm); }
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // Padding rows of x are NaN.
  std::vector<Bf16> Run(GemmClass shape, int64_t first, int64_t tokens) const {
    const int64_t padded = device.module().padded_tokens(tokens);
    std::vector<Bf16> some(static_cast<size_t>(padded * inputs), 0xFFFF);
    std::copy_n(x.begin() + first * inputs, tokens * inputs, some.begin());
    const Guarded<Bf16> on_x(device, some), kv(device, padded * outputs);
    Must(device.module().run_gemm(gemm, shape, on_x.data(), tokens, kv.data(), workspace.data(), device.stream()),
         "run_gemm");
    std::vector<Bf16> all = kv.Read();
    all.resize(static_cast<size_t>(tokens * outputs));
    return all;
  }

  std::vector<double> Exact(int64_t token) const {
    std::vector<double> sums;
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < inputs; ++k) {
        sum += static_cast<double>(kernels::F32FromBf16(weights[static_cast<size_t>(o * inputs + k)])) *
               kernels::F32FromBf16(x[static_cast<size_t>(token * inputs + k)]);
      }
      sums.push_back(sum);
    }
    return sums;
  }

  const Device& device;
  const int64_t outputs, inputs, most;
  std::vector<Bf16> weights, x;
  std::vector<std::unique_ptr<Guarded<Bf16>>> wkv;
  Guarded<uint8_t> workspace;
  kernels::cuda::Gemm* gemm = nullptr;
};

void NearExactWithOneSetOfBits(const Gemm& gemm) {
  const int64_t outputs = gemm.outputs;
  for (const GemmClass shape : {GemmClass::kMedium, GemmClass::kLong}) {
    const auto all = gemm.Run(shape, 0, gemm.most);
    const std::string name = std::string(shape == GemmClass::kMedium ? "medium, " : "long, ") + std::to_string(outputs);
    for (const int64_t t : {int64_t{0}, gemm.most / 3, gemm.most - 1}) {
      ExpectNear(all.data() + t * outputs, gemm.Exact(t), name + " outputs, token " + std::to_string(t));
    }
    for (const int64_t tokens : {1, 5, 63, 64, 65, 127, 200, 256, 257, 512, 1000, 2047}) {
      if (tokens > gemm.most) break;
      for (const int64_t first : {int64_t{0}, gemm.most - tokens}) {
        const std::vector<Bf16> want(all.begin() + first * outputs, all.begin() + (first + tokens) * outputs);
        ExpectSame(gemm.Run(shape, first, tokens), want,
                   name + " outputs, T = " + std::to_string(tokens) + " from token " + std::to_string(first));
      }
    }
  }
}

void SmallShapes(const Device& device) { NearExactWithOneSetOfBits(Gemm(device, 136, 768, 200)); }
void LargeShapes(const Device& device) {
  NearExactWithOneSetOfBits(Gemm(device, 2560, 6144, 2048));
  NearExactWithOneSetOfBits(Gemm(device, 1288, 768, 2048));
}

void ShapesItDoesNotTake(const Device& device) {
  const Gemm gemm(device, 256, 256, 100);
  const Guarded<Bf16> x(device, 128 * 256), kv(device, 128 * 256);
  const auto run = [&](int64_t tokens, const Bf16* from) {
    return device.module().run_gemm(gemm.gemm, GemmClass::kMedium, from, tokens, kv.data(), gemm.workspace.data(),
                                    device.stream());
  };
  Expect(run(101, x.data()) != 0, "more tokens than most_tokens");
  Expect(run(-1, x.data()) != 0, "-1 tokens");
  Expect(run(1, x.data() + 1) != 0, "x that is not aligned");
  Expect(run(0, x.data()) == 0, "no tokens are nothing to do");
  kernels::cuda::GemmInfo info;
  Must(device.module().gemm_info(gemm.gemm, &info), "gemm_info");
  Expect(std::string(info.library).starts_with("cublasLt-"), info.library);
  Expect(info.algorithms[0][0] != 0 && info.algorithms[1][0] != 0, "an algorithm without a name");
}

}  // namespace

std::vector<Check> GemmChecks() {
  return {{"gemm: near the exact sums, bits of a class do not depend on T; NaN padding stays apart, small", true,
           SmallShapes},
          {"gemm: near the exact sums, bits of a class do not depend on T; NaN padding stays apart, up to 2560 x 6144",
           false, LargeShapes},
          {"gemm: what it refuses and what it says of itself", true, ShapesItDoesNotTake}};
}

}  // namespace engram::gpu
