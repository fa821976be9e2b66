// Rows and kv depend on ids alone: all of it is asked for at the top of the step.

#include <atomic>
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
    failed_ = false;
    for (Layer& layer : layers_) layer.arrival.Expect(static_cast<int>(Ranks()));
    const auto calls = static_cast<int64_t>(Ranks() * (options_.calls == Calls::kStep ? 1 : layers_.size()));
    totals_.calls += calls;
    totals_.bytes_up += calls * BytesOfRuns(step);
    for (const Layer& layer : layers_) totals_.bytes_down += step.tokens * layer.unit.count * layer.unit.bytes;
    switch (options_.calls) {
      case Calls::kChain:
        return Send(step, 0, 1);
      case Calls::kLayer:
        for (size_t layer = 0; layer < layers_.size(); ++layer) Send(step, layer, layer + 1);
        return;
      case Calls::kStep:
        return Send(step, 0, layers_.size());
    }
  }

  LayerArrival Await(size_t index) override {
    const Arrival::Outcome outcome = layers_[index].arrival.Await();
    CountErrors(outcome.failures, totals_.errors);
    failed_ = failed_ || !outcome.failures.empty();
    return {.ahead = {layers_[index].sent, outcome.at}, .then = {}};
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
    std::atomic<int> unanswered = 0;     // calls of the layer, or of those that begin with it
    absl::Duration sent;                 // written before they are
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

  // A part is the same share of every layer: all have as many columns, and outputs of kv.
  size_t Ranks() const { return layers_.front().parts.size(); }

  // One call per rank, for layers [begin, end); of a chain the next layer's follow. Any thread.
  void Send(const PlannedStep& step, size_t begin, size_t end) {
    client::LookupCall call = CallOf(step);
    layers_[begin].unanswered = static_cast<int>(Ranks());
    const absl::Duration now = ClockNow();
    for (size_t i = begin; i < end; ++i) layers_[i].sent = now;
    for (size_t rank = 0; rank < Ranks(); ++rank) {
      call.layers.clear();
      for (size_t i = begin; i < end; ++i) {
        Layer& layer = layers_[i];
        const client::Range& part = layer.parts[rank];
        const int64_t bytes = step.tokens * (part.end - part.begin) * layer.unit.bytes;
        call.layers.push_back(
            {.layer_id = layer.id, .out = absl::MakeSpan(layer.out[rank]).first(static_cast<size_t>(bytes))});
        if (Ranks() > 1) call.slice = part;
      }
      client_.LookupAsync(call, [this, &step, begin, end](const absl::Status& status, const client::CallReport&) {
        // While layers are missing the step goes on, and this and `step` with it; when the last has answered, no more.
        const bool more = options_.calls == Calls::kChain && end < layers_.size();
        const bool last = --layers_[begin].unanswered == 0;
        for (size_t i = begin; i < end; ++i) layers_[i].arrival.Answered(status);
        if (more && last) Send(step, end, end + 1);
      });
    }
  }

  client::Client& client_;
  const WireFetchOptions options_;
  std::deque<Layer> layers_;  // a deque, since an Arrival stays where it is
  bool failed_ = false;       // something of this step
  FetchTotals totals_;
};

}  // namespace

std::unique_ptr<StepFetch> MakeLookupFetch(client::Client& client, const WireFetchOptions& options) {
  return std::make_unique<LookupFetch>(client, options);
}

}  // namespace engram::bench
