// Each PTX wrapper of device.cuh against what its instruction is documented to do, computed here.
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/cuda/device.cuh"
#include "kernels/scalar.h"
#include "tests/gpu/checks.h"

namespace engram::gpu {
namespace {

namespace cuda = kernels::cuda;
using Random = std::mt19937_64;

__global__ void PermuteKernel(const uint32_t* low, const uint32_t* high, const uint32_t* selectors, uint32_t* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = cuda::Permute(low[i], high[i], selectors[i]);
}

__global__ void PackKernel(const float* low, const float* high, uint32_t* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = cuda::PackBf16(low[i], high[i]);
}

__global__ void HalfKernel(uint32_t upper, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = cuda::F32FromHalf(upper << 16 | i);
}

__global__ void MmaKernel(const float* sums, const uint32_t* a, const uint32_t* b, float* out) {
  const unsigned lane = threadIdx.x;
  float sum[4];
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) sum[i] = sums[lane * 4 + i];
  for (int i = 0; i < 4; ++i) left[i] = a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) right[i] = b[lane * 2 + i];
  cuda::Mma(sum, left, right);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = sum[i];
}

// Two groups of copies, each waited for on its own; every third copy is not valid.
__global__ void CopyKernel(const uint4* from, uint4* out) {
  ENGRAM_SHARED(uint4, shared, 2 * 64);
  const unsigned i = threadIdx.x;
  for (unsigned group = 0; group < 2; ++group) {
    const unsigned at = group * 64 + i;
    shared[at] = make_uint4(~0U, ~0U, ~0U, ~0U);
    cuda::CopyAsync16(&shared[at], at % 3 == 0 ? nullptr : from + at, at % 3 != 0);
    cuda::CommitCopies();
  }
  cuda::WaitCopies<1>();
  out[i] = shared[i];
  cuda::WaitCopies<0>();
  __syncthreads();
  out[64 + i] = shared[64 + (i + 1) % 64];  // another thread's
}

__global__ void LoadKernel(const uint4* four, const uint2* two, uint4* four_out, uint2* two_out) {
  four_out[threadIdx.x] = cuda::LoadOnce(four + threadIdx.x);
  two_out[threadIdx.x] = cuda::LoadOnce(two + threadIdx.x);
}

template <typename... Params, typename... Args>
void Launch(const Device& device, void (*kernel)(Params...), int blocks, int threads, Args... args) {
  Must(cuda::Launch(kernel, blocks, threads, 0, device.stream(), args...), "launching");
}

std::vector<uint32_t> RandomWords(Random& random, size_t count) {
  std::vector<uint32_t> words(count);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random());
  return words;
}

void PermutePicksBytes(const Device& device) {
  constexpr int kCount = 4096;
  Random random(1);
  const auto low = RandomWords(random, kCount), high = RandomWords(random, kCount),
             selectors = RandomWords(random, kCount);
  const Guarded<uint32_t> on_low(device, low), on_high(device, high), on_selectors(device, selectors);
  const Guarded<uint32_t> out(device, kCount);
  Launch(device, &PermuteKernel, kCount / 256, 256, on_low.data(), on_high.data(), on_selectors.data(), out.data());
  const auto got = out.Read();
  for (size_t i = 0; i < kCount; ++i) {
    uint32_t want = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t pick = selectors[i] >> (4 * byte) & 7, sign = selectors[i] >> (4 * byte) & 8;
      uint32_t value = (pick < 4 ? low[i] >> (8 * pick) : high[i] >> (8 * (pick - 4))) & 0xFF;
      if (sign != 0) value = value >= 0x80 ? 0xFF : 0;
      want |= value << (8 * byte);
    }
    Expect(got[i] == want, "selector " + std::to_string(selectors[i]) + " gives " + std::to_string(got[i]));
  }
}

void PackRoundsToNearestEven(const Device& device) {
  constexpr int kCount = 65536;
  Random random(2);
  std::vector<float> low(kCount), high(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    // Every upper half, subnormals, infinities and NaNs too, with ties and their neighbours below it.
    constexpr uint32_t kLower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    low[i] = kernels::F32FromBits(static_cast<uint32_t>(i) << 16 | kLower[i % 6]);
    high[i] = kernels::F32FromBits(static_cast<uint32_t>(random()));
  }
  const Guarded<float> on_low(device, low), on_high(device, high);
  const Guarded<uint32_t> out(device, kCount);
  Launch(device, &PackKernel, kCount / 256, 256, on_low.data(), on_high.data(), out.data());
  std::vector<Bf16> got, want;
  for (const uint32_t pair : out.Read()) {
    got.push_back(static_cast<Bf16>(pair));
    got.push_back(static_cast<Bf16>(pair >> 16));
  }
  for (size_t i = 0; i < kCount; ++i) {
    want.push_back(kernels::Bf16FromF32(low[i]));
    want.push_back(kernels::Bf16FromF32(high[i]));
  }
  ExpectSame(got, want, "pairs");
}

void HalvesAreExact(const Device& device) {
  constexpr int kCount = 65536;
  const Guarded<float> out(device, kCount);
  for (const uint32_t upper : {0U, 0xFFFFU}) {
    Launch(device, &HalfKernel, kCount / 256, 256, upper, out.data());
    const auto got = out.Read();
    for (uint32_t bits = 0; bits < kCount; ++bits) {
      const float want = kernels::F32FromF16(static_cast<uint16_t>(bits));
      const bool same =
          std::isnan(want) ? std::isnan(got[bits]) : kernels::F32Bits(got[bits]) == kernels::F32Bits(want);
      Expect(same, "f16 bits " + std::to_string(bits) + " under " + std::to_string(upper));
    }
  }
}

// Whole numbers of which every sum is exact in f32: whatever the order, the bits are these.
void MmaMultipliesItsLayout(const Device& device) {
  Random random(3);
  for (int round = 0; round < 32; ++round) {
    std::vector<int> a(16 * 16), b(16 * 8), sum(16 * 8);
    for (auto* matrix : {&a, &b, &sum}) {
      for (int& value : *matrix) value = static_cast<int>(random() % 61) - 30;
    }
    const auto pair = [](int low, int high) {
      return static_cast<uint32_t>(kernels::Bf16FromF32(static_cast<float>(high))) << 16 |
             kernels::Bf16FromF32(static_cast<float>(low));
    };
    std::vector<uint32_t> lanes_a(32 * 4), lanes_b(32 * 2);
    std::vector<float> lanes_sum(32 * 4), want(32 * 4);
    for (size_t lane = 0; lane < 32; ++lane) {
      const size_t group = lane / 4, quad = lane % 4;
      for (size_t i = 0; i < 4; ++i) {
        const size_t at = (group + 8 * (i % 2)) * 16 + 2 * quad + 8 * (i / 2);
        lanes_a[lane * 4 + i] = pair(a[at], a[at + 1]);
        const size_t row = group + 8 * (i / 2), column = 2 * quad + i % 2;
        int total = sum[row * 8 + column];
        lanes_sum[lane * 4 + i] = static_cast<float>(total);
        for (size_t k = 0; k < 16; ++k) total += a[row * 16 + k] * b[k * 8 + column];
        want[lane * 4 + i] = static_cast<float>(total);
      }
      for (size_t i = 0; i < 2; ++i) {
        const size_t row = 2 * quad + 8 * i;
        lanes_b[lane * 2 + i] = pair(b[row * 8 + group], b[(row + 1) * 8 + group]);
      }
    }
    const Guarded<uint32_t> on_a(device, lanes_a), on_b(device, lanes_b);
    const Guarded<float> on_sum(device, lanes_sum), out(device, 32 * 4);
    Launch(device, &MmaKernel, 1, 32, on_sum.data(), on_a.data(), on_b.data(), out.data());
    const auto got = out.Read();
    for (size_t i = 0; i < got.size(); ++i) {
      Expect(got[i] == want[i], "lane " + std::to_string(i / 4) + ", sum " + std::to_string(i % 4) + " is " +
                                    std::to_string(got[i]) + " and not " + std::to_string(want[i]));
    }
  }
}

bool Same(const uint4& a, const uint4& b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

std::vector<uint4> RandomQuads(Random& random, size_t count) {
  std::vector<uint4> quads(count);
  for (uint4& quad : quads) {
    const auto words = RandomWords(random, 4);
    quad = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return quads;
}

void CopiesArriveByGroup(const Device& device) {
  Random random(4);
  const auto from = RandomQuads(random, 128);
  const Guarded<uint4> on_from(device, from), out(device, 128);
  Launch(device, &CopyKernel, 1, 64, on_from.data(), out.data());
  const auto got = out.Read();
  for (size_t i = 0; i < 128; ++i) {
    const size_t at = i < 64 ? i : 64 + (i + 1) % 64;
    const uint4 want = at % 3 == 0 ? make_uint4(0, 0, 0, 0) : from[at];
    Expect(Same(got[i], want), "copy " + std::to_string(at) + (at % 3 == 0 ? " of nothing" : ""));
  }
}

void LoadsReadTheirBytes(const Device& device) {
  Random random(5);
  const auto four = RandomQuads(random, 64);
  std::vector<uint2> two;
  for (const uint4& quad : four) two.push_back(make_uint2(quad.w, quad.y));
  const Guarded<uint4> on_four(device, four), four_out(device, 64);
  const Guarded<uint2> on_two(device, two), two_out(device, 64);
  Launch(device, &LoadKernel, 1, 64, on_four.data(), on_two.data(), four_out.data(), two_out.data());
  const auto got_four = four_out.Read();
  const auto got_two = two_out.Read();
  for (size_t i = 0; i < 64; ++i) {
    Expect(Same(got_four[i], four[i]), "16 bytes, " + std::to_string(i));
    Expect(got_two[i].x == two[i].x && got_two[i].y == two[i].y, "8 bytes, " + std::to_string(i));
  }
}

}  // namespace

std::vector<Check> InstructionChecks() {
  return {{"instruction: prmt picks bytes and signs", true, PermutePicksBytes},
          {"instruction: cvt.bf16x2 rounds to nearest even, NaN stays", true, PackRoundsToNearestEven},
          {"instruction: cvt.f32.f16 is exact for all 65536", true, HalvesAreExact},
          {"instruction: mma.m16n8k16 has the layout of device.cuh", true, MmaMultipliesItsLayout},
          {"instruction: cp.async groups, zeros where not valid", true, CopiesArriveByGroup},
          {"instruction: ld.global.nc of 16 and 8 bytes", true, LoadsReadTheirBytes}};
}

}  // namespace engram::gpu
