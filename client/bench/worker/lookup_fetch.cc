// Rows and kv depend on ids alone: all of it is asked for at the top of the step.

#include <deque>
#include <optional>
#include <utility>

#include "client/bench/worker/arrival.h"
#include "client/bench/worker/wire_fetch.h"

namespace engram::bench {
namespace {

// What a slice counts, and the bytes of one.
struct Unit {
  int64_t count = 0;
  int64_t bytes = 0;
};

Unit UnitOf(const client::ModelInfo& model, const client::ModelInfo::Layer& layer, client::Form form) {
  switch (form) {
    case client::Form::kRowsNative:
      return {model.n_hash_cols, layer.row_bytes};
    case client::Form::kRowsBf16:
      return {model.n_hash_cols, model.RowBf16Bytes()};
    default:
      return {model.KvTokenBytes() / 2, 2};
  }
}

class LookupFetch : public StepFetch {
 public:
  LookupFetch(client::Client& client, const WireFetchOptions& options) : client_(client), options_(options) {
    for (const client::ModelInfo::Layer& info : client.model().layers) {
      Layer& layer = layers_.emplace_back();
      layer.id = info.layer_id;
      layer.unit = UnitOf(client.model(), info, options.form);
      layer.parts = PartsOf(layer.unit.count, options);
      for (const client::Range& part : layer.parts) {
        layer.out.emplace_back(
            static_cast<size_t>(options.max_step_tokens * (part.end - part.begin) * layer.unit.bytes));
      }
    }
  }

  void Begin(const PlannedStep& step) override {
    sent_ = ClockNow();
    failed_ = false;
    client::LookupCall call = CallOf(step);
    // A part is the same share of every layer.
    const size_t ranks = layers_.front().parts.size();
    for (Layer& layer : layers_) layer.arrival.Expect(static_cast<int>(ranks));
    if (options_.call_per_layer) {
      for (Layer& layer : layers_) Send(step, ranks, {&layer}, call);
    } else {
      std::vector<Layer*> all;
      for (Layer& layer : layers_) all.push_back(&layer);
      Send(step, ranks, all, call);
    }
  }

  LayerArrival Await(size_t index) override {
    const Arrival::Outcome outcome = layers_[index].arrival.Await();
    CountErrors(outcome.failures, totals_.errors);
    failed_ = failed_ || !outcome.failures.empty();
    return {outcome.at, outcome.at - sent_};
  }

  absl::Status Verify(const PlannedStep& step) override {
    if (failed_) return absl::OkStatus();
    for (Layer& layer : layers_) {
      const int64_t token_bytes = layer.unit.count * layer.unit.bytes;
      std::vector<char> plain(static_cast<size_t>(step.tokens * token_bytes)), joined;
      client::LookupCall call = CallOf(step);
      call.layers = {{.layer_id = layer.id, .out = absl::MakeSpan(plain)}};
      if (absl::Status status = options_.plain->Lookup(call); !status.ok()) return status;
      joined.reserve(plain.size());
      for (int64_t token = 0; token < step.tokens; ++token) {
        for (size_t part = 0; part < layer.parts.size(); ++part) {
          const int64_t bytes = (layer.parts[part].end - layer.parts[part].begin) * layer.unit.bytes;
          const auto from = layer.out[part].begin() + token * bytes;
          joined.insert(joined.end(), from, from + bytes);
        }
      }
      if (absl::Status status = SameBytes(layer.id, joined, plain); !status.ok()) return status;
      ++totals_.verified;
    }
    return absl::OkStatus();
  }

  FetchTotals TakeTotals() override { return std::exchange(totals_, {}); }

 private:
  struct Layer {
    int32_t id = 0;
    Unit unit;
    std::vector<client::Range> parts;    // of its units, one per rank that fetches
    std::vector<std::vector<char>> out;  // per part [max_step_tokens, units of the part]
    Arrival arrival;
  };

  // A call without layers yet.
  client::LookupCall CallOf(const PlannedStep& step) const {
    client::LookupCall call;
    call.sequences = RunsOf(step);
    call.form = options_.form;
    call.timeout = options_.timeout;
    // Prefill chunks ride along in a decode step, which must not wait for others' prefill.
    call.priority = client::Priority::kDecode;
    return call;
  }

  // One call per rank for these layers. Row columns and kv outputs are as many in every layer.
  void Send(const PlannedStep& step, size_t ranks, const std::vector<Layer*>& layers, client::LookupCall& call) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      call.layers.clear();
      for (Layer* layer : layers) {
        const client::Range& part = layer->parts[rank];
        const int64_t bytes = step.tokens * (part.end - part.begin) * layer->unit.bytes;
        call.layers.push_back(
            {.layer_id = layer->id, .out = absl::MakeSpan(layer->out[rank]).first(static_cast<size_t>(bytes))});
        call.slice = ranks == 1 ? std::nullopt : std::optional(part);
        totals_.bytes_down += bytes;
      }
      ++totals_.calls;
      totals_.bytes_up += BytesOfRuns(step);
      client_.LookupAsync(call, [layers](const absl::Status& status, const client::CallReport&) {
        for (Layer* layer : layers) layer->arrival.Answered(status);
      });
    }
  }

  client::Client& client_;
  const WireFetchOptions options_;
  std::deque<Layer> layers_;  // a deque, since an Arrival stays where it is
  absl::Duration sent_;
  bool failed_ = false;  // something of this step
  FetchTotals totals_;
};

}  // namespace

std::unique_ptr<StepFetch> MakeLookupFetch(client::Client& client, const WireFetchOptions& options) {
  return std::make_unique<LookupFetch>(client, options);
}

}  // namespace engram::bench
