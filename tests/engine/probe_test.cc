// The probe, on models and backends that are right, and on such as went wrong in one place.
#include "server/engine/probe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/prober.h"

namespace engram {
namespace {

using ::testing::HasSubstr;

// A loaded model whose resident memory is a copy that the test writes to; the file is read as ever.
class CopiedModel final : public EngramModel {
 public:
  explicit CopiedModel(std::shared_ptr<const EngramModel> from) : from_(std::move(from)) {
    path_ = from_->path();
    geometry_ = from_->geometry();
    token_map_.assign(from_->token_map().begin(), from_->token_map().end());
    hash_tables_ = from_->hash_tables();
    layers_.assign(from_->layers().begin(), from_->layers().end());
    tables.resize(layers_.size());
    wkv.resize(layers_.size());
    qk.resize(layers_.size());
    for (size_t i = 0; i < layers_.size(); ++i) {
      EngramLayer& layer = layers_[i];
      tables[i].assign(layer.table.bytes, layer.table.bytes + layer.table.rows * kernels::kQ2KBlockBytes);
      layer.table.bytes = tables[i].data();
      const int64_t bytes = layer.wkv.outputs * OutputBytes(i);
      if (layer.wkv.q2k != nullptr) {
        wkv[i].assign(layer.wkv.q2k, layer.wkv.q2k + bytes);
        layer.wkv.q2k = wkv[i].data();
      } else {
        wkv[i].resize(static_cast<size_t>(bytes));
        std::memcpy(wkv[i].data(), layer.wkv.bf16, static_cast<size_t>(bytes));
        layer.wkv.bf16 = reinterpret_cast<const kernels::Bf16*>(wkv[i].data());
      }
      qk[i].assign(layer.gate.qk, layer.gate.qk + geometry_.highway_values());
      layer.gate.qk = qk[i].data();
    }
  }

  absl::Status ReadRowsFromFile(size_t layer, int64_t first, int64_t count, uint8_t* out) const override {
    return from_->ReadRowsFromFile(layer, first, count, out);
  }
  absl::Status ReadTableFromFile(size_t layer, int64_t at, int64_t bytes, uint8_t* out) const override {
    return from_->ReadTableFromFile(layer, at, bytes, out);
  }

  void WillReadRows(size_t, absl::Span<const int64_t>) const override {}

  // Of one output's weights.
  int64_t OutputBytes(size_t layer) const {
    const kernels::ProjectionWeights& weights = layers_[layer].wkv;
    return weights.q2k != nullptr ? weights.inputs / kernels::kRowValues * kernels::kQ2KBlockBytes : weights.inputs * 2;
  }

  std::vector<std::vector<uint8_t>> tables;
  std::vector<std::vector<uint8_t>> wkv;  // Q2_K blocks or bf16
  std::vector<std::vector<float>> qk;

 private:
  const std::shared_ptr<const EngramModel> from_;
};

// Computes as the CPU does, and then lets the test spoil what came out.
class SpoiledBackend final : public Backend {
 public:
  using Spoil = std::function<void(const StepSlice&, int layer)>;
  SpoiledBackend(const std::shared_ptr<const EngramModel>& model, Spoil spoil)
      : cpu_(CpuBackend::Create(model, kernels::CpuKernels(), {.threads = 2, .max_batch_tokens = 64}).value()),
        spoil_(std::move(spoil)) {}

  void Start(const Step& step, LayerDone layer_done, StepDone done) override {
    absl::StatusOr<StepTimes> times = cpu_->Run(step, layer_done);
    for (const StepLayer& layer : step.layers) {
      for (const StepSlice& slice : layer.slices) spoil_(slice, layer.layer);
    }
    done(std::move(times));
  }
  StagingMemory TakePreparedKv(int64_t bytes) override { return cpu_->TakePreparedKv(bytes); }
  std::string name() const override { return "spoiled"; }
  std::string numerics_id() const override { return "spoiled"; }

 private:
  const std::unique_ptr<CpuBackend> cpu_;
  const Spoil spoil_;
};

class ProbeTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + GetParam(), {});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = std::make_shared<CopiedModel>(*model);
    auto probe = Probe::Make(model_, 2);
    ASSERT_TRUE(probe.ok()) << probe.status();
    probe_ = *std::move(probe);
  }

  std::unique_ptr<Engine> EngineOn(const kernels::Kernels& kernels, int64_t batch) {
    return std::make_unique<Engine>(model_, CpuBackend::Create(model_, kernels, CpuBackendOptions{2, batch}).value(),
                                    ShapeOf(*model_), EngineOptions{batch}, metrics_);
  }

  // What the probe finds.
  std::string Found() {
    auto engine = EngineOn(kernels::CpuKernels(), 64);
    const absl::Status status = probe_->Run(*engine);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    return std::string(status.message());
  }

  std::string FoundIn(SpoiledBackend::Spoil spoil) {
    Engine engine(model_, std::make_unique<SpoiledBackend>(model_, std::move(spoil)), ShapeOf(*model_),
                  EngineOptions{64}, metrics_);
    const absl::Status status = probe_->Run(engine);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    return std::string(status.message());
  }

  int64_t LayerId(size_t layer) const { return model_->layers()[layer].layer_id; }

  Metrics metrics_;
  std::shared_ptr<CopiedModel> model_;
  std::unique_ptr<const Probe> probe_;
};

TEST_P(ProbeTest, PassesOnEveryTwinAndHoweverItsCallsAreCut) {
  for (const int64_t batch : {1, 2, 1024}) {
    auto cpu = EngineOn(kernels::CpuKernels(), batch);
    EXPECT_TRUE(probe_->Run(*cpu).ok()) << probe_->Run(*cpu);
    auto reference = EngineOn(kernels::ReferenceKernels(), batch);
    EXPECT_TRUE(probe_->Run(*reference).ok());
  }
  // Two ends of each column's range, where one ends the next begins; and some others.
  EXPECT_GE(probe_->rows(), static_cast<int64_t>(model_->layers().size()) * 2 * model_->geometry().columns);
}

TEST_P(ProbeTest, NamesTheRowOfTheResidentTableThatIsNotTheFiles) {
  const kernels::HashTables& tables = model_->hash_tables();
  for (size_t layer = 0; layer < model_->layers().size(); ++layer) {
    const size_t column = layer * static_cast<size_t>(tables.columns()) + 1;
    for (const int64_t row :
         {int64_t{0}, tables.offsets[column] - 1, tables.offsets[column],
          tables.offsets[column] + tables.primes[column] - 1, model_->layers()[layer].table.rows - 1}) {
      uint8_t& byte = model_->tables[layer][static_cast<size_t>(row * kernels::kQ2KBlockBytes + 17)];
      byte ^= 0x20;
      EXPECT_THAT(Found(), HasSubstr(absl::StrCat(GetParam(), ": probe: layer ", LayerId(layer), ", row ", row,
                                                  ": byte 17 of the row is read as 0x")));
      byte ^= 0x20;
    }
  }
  auto engine = EngineOn(kernels::CpuKernels(), 64);
  EXPECT_TRUE(probe_->Run(*engine).ok()) << "the table is as it was";
}

TEST_P(ProbeTest, NoticesWeightsThatWentBadSinceLoad) {
  const size_t last = model_->layers().size() - 1;
  const std::string where = absl::StrCat("layer ", LayerId(last), ", token ");
  // A whole output's weights: one of thousands of terms could hide in the tolerance.
  const int64_t bytes = model_->OutputBytes(last);
  const auto weights = model_->wkv[last].begin() + 3 * bytes;
  const std::vector<uint8_t> kept(weights, weights + bytes);
  std::fill(weights, weights + bytes, uint8_t{0x40});
  const std::string found = Found();
  EXPECT_THAT(found, HasSubstr(where + "0 of the step: kv value 3 is "));
  std::copy(kept.begin(), kept.end(), weights);

  std::fill(model_->qk[last].begin(), model_->qk[last].end(), 100.0f);
  EXPECT_THAT(Found(), HasSubstr(where + "0 of the step: highway value 0 is "));
}

TEST_P(ProbeTest, NoticesWhatABackendGetsWrong) {
  const int64_t columns = model_->geometry().columns;
  EXPECT_THAT(FoundIn([&](const StepSlice& slice, int) {
                if (slice.form == Form::kRowsBf16) static_cast<uint8_t*>(slice.out)[2 * 256 * (columns - 1)] ^= 1;
              }),
              HasSubstr("value 0 of the row is decoded as bf16 0x"));
  EXPECT_THAT(FoundIn([&](const StepSlice& slice, int) {
                if (slice.form == Form::kRowsNative) static_cast<uint8_t*>(slice.out)[5] = 1;  // of id -1
              }),
              HasSubstr("row -1: byte 5 of the row is read as 0x01; expected 0x00"));
  EXPECT_THAT(FoundIn([&](const StepSlice& slice, int layer) {
                if (slice.form == Form::kKv && layer == 1) static_cast<uint8_t*>(slice.out)[1] ^= 0x80;
              }),
              HasSubstr(absl::StrCat("layer ", LayerId(1), ", token 0 of the step: kv value 0 is ")));
  // The masked token's highway must be copied to the bit.
  const int64_t token_bytes = model_->geometry().highway_values() * 4;
  EXPECT_THAT(FoundIn([&](const StepSlice& slice, int) {
                if (slice.form == Form::kHighway) static_cast<uint8_t*>(slice.out)[2 * token_bytes] ^= 1;
              }),
              HasSubstr("token 2 of the step: highway value 0 is "));
}

TEST_P(ProbeTest, IsInNoMetricOfCalls) {
  auto engine = EngineOn(kernels::CpuKernels(), 64);
  ASSERT_TRUE(probe_->Run(*engine).ok());
  engine.reset();
  for (const auto& family : metrics_.registry()->Collect()) {
    for (const auto& metric : family.metric) {
      EXPECT_EQ(metric.counter.value, 0) << family.name;
      EXPECT_EQ(metric.histogram.sample_count, 0u) << family.name;
    }
  }
}

TEST_P(ProbeTest, TheProberReportsFailureAndRecovery) {
  std::atomic<bool> wrong{false};
  absl::Notification passed, failed, passed_again;
  Engine spoiled(model_,
                 std::make_unique<SpoiledBackend>(model_,
                                                  [&](const StepSlice& slice, int) {
                                                    if (wrong) static_cast<uint8_t*>(slice.out)[5] ^= 1;
                                                  }),
                 ShapeOf(*model_), EngineOptions{64}, metrics_);
  const Prober prober(*probe_, spoiled, absl::Milliseconds(1), [&](const absl::Status& status) {
    if (status.ok() && !passed.HasBeenNotified()) {
      wrong = true;
      passed.Notify();
    } else if (!status.ok() && !failed.HasBeenNotified()) {
      wrong = false;
      failed.Notify();
    } else if (status.ok() && failed.HasBeenNotified() && !passed_again.HasBeenNotified()) {
      passed_again.Notify();
    }
  });
  passed.WaitForNotification();
  failed.WaitForNotification();
  passed_again.WaitForNotification();
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ProbeTest, ::testing::Values("/tiny/tiny.gguf", "/split/split-00001-of-00002.gguf"));

}  // namespace
}  // namespace engram
