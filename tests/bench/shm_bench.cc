// What shared memory saves a worker beside its server: a prepared Apply whose highway lies in a region, against the
// same call over the unix socket, through the client library and a real server process.
//
//   engram_shm_bench --preset v41 --rows-scale 0.001     (0.3 GB on disk for the model, removed afterwards)
//   engram_shm_bench                                     what ctest runs: a tiny model
//
// One layer a call, as a worker meets them. The ways take turns, so that what else the machine does meets them all; the
// results must be the same bits. `ratio` is a way's p50 by the socket's.

#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/engram_client.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

struct Options {
  std::string preset = "tiny";
  double rows_scale = 1;
  std::vector<int64_t> tokens = {1, 16, 128};
  int calls = 200;
  std::string json;
};

// A way of making the call: where the highway is and where the result goes.
struct Way {
  const char* name;
  bool region;
  bool in_place;
};

constexpr Way kWays[] = {{"socket", false, true}, {"region, in place", true, true}, {"region, apart", true, false}};

class Bench {
 public:
  static absl::StatusOr<std::unique_ptr<Bench>> Start(const Options& options) {
    std::unique_ptr<Bench> bench(new Bench);
    const std::string model = bench->dir_.path() + "/model.gguf";
    const e2e::Finished made = e2e::RunToEnd({ENGRAM_MODEL, "synth", "--out", model, "--preset", options.preset,
                                              "--rows-scale", absl::StrCat(options.rows_scale)},
                                             600);
    if (made.exit_code != 0) return absl::UnavailableError(made.err);
    auto server = e2e::ServerProcess::Start(
        model, {"--shm-listen", "unix:" + bench->dir_.path() + "/m", "--ticket-ttl-ms", "86400000"});
    if (!server.ok()) return server.status();
    bench->server_ = *std::move(server);
    auto client = Client::Connect({.replicas = {.targets = {bench->server_->unix_address()}}});
    if (!client.ok()) return client.status();
    bench->client_ = *std::move(client);
    return bench;
  }

  // Medians of `calls` calls of `tokens` tokens, in microseconds, by way.
  absl::StatusOr<std::vector<double>> Measure(int64_t tokens, int calls) {
    const ModelInfo& model = client_->model();
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<int32_t>(t * 37 % model.vocab));
    const int32_t layer = model.layers.front().layer_id;
    PrepareCall prepare;
    prepare.sequences = {{.token_ids = ids}};
    prepare.layer_ids = {layer};
    const absl::StatusOr<Prepared> prepared = client_->Prepare(prepare);
    if (!prepared.ok()) return prepared.status();

    const auto bytes = static_cast<size_t>(tokens * model.HighwayTokenBytes(HighwayDtype::kF32));
    const auto region = client_->OpenRegion({.bytes = static_cast<int64_t>(2 * bytes)});
    if (!region.ok()) return region.status();
    std::vector<float> highway(bytes / sizeof(float));
    for (size_t i = 0; i < highway.size(); ++i) highway[i] = static_cast<float>(i % 1021) / 512 - 1;
    std::vector<char> own(bytes);

    std::vector<std::vector<double>> took(std::size(kWays));
    std::string expected;
    for (int i = 0; i < calls + 10; ++i) {
      for (size_t w = 0; w < std::size(kWays); ++w) {
        const Way& way = kWays[w];
        const absl::Span<char> at = way.region ? (*region)->memory().first(bytes) : absl::MakeSpan(own);
        const absl::Span<char> out = way.in_place ? at : (*region)->memory().subspan(bytes, bytes);
        std::memcpy(at.data(), highway.data(), bytes);
        ApplyCall call;
        call.prepared = &*prepared;
        call.layers = {{.layer_id = layer, .highway = at, .out = out}};
        if (way.region) call.region = region->get();
        const absl::Time start = absl::Now();
        if (const absl::Status status = client_->Apply(call); !status.ok()) return status;
        const double microseconds = absl::ToDoubleMicroseconds(absl::Now() - start);
        if (i >= 10) took[w].push_back(microseconds);  // the first ones warm up
        if (expected.empty()) expected.assign(out.begin(), out.end());
        if (std::memcmp(out.data(), expected.data(), bytes) != 0) {
          return absl::InternalError(absl::StrCat(way.name, ": other bits than over the socket"));
        }
      }
    }
    std::vector<double> medians;
    for (std::vector<double>& times : took) {
      const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
      std::nth_element(times.begin(), middle, times.end());
      medians.push_back(*middle);
    }
    if (const auto released = client_->Release(*prepared); !released.ok()) return released.status();
    return medians;
  }

  const ModelInfo& model() const { return client_->model(); }

 private:
  Bench() = default;

  const e2e::TempDir dir_;
  std::unique_ptr<e2e::ServerProcess> server_;
  std::unique_ptr<Client> client_;
};

absl::Status Run(const Options& options) {
  absl::StatusOr<std::unique_ptr<Bench>> bench = Bench::Start(options);
  if (!bench.ok()) return bench.status();
  nlohmann::json rows = nlohmann::json::array();
  std::printf("prepared Apply, HIGHWAY f32, dim %lld, hc %d, one layer, one client; p50 of %d calls\n",
              static_cast<long long>((*bench)->model().dim), (*bench)->model().hc, options.calls);
  std::printf("%8s  %-18s %12s %8s\n", "tokens", "way", "p50, us", "ratio");
  for (const int64_t tokens : options.tokens) {
    const absl::StatusOr<std::vector<double>> medians = (*bench)->Measure(tokens, options.calls);
    if (!medians.ok()) return medians.status();
    for (size_t w = 0; w < std::size(kWays); ++w) {
      const double ratio = (*medians)[w] / medians->front();
      std::printf("%8lld  %-18s %12.1f %8.2f\n", static_cast<long long>(tokens), kWays[w].name, (*medians)[w], ratio);
      rows.push_back({{"tokens", tokens}, {"way", kWays[w].name}, {"p50_us", (*medians)[w]}, {"ratio", ratio}});
    }
  }
  if (options.json.empty()) return absl::OkStatus();
  std::ofstream file(options.json);
  file << rows.dump(2) << '\n';
  return file.flush().good() ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", options.json));
}

}  // namespace
}  // namespace engram::client

int main(int argc, char** argv) {
  engram::client::Options options;
  // As docs/client.md has it: without, the socket's side pays for fresh pages at every call, six times its time at 10
  // MB.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  CLI::App app("Measures prepared calls through shared memory beside the same calls over the unix socket.",
               "engram_shm_bench");
  app.add_option("--preset", options.preset, "geometry of the made model: tiny or v41")->capture_default_str();
  app.add_option("--rows-scale", options.rows_scale, "size of its tables; they do not matter here")
      ->capture_default_str();
  app.add_option("--tokens", options.tokens, "tokens of a call")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{512}))
      ->capture_default_str();
  app.add_option("--calls", options.calls, "timed calls of each way")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--json", options.json, "write the figures here too")->type_name("FILE");
  CLI11_PARSE(app, argc, argv);
  if (const absl::Status status = engram::client::Run(options); !status.ok()) {
    std::fprintf(stderr, "engram_shm_bench: %s\n", std::string(status.message()).c_str());
    return 2;
  }
}
