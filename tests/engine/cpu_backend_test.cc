// The step on the CPU: whatever layers, forms and calls share it, every slice is what the reference kernels make of it.
#include "server/engine/cpu_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace engram {
namespace {

float FromBf16(kernels::Bf16 bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value = 0;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

class CpuBackendTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + GetParam(), {});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    shape_ = ShapeOf(*model_);
  }

  // A call with outputs of its own over the layers named.
  struct Made {
    Call call;
    std::vector<std::vector<char>> highways, outs;
  };

  std::unique_ptr<Made> Make(const std::vector<int64_t>& sequences, const std::vector<int>& layers, Form form,
                             kernels::HighwayType type) {
    auto made = std::make_unique<Made>();
    made->call.form = form;
    made->call.highway_type = type;
    for (const int64_t tokens : sequences) {
      made->call.sequences.push_back({.tokens = tokens});
      made->call.tokens += tokens;
      for (int64_t i = 0; i < shape_.max_ngram - 1 + tokens; ++i) {
        const auto id = static_cast<int32_t>(random_() % static_cast<uint32_t>(model_->geometry().compressed_vocab));
        made->call.windows.push_back(random_() % 8 == 0 ? kernels::kDead : id);
      }
    }
    for (int64_t t = 0; t < made->call.tokens; ++t) made->call.token_mask.push_back(random_() % 5 != 0);
    std::normal_distribution<float> normal;
    for (const int layer : layers) {
      std::vector<char> highway(static_cast<size_t>(made->call.tokens * HighwayBytes(shape_, type)));
      const size_t width = type == kernels::HighwayType::kF32 ? 4 : 2;
      for (size_t at = 0; at < highway.size(); at += width) {
        const float value = normal(random_);
        uint32_t word = 0;
        std::memcpy(&word, &value, 4);
        if (width == 2) word >>= 16;
        std::memcpy(highway.data() + at, &word, width);
      }
      made->highways.push_back(std::move(highway));
      made->outs.emplace_back(static_cast<size_t>(made->call.tokens * OutBytes(shape_, form, type, {})), '\x55');
      made->call.layers.push_back({.layer = layer,
                                   .highway = form == Form::kHighway ? made->highways.back().data() : nullptr,
                                   .out = made->outs.back().data()});
    }
    return made;
  }

  std::shared_ptr<const EngramModel> model_;
  StepShape shape_;
  std::mt19937 random_{5};
};

TEST_P(CpuBackendTest, AMixedStepIsEachCallAloneOnTheReferenceKernels) {
  const int last = static_cast<int>(model_->layers().size()) - 1;
  std::vector<std::unique_ptr<Made>> calls;
  calls.push_back(Make({3, 1}, {0, last}, Form::kHighway, kernels::HighwayType::kF32));
  calls.push_back(Make({5}, {last}, Form::kKv, kernels::HighwayType::kF32));
  calls.push_back(Make({1}, {0}, Form::kHighway, kernels::HighwayType::kBf16));
  calls.push_back(Make({2, 2, 2}, {last, 0}, Form::kKv, kernels::HighwayType::kF32));

  const auto cpu = CpuBackend::Create(model_, kernels::CpuKernels(), {.threads = 3, .max_batch_tokens = 64});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  std::vector<Piece> pieces;
  for (const auto& made : calls) pieces.push_back({&made->call, 0, made->call.tokens});
  ASSERT_TRUE((*cpu)->Run(BuildStep(pieces, shape_), [](size_t) {}).ok());

  const auto reference =
      CpuBackend::Create(model_, kernels::ReferenceKernels(), {.threads = 1, .max_batch_tokens = 64});
  ASSERT_TRUE(reference.ok()) << reference.status();
  for (const auto& made : calls) {
    const std::vector<std::vector<char>> mixed = made->outs;
    for (std::vector<char>& out : made->outs) std::fill(out.begin(), out.end(), '\x33');
    ASSERT_TRUE((*reference)->Run(BuildStep({{&made->call, 0, made->call.tokens}}, shape_), [](size_t) {}).ok());
    for (size_t l = 0; l < mixed.size(); ++l) {
      if (made->call.form == Form::kKv) {
        EXPECT_EQ(mixed[l], made->outs[l]) << "kv: the two twins accumulate in the same order";
        continue;
      }
      const bool f32 = made->call.highway_type == kernels::HighwayType::kF32;
      for (size_t at = 0; at < mixed[l].size(); at += f32 ? 4 : 2) {
        float a = 0, b = 0;
        if (f32) {
          std::memcpy(&a, mixed[l].data() + at, 4);
          std::memcpy(&b, made->outs[l].data() + at, 4);
        } else {
          kernels::Bf16 x = 0, y = 0;
          std::memcpy(&x, mixed[l].data() + at, 2);
          std::memcpy(&y, made->outs[l].data() + at, 2);
          a = FromBf16(x);
          b = FromBf16(y);
        }
        ASSERT_NEAR(a, b, std::abs(b) * (f32 ? 1e-6 : 8e-3) + 1e-6) << "layer " << l << " byte " << at;
      }
    }
  }
}

TEST_P(CpuBackendTest, AStepBeyondItsSizeIsRefusedNotOverrun) {
  const auto cpu = CpuBackend::Create(model_, kernels::CpuKernels(), {.threads = 1, .max_batch_tokens = 4});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  const auto made = Make({5}, {0}, Form::kKv, kernels::HighwayType::kF32);
  EXPECT_EQ((*cpu)->Run(BuildStep({{&made->call, 0, 5}}, shape_), [](size_t) {}).status().code(),
            absl::StatusCode::kInternal);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, CpuBackendTest,
                         ::testing::Values("/tiny/tiny.gguf", "/split/split-00001-of-00002.gguf"));

}  // namespace
}  // namespace engram
