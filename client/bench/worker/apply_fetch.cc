// What the highway decides: Prepare at the top of the step, and at each layer's moment an Apply by its ticket.

#include <bit>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "client/bench/worker/arrival.h"
#include "client/bench/worker/ticket_returns.h"
#include "client/bench/worker/wire_fetch.h"
#include "client/bf16.h"

namespace engram::bench {
namespace {

// Bytes of any values of the dtype, all finite and of about the size that a highway has.
std::vector<char> AnyHighway(int64_t values, client::HighwayDtype dtype) {
  std::vector<char> bytes(static_cast<size_t>(values * client::BytesOf(dtype)));
  uint32_t state = 1;
  for (int64_t i = 0; i < values; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) * 0x1p-23f - 1;  // [-1, 1)
    if (dtype == client::HighwayDtype::kF32) {
      std::memcpy(&bytes[static_cast<size_t>(i * 4)], &value, 4);
    } else {
      const uint16_t bits = client::FloatToBf16(value);
      std::memcpy(&bytes[static_cast<size_t>(i * 2)], &bits, 2);
    }
  }
  return bytes;
}

// What an Apply of a layer writes, for all tokens of a step.
struct Results {
  std::vector<char> highway;    // kHighway
  std::vector<float> gates;     // kUpdate, kGate
  std::vector<uint16_t> value;  // kUpdate; kGate's came with Prepare
};

class ApplyFetch : public StepFetch {
 public:
  ApplyFetch(client::Client& client, const WireFetchOptions& options)
      : client_(client),
        model_(client.model()),
        options_(options),
        highway_(AnyHighway(options.max_step_tokens * model_.hc * model_.dim, options.dtype)),
        returns_(client) {
    for (const client::ModelInfo::Layer& info : model_.layers) {
      Layer& layer = layers_.emplace_back();
      layer.id = info.layer_id;
      layer.results = Room(options.max_step_tokens);
    }
  }

  ~ApplyFetch() override = default;

  void Begin(const PlannedStep& step) override {
    step_ = &step;
    failed_ = false;
    prepare_sent_ = ClockNow();
    client::PrepareCall call;
    call.sequences = RunsOf(step);
    call.timeout = options_.timeout;
    call.priority = client::Priority::kDecode;
    for (Layer& layer : layers_) {
      call.layer_ids.push_back(layer.id);
      if (options_.form != client::Form::kGate) continue;
      call.values.push_back(absl::MakeSpan(layer.results.value).first(static_cast<size_t>(step.tokens * model_.dim)));
      totals_.bytes_down += step.tokens * model_.ValueTokenBytes();
    }
    ++totals_.calls;
    totals_.bytes_up += BytesOfRuns(step);
    preparing_.Expect(1);
    client_.PrepareAsync(call, [this](absl::StatusOr<client::Prepared> prepared, const client::CallReport&) {
      const absl::Status status = prepared.status();
      if (prepared.ok()) prepared_ = *std::move(prepared);
      preparing_.Answered(status);
    });
  }

  LayerArrival Await(size_t index) override {
    const Arrival::Outcome prepared = preparing_.Await();
    LayerArrival arrival;
    // What Prepare took counts once, with the first layer, which needs it first.
    arrival.ahead = {index == 0 ? prepare_sent_ : prepared.at, prepared.at};
    if (!prepared.failures.empty()) {
      if (index == 0) CountErrors(prepared.failures, totals_.errors);
      failed_ = true;
      return arrival;
    }
    Layer& layer = layers_[index];
    const absl::Duration sent = ClockNow();
    const std::vector<client::Range> parts = PartsOf(step_->tokens, options_);
    layer.arrival.Expect(static_cast<int>(parts.size()));
    for (const client::Range& part : parts) {
      client::ApplyCall call = CallOf(layer.id, part, layer.results);
      call.prepared = &prepared_;
      if (parts.size() > 1) call.token_slice = part;
      ++totals_.calls;
      client_.ApplyAsync(
          call, [&layer](const absl::Status& status, const client::CallReport&) { layer.arrival.Answered(status); });
    }
    const Arrival::Outcome outcome = layer.arrival.Await();
    CountErrors(outcome.failures, totals_.errors);
    failed_ = failed_ || !outcome.failures.empty();
    totals_.bytes_up += step_->tokens * model_.HighwayTokenBytes(options_.dtype);
    totals_.bytes_down += step_->tokens * ReplyBytes();
    if (index + 1 == layers_.size()) returns_.Return(std::exchange(prepared_, {}));
    arrival.then = {sent, outcome.at};
    return arrival;
  }

  absl::Status Verify(const PlannedStep& step) override {
    if (failed_) return absl::OkStatus();
    for (const Layer& layer : layers_) {
      Results plain = Room(step.tokens);
      client::ApplyCall call = CallOf(layer.id, {0, step.tokens}, plain);
      call.sequences = RunsOf(step);
      // The value of kGate came with Prepare: UPDATE has it too.
      if (options_.form == client::Form::kGate) {
        call.form = client::Form::kUpdate;
        call.layers.front().value = absl::MakeSpan(plain.value);
      }
      if (absl::Status status = options_.plain->Apply(call); !status.ok()) return status;
      absl::Status same = SameBytes(layer.id, Begun(layer.results.highway, plain.highway), Bytes(plain.highway));
      same.Update(SameBytes(layer.id, Begun(layer.results.gates, plain.gates), Bytes(plain.gates)));
      same.Update(SameBytes(layer.id, Begun(layer.results.value, plain.value), Bytes(plain.value)));
      if (!same.ok()) return same;
      ++totals_.verified;
    }
    return absl::OkStatus();
  }

  FetchTotals TakeTotals() override { return std::exchange(totals_, {}); }

 private:
  struct Layer {
    int32_t id = 0;
    Results results;
    Arrival arrival;
  };

  template <typename Value>
  static absl::Span<const char> Bytes(const std::vector<Value>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
  }
  // As much of `values` as `like` has.
  template <typename Value>
  static absl::Span<const char> Begun(const std::vector<Value>& values, const std::vector<Value>& like) {
    return Bytes(values).first(like.size() * sizeof(Value));
  }

  Results Room(int64_t tokens) const {
    Results results;
    if (options_.form == client::Form::kHighway) {
      results.highway.resize(static_cast<size_t>(tokens * model_.HighwayTokenBytes(options_.dtype)));
      return results;
    }
    results.gates.resize(static_cast<size_t>(tokens * model_.hc));
    results.value.resize(static_cast<size_t>(tokens * model_.dim));
    return results;
  }

  // The layer's tokens `part`, into their place in `results`.
  client::ApplyCall CallOf(int32_t layer_id, client::Range part, Results& results) {
    const auto place = [part](auto& values, int64_t per_token) {
      return absl::MakeSpan(values).subspan(static_cast<size_t>(part.begin * per_token),
                                            static_cast<size_t>((part.end - part.begin) * per_token));
    };
    const int64_t token_bytes = model_.HighwayTokenBytes(options_.dtype);
    client::LayerRun run{.layer_id = layer_id, .highway = place(highway_, token_bytes)};
    if (options_.form == client::Form::kHighway) run.out = place(results.highway, token_bytes);
    if (options_.form != client::Form::kHighway) run.gates = place(results.gates, model_.hc);
    if (options_.form == client::Form::kUpdate) run.value = place(results.value, model_.dim);
    client::ApplyCall call;
    call.layers = {run};
    call.form = options_.form;
    call.dtype = options_.dtype;
    call.timeout = options_.timeout;
    call.priority = client::Priority::kDecode;
    return call;
  }

  int64_t ReplyBytes() const {  // of a token
    if (options_.form == client::Form::kHighway) return model_.HighwayTokenBytes(options_.dtype);
    return model_.GatesTokenBytes() + (options_.form == client::Form::kUpdate ? model_.ValueTokenBytes() : 0);
  }

  client::Client& client_;
  const client::ModelInfo& model_;
  const WireFetchOptions options_;
  std::vector<char> highway_;  // [max_step_tokens, hc, dim]; read only
  std::deque<Layer> layers_;   // a deque, since an Arrival stays where it is
  const PlannedStep* step_ = nullptr;
  absl::Duration prepare_sent_;
  Arrival preparing_;
  client::Prepared prepared_;  // written before preparing_ is answered
  bool failed_ = false;        // something of this step
  FetchTotals totals_;
  TicketReturns returns_;
};

}  // namespace

std::unique_ptr<StepFetch> MakeApplyFetch(client::Client& client, const WireFetchOptions& options) {
  return std::make_unique<ApplyFetch>(client, options);
}

}  // namespace engram::bench
