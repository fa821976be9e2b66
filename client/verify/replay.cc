#include "client/verify/replay.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/bf16.h"

namespace engram::client {
namespace {

// A call of a case, on its way through one message.
struct Item {
  const FixtureCase* fixture_case = nullptr;
  size_t call_index = 0;
  SequenceHistory* history = nullptr;  // kSession: null
  std::string session;
  std::string where;

  const FixtureCall& call() const { return fixture_case->calls[call_index]; }
  int64_t tokens() const { return static_cast<int64_t>(call().tokens.size()); }
};

std::vector<float> Widen(const std::string& bytes) {
  std::vector<float> values(bytes.size() / 2);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    values[i] = Bf16ToFloat(bits);
  }
  return values;
}

std::string Narrow(const std::vector<float>& values) {
  std::string bytes(values.size() * 2, '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = FloatToBf16(values[i]);
    std::memcpy(bytes.data() + 2 * i, &bits, 2);
  }
  return bytes;
}

std::string RawBytes(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

std::vector<float> Floats(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

class StepReplay {
 public:
  StepReplay(Client& client, const Fixture& fixture, absl::Duration timeout, std::vector<Item> items,
             ReplayReport* report)
      : client_(client), fixture_(fixture), timeout_(timeout), items_(std::move(items)), report_(*report) {
    for (const Item& item : items_) tokens_ += item.tokens();
  }

  absl::Status Run() {
    const size_t layers = fixture_.layer_ids.size();
    std::vector<std::string> f32(layers), rounded(layers), bf16(layers);
    for (size_t l = 0; l < layers; ++l) {
      const std::vector<float> highway = HighwayOf(l);
      f32[l] = RawBytes(highway);
      bf16[l] = Narrow(highway);
      rounded[l] = RawBytes(Widen(bf16[l]));
    }
    std::vector<std::string> kv, f32_out, rounded_out, bf16_out;
    for (auto& [form, dtype, in, out] : {std::tuple{Form::kKv, HighwayDtype::kF32, &f32, &kv},
                                         std::tuple{Form::kHighway, HighwayDtype::kF32, &f32, &f32_out},
                                         std::tuple{Form::kHighway, HighwayDtype::kF32, &rounded, &rounded_out},
                                         std::tuple{Form::kHighway, HighwayDtype::kBf16, &bf16, &bf16_out}}) {
      absl::StatusOr<std::vector<std::string>> reply = Send(form, dtype, *in);
      if (!reply.ok()) return reply.status();
      *out = *std::move(reply);
    }
    for (size_t l = 0; l < layers; ++l) {
      CheckLayer(l, Widen(kv[l]),
                 {Floats(f32[l]), Floats(f32_out[l]), Floats(rounded[l]), Floats(rounded_out[l]), Widen(bf16_out[l])});
      CheckMasked(l, f32[l], f32_out[l]);
      CheckMasked(l, rounded[l], rounded_out[l]);
      CheckMasked(l, bf16[l], bf16_out[l]);
    }
    return absl::OkStatus();
  }

 private:
  struct Highways {
    std::vector<float> f32, f32_out, rounded, rounded_out, bf16_out;
  };

  // The items' highways of a layer, one behind the other.
  std::vector<float> HighwayOf(size_t layer) const {
    const int64_t width = fixture_.hc * fixture_.dim;
    // A copy keeps -0 and denormals; h + 0 * v turns -0 into +0, and flushing arithmetic loses denormals. All of them
    // fit bf16.
    constexpr std::array<float, 4> kFragile = {-0.0f, 0x1p-133f, 0.0f, -0x1p-130f};
    std::vector<float> highway;
    for (const Item& item : items_) {
      const size_t start = highway.size();
      const std::vector<float>& given = item.call().layers[layer].highway;
      highway.insert(highway.end(), given.begin(), given.end());
      for (int64_t t = 0; t < item.tokens(); ++t) {
        if (item.call().Live(t)) continue;
        for (int64_t i = 0; i < width; ++i) highway[start + t * width + i] = kFragile[i % kFragile.size()];
      }
    }
    return highway;
  }

  absl::StatusOr<std::vector<std::string>> Send(Form form, HighwayDtype dtype, const std::vector<std::string>& in) {
    ApplyCall call;
    call.form = form;
    call.dtype = dtype;
    call.timeout = timeout_;
    for (const Item& item : items_) {
      SequenceRun run{.history = item.history,
                      .start_pos = item.call().start_pos,
                      .token_ids = item.call().tokens,
                      .token_mask = item.call().mask,
                      .session = item.session};
      if (item.history == nullptr) run.lookback = item.call().lookback;
      call.sequences.push_back(run);
    }
    const ModelInfo& model = client_.model();
    const int64_t out_bytes = tokens_ * (form == Form::kKv ? model.KvTokenBytes() : model.HighwayTokenBytes(dtype));
    std::vector<std::string> out(in.size(), std::string(out_bytes, '\0'));
    for (size_t l = 0; l < in.size(); ++l) {
      call.layers.push_back({.layer_id = fixture_.layer_ids[l],
                             .highway = form == Form::kKv ? absl::Span<const char>() : absl::Span<const char>(in[l]),
                             .out = absl::MakeSpan(out[l])});
    }
    if (absl::Status status = client_.Apply(call); !status.ok()) {
      absl::Status where(status.code(), absl::StrCat(items_.front().where, items_.size() > 1 ? " and others" : "",
                                                     ", form ", FormName(form), ": ", status.message()));
      status.ForEachPayload(
          [&where](absl::string_view url, const absl::Cord& payload) { where.SetPayload(url, payload); });
      return where;
    }
    ++report_.calls;
    return out;
  }

  void CheckLayer(size_t layer, const std::vector<float>& kv, const Highways& highways) {
    const int64_t kv_width = (fixture_.hc + 1) * fixture_.dim;
    int64_t first = 0;  // of the item, within the call's tokens
    for (const Item& item : items_) {
      const FixtureLayer& expected = item.call().layers[layer];
      for (int64_t t = 0; t < item.tokens(); ++t) {
        const auto where = [&, t] { return absl::StrCat(item.where, ", layer ", expected.layer_id, ", token ", t); };
        const auto token_kv = absl::MakeConstSpan(kv).subspan((first + t) * kv_width, kv_width);
        CheckKv(absl::MakeConstSpan(expected.kv_exact).subspan(t * kv_width, kv_width), token_kv, fixture_.dim, where,
                &report_.kv);
        if (!item.call().Live(t)) continue;
        for (int64_t c = 0; c < fixture_.hc; ++c) CheckCopy(expected, t, first + t, c, token_kv, highways, where);
      }
      first += item.tokens();
    }
  }

  // Copy `c` of token `t` of the fixture's call, which is token `at` of the message.
  void CheckCopy(const FixtureLayer& expected, int64_t t, int64_t at, int64_t c, absl::Span<const float> token_kv,
                 const Highways& highways, const std::function<std::string()>& token) {
    const int64_t dim = fixture_.dim;
    const int64_t hc = fixture_.hc;
    const auto where = [&] { return absl::StrCat(token(), ", copy ", c); };
    const auto part = [&](const std::vector<float>& values, int64_t of) {
      return absl::MakeConstSpan(values).subspan((of * hc + c) * dim, dim);
    };
    const auto key = token_kv.subspan(c * dim, dim);
    const auto value = token_kv.subspan(hc * dim, dim);
    const auto ref_key = absl::MakeConstSpan(expected.kv).subspan((t * (hc + 1) + c) * dim, dim);
    const auto ref_highway = part(expected.highway, t);
    const double ref_gate = expected.gate[t * hc + c];

    const auto highway = part(highways.f32, at);
    const GateBounds bounds = BoundGate(ref_gate, ref_highway, ref_key, highway, key, fixture_.eps);
    ++(bounds.exact() ? report_.exact_gates : report_.bounded_gates);
    report_.widest_key_bound = std::max(report_.widest_key_bound, bounds.high - bounds.low);
    const auto out = part(highways.f32_out, at);
    CheckUpdate(FitGate(bounds, highway, value, out), 0, highway, value, out, where, &report_.f32);

    const auto rounded = part(highways.rounded, at);
    const GateBounds rounded_bounds = BoundGate(ref_gate, ref_highway, ref_key, rounded, key, fixture_.eps);
    report_.widest_rounding_bound = std::max(report_.widest_rounding_bound, rounded_bounds.high - rounded_bounds.low);
    const auto rounded_out = part(highways.rounded_out, at);
    const double gate = FitGate(rounded_bounds, rounded, value, rounded_out);
    CheckUpdate(gate, 0, rounded, value, rounded_out, where, &report_.f32_rounded);
    // The gate that the f32 reply shows for the very same input is far sharper than what a bf16 reply could show.
    CheckUpdate(gate, 0x1p-8, rounded, value, part(highways.bf16_out, at), where, &report_.bf16);
  }

  void CheckMasked(size_t layer, const std::string& in, const std::string& out) {
    const size_t bytes = in.size() / tokens_;
    size_t at = 0;
    for (const Item& item : items_) {
      for (int64_t t = 0; t < item.tokens(); ++t, ++at) {
        if (item.call().Live(t)) continue;
        for (size_t i = at * bytes; i < (at + 1) * bytes; ++i) {
          report_.masked.Add(in[i] == out[i] ? 0 : 1, 0, [&] {
            return absl::StrCat(item.where, ", layer ", fixture_.layer_ids[layer], ", token ", t, ", byte ",
                                i - at * bytes);
          });
        }
      }
    }
  }

  Client& client_;
  const Fixture& fixture_;
  const absl::Duration timeout_;
  const std::vector<Item> items_;
  ReplayReport& report_;
  int64_t tokens_ = 0;
};

// The history with which a case's call goes out: a call that brings its own look-back starts anew from it.
absl::Status SeedIfGiven(const Fixture& fixture, const FixtureCall& call, SequenceHistory* history) {
  if (call.lookback.empty()) return absl::OkStatus();
  absl::StatusOr<SequenceHistory> seeded =
      SequenceHistory::Seeded(static_cast<int>(fixture.max_ngram), call.start_pos, call.lookback);
  if (!seeded.ok()) return seeded.status();
  *history = *std::move(seeded);
  return absl::OkStatus();
}

}  // namespace

bool ReplayReport::passed() const {
  // A fixture need not have masked tokens.
  return kv.passed() && f32.passed() && f32_rounded.passed() && bf16.passed() && masked.misses() == 0;
}

absl::Status CheckSameModel(const ModelInfo& model, const Fixture& fixture) {
  std::string difference;
  const auto same = [&difference](absl::string_view what, const auto& served, const auto& expected) {
    if (difference.empty() && served != expected) {
      difference = absl::StrCat(what, " is ", served, ", the fixture's is ", expected);
    }
  };
  same("dim", model.dim, fixture.dim);
  same("hc", int64_t{model.hc}, fixture.hc);
  same("head_dim", int64_t{model.head_dim}, fixture.head_dim);
  same("max_ngram", int64_t{model.max_ngram}, fixture.max_ngram);
  same("heads", int64_t{model.heads}, fixture.heads);
  same("n_hash_cols", int64_t{model.n_hash_cols}, fixture.cols);
  same("vocab", model.vocab, fixture.vocab);
  same("pad_id", int64_t{model.pad_id}, fixture.pad_id);
  same("rms_norm_eps", model.rms_norm_eps, static_cast<float>(fixture.eps));
  same("the number of layers", model.layers.size(), fixture.layer_ids.size());
  for (size_t l = 0; difference.empty() && l < model.layers.size(); ++l) {
    const ModelInfo::Layer& layer = model.layers[l];
    same(absl::StrCat("layers[", l, "].layer_id"), layer.layer_id, fixture.layer_ids[l]);
    same(absl::StrCat("layers[", l, "].rows"), layer.rows, fixture.rows[l]);
    same(absl::StrCat("layers[", l, "].row_type"), layer.row_type, fixture.row_type);
    same(absl::StrCat("layers[", l, "].wkv_type"), layer.wkv_type, fixture.wkv_type);
  }
  if (difference.empty()) return absl::OkStatus();
  std::string remedy;
  if (!fixture.files.empty()) {
    remedy = absl::StrCat("; serve the fixture's own, which lies beside it: ", absl::StrJoin(fixture.files, ", "));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the server serves another model than fixture ", fixture.name, ": ", difference, remedy));
}

absl::Status Replay(Client& client, const Fixture& fixture, ReplayMode mode, const std::string& session_prefix,
                    absl::Duration timeout, ReplayReport* report) {
  std::vector<SequenceHistory> histories(fixture.cases.size(), SequenceHistory(static_cast<int>(fixture.max_ngram)));
  size_t most_calls = 0;
  for (const FixtureCase& fixture_case : fixture.cases) most_calls = std::max(most_calls, fixture_case.calls.size());
  const auto item = [&](size_t case_index, size_t call_index) {
    const FixtureCase& fixture_case = fixture.cases[case_index];
    Item made{.fixture_case = &fixture_case,
              .call_index = call_index,
              .history = &histories[case_index],
              .session = {},
              .where = absl::StrCat(fixture_case.name, ", call ", call_index)};
    if (mode == ReplayMode::kSession) {
      made.history = nullptr;
      made.session = absl::StrCat(session_prefix, "-", case_index);
    }
    return made;
  };
  const auto run = [&](std::vector<Item> items) -> absl::Status {
    for (const Item& each : items) {
      if (each.history == nullptr) continue;
      if (absl::Status status = SeedIfGiven(fixture, each.call(), each.history); !status.ok()) return status;
    }
    return StepReplay(client, fixture, timeout, std::move(items), report).Run();
  };
  if (mode != ReplayMode::kTogether) {
    for (size_t c = 0; c < fixture.cases.size(); ++c) {
      for (size_t i = 0; i < fixture.cases[c].calls.size(); ++i) {
        if (absl::Status status = run({item(c, i)}); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }
  for (size_t i = 0; i < most_calls; ++i) {
    std::vector<Item> items;
    for (size_t c = 0; c < fixture.cases.size(); ++c) {
      if (i < fixture.cases[c].calls.size()) items.push_back(item(c, i));
    }
    if (absl::Status status = run(std::move(items)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace engram::client
