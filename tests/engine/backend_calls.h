// Calls with memory of their own, for tests of a backend: made at random, run in steps, compared.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/engine/backend.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/step.h"
#include "tests/engine/event.h"

namespace engram {

// What a call writes, by layer.
struct CallOutputs {
  std::vector<StagingMemory> out, gates, value;
  std::vector<int64_t> out_bytes, gates_bytes, value_bytes;
};

struct CallSpec {
  std::vector<int64_t> sequences;
  std::vector<int> layers;
  Form form = Form::kHighway;
  kernels::HighwayType type = kernels::HighwayType::kF32;
  OutputSlice slice = {};
  bool by_row_ids = false;
  int refused = -1;  // index of a sequence
};

struct MadeCall {
  Call call;
  StepShape shape;
  std::vector<StagingMemory> highways;
  CallOutputs outputs;

  // Fills all outputs with a pattern; a highway is updated in a copy.
  void Clear() {
    const auto fill = [](const std::vector<StagingMemory>& memory, const std::vector<int64_t>& bytes) {
      for (size_t i = 0; i < memory.size(); ++i) {
        if (memory[i] != nullptr) std::memset(memory[i].get(), 0x55, static_cast<size_t>(bytes[i]));
      }
    };
    fill(outputs.out, outputs.out_bytes);
    fill(outputs.gates, outputs.gates_bytes);
    fill(outputs.value, outputs.value_bytes);
  }

  // All outputs, one after the other.
  std::vector<uint8_t> Bytes() const {
    std::vector<uint8_t> all;
    const auto add = [&all](const std::vector<StagingMemory>& memory, const std::vector<int64_t>& bytes) {
      for (size_t i = 0; i < memory.size(); ++i) all.insert(all.end(), memory[i].get(), memory[i].get() + bytes[i]);
    };
    add(outputs.out, outputs.out_bytes);
    add(outputs.gates, outputs.gates_bytes);
    add(outputs.value, outputs.value_bytes);
    return all;
  }
};

class CallMaker {
 public:
  // `pool`: where highways and outputs stand.
  CallMaker(const EngramModel& model, StagingPool& pool) : model_(model), shape_(ShapeOf(model)), pool_(pool) {}

  std::unique_ptr<MadeCall> Make(const CallSpec& spec) {
    auto made = std::make_unique<MadeCall>();
    Call& call = made->call;
    made->shape = shape_;
    call.form = spec.form;
    call.highway_type = spec.type;
    call.slice = spec.slice;
    for (size_t i = 0; i < spec.sequences.size(); ++i) {
      call.sequences.push_back({.tokens = spec.sequences[i], .refused = static_cast<int>(i) == spec.refused});
      call.tokens += spec.sequences[i];
    }
    spec.by_row_ids ? AddRowIds(call, spec) : AddWindows(call);
    for (int64_t t = 0; t < call.tokens; ++t) call.token_mask.push_back(random_() % 5 != 0);
    for (const int layer : spec.layers) AddLayer(*made, layer);
    made->Clear();
    return made;
  }

 private:
  void AddWindows(Call& call) {
    for (const CallSequence& sequence : call.sequences) {
      for (int64_t i = 0; i < shape_.max_ngram - 1 + sequence.tokens; ++i) {
        const auto id = static_cast<int32_t>(random_() % static_cast<uint32_t>(model_.geometry().compressed_vocab));
        call.windows.push_back(random_() % 8 == 0 ? kernels::kDead : id);
      }
    }
  }

  void AddRowIds(Call& call, const CallSpec& spec) {
    for (int64_t t = 0; t < call.tokens; ++t) {
      for (const int layer : spec.layers) {
        for (int c = 0; c < shape_.columns; ++c) {
          const int64_t rows = model_.layers()[static_cast<size_t>(layer)].table.rows;
          call.row_ids.push_back(random_() % 7 == 0 ? -1 : static_cast<int64_t>(random_()) % rows);
        }
      }
    }
  }

  StagingMemory Take(int64_t bytes) { return bytes == 0 ? nullptr : pool_.Take(bytes); }

  void AddLayer(MadeCall& made, int index) {
    Call& call = made.call;
    CallLayer layer{.layer = index};
    if (ReadsHighway(call.form)) {
      const int64_t bytes = call.tokens * HighwayBytes(shape_, call.highway_type);
      made.highways.push_back(Take(bytes));
      uint8_t* highway = made.highways.back().get();
      std::normal_distribution<float> normal;
      const int64_t width = kernels::HighwayBytesPerValue(call.highway_type);
      for (int64_t at = 0; at < bytes; at += width) {
        const float value = normal(random_);
        uint32_t word = 0;
        std::memcpy(&word, &value, 4);
        if (width == 2) word >>= 16;
        std::memcpy(highway + at, &word, static_cast<size_t>(width));
      }
      layer.highway = highway;
    }
    CallOutputs& o = made.outputs;
    o.out_bytes.push_back(call.tokens * OutBytes(shape_, call.form, call.highway_type, call.slice));
    o.out.push_back(Take(o.out_bytes.back()));
    layer.out = o.out.back().get();
    const bool gates = call.form == Form::kUpdate || call.form == Form::kGate;
    o.gates_bytes.push_back(gates ? call.tokens * shape_.copies * 4 : 0);
    o.gates.push_back(Take(o.gates_bytes.back()));
    layer.gates = reinterpret_cast<float*>(o.gates.back().get());
    o.value_bytes.push_back(call.form == Form::kUpdate ? call.tokens * shape_.dim * 2 : 0);
    o.value.push_back(Take(o.value_bytes.back()));
    layer.value = reinterpret_cast<kernels::Bf16*>(o.value.back().get());
    call.layers.push_back(layer);
  }

  const EngramModel& model_;
  const StepShape shape_;
  StagingPool& pool_;
  std::mt19937 random_{5};
};

// A step under way: its layers are told in order, then its end.
class StartedStep {
 public:
  StartedStep(Backend& backend, const std::vector<Piece>& pieces, const StepShape& shape)
      : step_(BuildStep(pieces, shape)) {
    backend.Start(
        step_, [this](size_t index) { EXPECT_EQ(index, layers_done_++); },
        [this](absl::StatusOr<StepTimes> times) {
          times_ = std::move(times);
          done_.Notify();
        });
  }

  absl::StatusOr<StepTimes> Await() {
    done_.Await();
    if (times_.ok()) {
      EXPECT_EQ(layers_done_, step_.layers.size());
    }
    return times_;
  }

 private:
  const Step step_;
  size_t layers_done_ = 0;
  absl::StatusOr<StepTimes> times_ = StepTimes{};
  Event done_;
};

inline Piece WholeOf(MadeCall& made) { return {&made.call, 0, made.call.tokens}; }

}  // namespace engram
