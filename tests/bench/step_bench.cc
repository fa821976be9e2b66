// A whole step on the CPU backend, hash to gate in every layer, and the commit of a call to its sessions.
//
//   engram_step_bench --preset v41 --rows-scale 0.02     (some 2 GB on disk for the model, removed afterwards)
//   engram_step_bench --model FILE.gguf
//   engram_step_bench                                    what ctest runs: a tiny model
//
// step/<form>/<tokens> tells where the time goes by counters, in microseconds a step: hash, gather, project, gate.
// `prepared` is an Apply of what Prepare has made: the gate alone. commit/<sessions>/<claims> has that many sessions
// open, and each of its claims appends one token to one of them.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/step.h"
#include "server/model/engram_model.h"
#include "server/model/synth.h"
#include "server/session/session_table.h"

namespace engram {
namespace {

constexpr int64_t kMostTokens = 256;

struct Bench {
  std::shared_ptr<const EngramModel> model;
  std::unique_ptr<CpuBackend> backend;
  StepShape shape;
};

// One call over all layers of the model, with its tensors.
class StepCall {
 public:
  StepCall(const Bench& bench, Form form, int64_t tokens, bool prepared)
      : shape_(bench.shape), ids_(static_cast<uint32_t>(bench.model->geometry().compressed_vocab)) {
    call_.form = form;
    call_.tokens = tokens;
    call_.sequences = {{.tokens = tokens}};
    if (prepared) {
      call_.prepared = MakePrepared(tokens);
    } else {
      call_.windows.resize(static_cast<size_t>(shape_.max_ngram - 1 + tokens));
      Redraw();
    }
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const auto values = static_cast<size_t>(ReadsHighway(form) ? tokens * shape_.highway_values() : 0);
      highways_.emplace_back(values, 0.25f);
      outs_.emplace_back(static_cast<size_t>(tokens * OutBytes(shape_, form, call_.highway_type, {})));
    }
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const auto i = static_cast<size_t>(layer);
      call_.layers.push_back(
          {.layer = layer, .highway = ReadsHighway(form) ? highways_[i].data() : nullptr, .out = outs_[i].data()});
    }
  }

  Step Build() { return BuildStep({{&call_, 0, call_.tokens}}, shape_); }

  // Other tokens, so that the next step reads other rows.
  void Redraw() {
    for (int32_t& id : call_.windows) id = static_cast<int32_t>(random_() % ids_);
  }

 private:
  std::shared_ptr<const Prepared> MakePrepared(int64_t tokens) {
    auto prepared = std::make_shared<Prepared>();
    prepared->tokens = tokens;
    prepared->ids.resize(static_cast<size_t>(tokens * shape_.layers * shape_.columns));
    for (int layer = 0; layer < shape_.layers; ++layer) {
      const int64_t values = tokens * shape_.kv_values();
      Prepared::LayerKv kv = {layer, staging_.Take(values * static_cast<int64_t>(sizeof(kernels::Bf16)))};
      for (int64_t i = 0; i < values; ++i) kv.kv()[i] = static_cast<kernels::Bf16>((random_() & 0x83FFu) | 0x3C00u);
      prepared->layers.push_back(std::move(kv));
    }
    return prepared;
  }

  const StepShape& shape_;
  const uint32_t ids_;  // compressed ids there are
  std::mt19937 random_{7};
  StagingPool staging_{0};
  Call call_;
  std::vector<std::vector<float>> highways_;
  std::vector<std::vector<uint8_t>> outs_;
};

void RunStep(benchmark::State& state, const Bench& bench, Form form, int64_t tokens, bool prepared) {
  StepCall call(bench, form, tokens, prepared);
  StepTimes sum;
  for (auto _ : state) {
    const absl::StatusOr<StepTimes> times = bench.backend->Run(call.Build(), [](size_t) {});
    if (!times.ok()) {
      state.SkipWithError(std::string(times.status().message()).c_str());
      return;
    }
    sum.hash += times->hash;
    sum.gather += times->gather;
    sum.project += times->project;
    sum.gate += times->gate;
    state.PauseTiming();
    call.Redraw();
    state.ResumeTiming();
  }
  const auto each = [&state](absl::Duration total) {
    return benchmark::Counter(absl::ToDoubleMicroseconds(total), benchmark::Counter::kAvgIterations);
  };
  state.counters["hash"] = each(sum.hash);
  state.counters["gather"] = each(sum.gather);
  state.counters["project"] = each(sum.project);
  state.counters["gate"] = each(sum.gate);
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * tokens), benchmark::Counter::kIsRate);
}

// A table with sessions 0 .. count-1 open, kept for the next benchmark that wants as many.
struct OpenSessions {
  SessionTable table{SessionOptions{}};
  std::vector<int64_t> positions;  // of the next token, by session
};

OpenSessions& Sessions(int64_t count) {
  static std::map<int64_t, std::unique_ptr<OpenSessions>> all;
  std::unique_ptr<OpenSessions>& open = all[count];
  if (open == nullptr) {
    open = std::make_unique<OpenSessions>();
    open->positions.assign(static_cast<size_t>(count), 16);
    for (int64_t i = 0; i < count; ++i) {
      const SequenceClaim birth = {.session = absl::StrCat("session-", i), .ids = std::vector<int32_t>(16, 5)};
      if (!open->table.Commit("worker", {birth}, false).ok()) std::abort();
    }
  }
  return *open;
}

void CommitTokens(benchmark::State& state, int64_t sessions, int64_t claims) {
  OpenSessions& open = Sessions(sessions);
  std::mt19937_64 random(3);
  std::vector<SequenceClaim> call(static_cast<size_t>(claims));
  for (auto _ : state) {
    // Neighbours from a random one on: no session stands in a call twice.
    const auto first = static_cast<int64_t>(random() % static_cast<uint64_t>(sessions));
    for (int64_t i = 0; i < claims; ++i) {
      const int64_t session = (first + i) % sessions;
      call[static_cast<size_t>(i)] = {.session = absl::StrCat("session-", session),
                                      .start_pos = open.positions[static_cast<size_t>(session)]++,
                                      .ids = {static_cast<int32_t>(i)}};
    }
    const auto start = std::chrono::steady_clock::now();
    const absl::StatusOr<CommitResult> result = open.table.Commit("worker", call, false);
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    if (!result.ok()) {
      state.SkipWithError(std::string(result.status().message()).c_str());
      return;
    }
  }
  state.counters["claims/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * claims), benchmark::Counter::kIsRate);
}

void RegisterAll(const Bench& bench) {
  const struct {
    const char* name;
    Form form;
    bool prepared;
  } kinds[] = {{"highway_f32", Form::kHighway, false},
               {"kv", Form::kKv, false},
               {"rows_native", Form::kRowsNative, false},
               {"prepared", Form::kHighway, true}};
  for (const auto& kind : kinds) {
    for (const int64_t tokens : {int64_t{1}, int64_t{4}, int64_t{16}, int64_t{64}, kMostTokens}) {
      benchmark::RegisterBenchmark(
          absl::StrCat("step/", kind.name, "/", tokens).c_str(),
          [&bench, kind, tokens](benchmark::State& s) { RunStep(s, bench, kind.form, tokens, kind.prepared); })
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  for (const int64_t sessions : {10, 1000, 100'000}) {
    for (const int64_t claims : {1, 10}) {
      benchmark::RegisterBenchmark(absl::StrCat("commit/", sessions, "/", claims).c_str(),
                                   [sessions, claims](benchmark::State& s) { CommitTokens(s, sessions, claims); })
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

// A folder that is gone when this is.
class TempFolder {
 public:
  explicit TempFolder(const std::string& within) : path_(within + "/engram-step-bench.XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~TempFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }  // empty: it could not be made

 private:
  std::string path_;
};

struct Options {
  std::string model;
  std::string preset = "tiny";
  double rows_scale = 1;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
};

absl::StatusOr<std::shared_ptr<const EngramModel>> LoadModel(const Options& options) {
  LoadOptions load;
  load.threads = options.threads;
  if (!options.model.empty()) return EngramModel::Load(options.model, load);
  const TempFolder folder(std::filesystem::temp_directory_path().string());
  if (folder.path().empty()) return absl::UnavailableError("no temporary folder for the model");
  absl::StatusOr<SynthOptions> synth = SynthPreset(options.preset);
  if (!synth.ok()) return synth.status();
  synth->out = folder.path() + "/model.gguf";
  synth->rows_scale = options.rows_scale;
  synth->threads = options.threads;
  if (const auto paths = WriteSynthModel(*synth); !paths.ok()) return paths.status();
  // All of it is read into memory (Residency::kRam), so the file may go.
  return EngramModel::Load(synth->out, load);
}

absl::StatusOr<Bench> Prepare(const Options& options) {
  Bench bench;
  absl::StatusOr<std::shared_ptr<const EngramModel>> model = LoadModel(options);
  if (!model.ok()) return model.status();
  bench.model = *std::move(model);
  absl::StatusOr<std::unique_ptr<CpuBackend>> backend = CpuBackend::Create(
      bench.model, kernels::CpuKernels(), {.threads = options.threads, .max_batch_tokens = kMostTokens});
  if (!backend.ok()) return backend.status();
  bench.backend = *std::move(backend);
  bench.shape = ShapeOf(*bench.model);
  return bench;
}

}  // namespace
}  // namespace engram

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  engram::Options options;
  CLI::App app("Measures whole steps on the CPU backend, and session commits. Takes --benchmark_... options too.");
  app.add_option("--model", options.model, "a GGUF file to load; without it, a model is made and removed")
      ->check(CLI::ExistingFile);
  app.add_option("--preset", options.preset, "geometry of the made model: tiny or v41")->capture_default_str();
  app.add_option("--rows-scale", options.rows_scale, "size of its tables; v41 at 0.02 has 1.3 GB")
      ->capture_default_str();
  app.add_option("--threads", options.threads, "of the backend")->check(CLI::Range(1, 1024))->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  const absl::StatusOr<engram::Bench> bench = engram::Prepare(options);
  if (!bench.ok()) {
    std::fprintf(stderr, "engram_step_bench: %s\n", std::string(bench.status().message()).c_str());
    return 2;
  }
  engram::RegisterAll(*bench);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
