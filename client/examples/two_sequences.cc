// A worker's day in one page: two sequences are prefilled and decoded together, one of them speculates and rolls back,
// and at the end the answers are compared with those of a server that remembers nothing.
//
//   engram-example TARGET...
//
// TARGET is host:port or unix:/path. The story is told to the first one; then all are timed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/engram_client.h"

namespace engram::client {
namespace {

// A sequence as a worker has it: what was sampled so far, and who remembers it for the engram.
struct Story {
  uint32_t seed = 0;                         // of its tokens and of its made-up highway
  std::vector<int32_t> ids;                  // by position
  std::string session;                       // the server's memory of it, or
  std::unique_ptr<SequenceHistory> history;  // the client's
};

// Cheap, and the same on every machine.
uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// Stands for the sampler: the token at a position; `draft` counts the attempts at it.
int32_t Sample(const ModelInfo& model, const Story& story, size_t pos, uint32_t draft) {
  return static_cast<int32_t>(Mix(story.seed + 8 * static_cast<uint32_t>(pos) + draft) % model.vocab);
}

// Stands for the layers before the engram: the highway of a position, [hc, dim] f32 in [-1, 1).
void AppendHighway(const ModelInfo& model, const Story& story, int64_t pos, int32_t layer_id, std::vector<float>& out) {
  const uint32_t start = Mix(story.seed ^ Mix(static_cast<uint32_t>(pos) ^ Mix(static_cast<uint32_t>(layer_id))));
  for (int64_t i = 0; i < model.hc * model.dim; ++i) {
    out.push_back(static_cast<float>(Mix(start + static_cast<uint32_t>(i)) >> 8) * 0x1p-23f - 1.0f);
  }
}

// Tokens [start_pos, ids.size()) of a story are sent.
struct Part {
  Story* story;
  int64_t start_pos;
};

struct StepResult {
  std::vector<std::vector<float>> highway;  // by layer: [T, hc, dim], updated
  int64_t bytes_sent = 0;                   // of highway; as many come back
  absl::Duration took;
};

// One engine step: all parts and all layers in one call.
absl::StatusOr<StepResult> Step(Client& client, const std::vector<Part>& parts) {
  const ModelInfo& model = client.model();
  StepResult result;
  ApplyCall call;
  for (const Part& part : parts) {
    SequenceRun run;
    run.history = part.story->history.get();
    run.session = part.story->session;
    run.start_pos = part.start_pos;
    run.token_ids = absl::MakeConstSpan(part.story->ids).subspan(static_cast<size_t>(part.start_pos));
    call.sequences.push_back(run);
  }
  for (const ModelInfo::Layer& layer : model.layers) {
    std::vector<float>& highway = result.highway.emplace_back();
    for (const Part& part : parts) {
      for (auto pos = part.start_pos; pos < static_cast<int64_t>(part.story->ids.size()); ++pos) {
        AppendHighway(model, *part.story, pos, layer.layer_id, highway);
      }
    }
  }
  for (size_t l = 0; l < model.layers.size(); ++l) {
    const size_t bytes = result.highway[l].size() * sizeof(float);
    char* data = reinterpret_cast<char*>(result.highway[l].data());
    call.layers.push_back({.layer_id = model.layers[l].layer_id, .highway = {data, bytes}, .out = {data, bytes}});
    result.bytes_sent += static_cast<int64_t>(bytes);
  }
  const absl::Time start = absl::Now();
  absl::Status status = client.Apply(call);
  result.took = absl::Now() - start;
  if (!status.ok()) return status;
  return result;
}

double Milliseconds(absl::Duration d) { return absl::ToDoubleMilliseconds(d); }

struct Latency {
  absl::Duration median, slowest;
};

// Decodes `steps` tokens of every story, all of them in each call.
absl::StatusOr<Latency> Decode(Client& client, const std::vector<Story*>& stories, int steps) {
  std::vector<absl::Duration> took;
  for (int i = 0; i < steps; ++i) {
    std::vector<Part> parts;
    for (Story* story : stories) {
      parts.push_back({story, static_cast<int64_t>(story->ids.size())});
      story->ids.push_back(Sample(client.model(), *story, story->ids.size(), 0));
    }
    absl::StatusOr<StepResult> step = Step(client, parts);
    if (!step.ok()) return step.status();
    took.push_back(step->took);
  }
  std::sort(took.begin(), took.end());
  return Latency{took[took.size() / 2], took.back()};
}

// What the last position of `step` got, layer after layer.
std::vector<float> LastPosition(const ModelInfo& model, const StepResult& step) {
  std::vector<float> last;
  for (const std::vector<float>& highway : step.highway) {
    last.insert(last.end(), highway.end() - model.hc * model.dim, highway.end());
  }
  return last;
}

absl::Status Tell(Client& client) {
  const ModelInfo& model = client.model();
  absl::PrintF("  the model: dim %d, hc %d copies, n-grams up to %d, %d table rows a token and layer\n", model.dim,
               model.hc, model.max_ngram, model.n_hash_cols);
  for (const ModelInfo::Layer& layer : model.layers) {
    absl::PrintF("  layer %d: %d rows of %s\n", layer.layer_id, layer.rows, layer.row_type);
  }

  Story a;
  a.seed = 1000;
  a.history = std::make_unique<SequenceHistory>(model.max_ngram);
  Story b;
  b.seed = 2000;
  b.session = "two-sequences-b";
  for (size_t pos = 0; pos < 24; ++pos) a.ids.push_back(Sample(model, a, pos, 0));
  for (size_t pos = 0; pos < 16; ++pos) b.ids.push_back(Sample(model, b, pos, 0));

  absl::PrintF("\n1. Prefill: two sequences, one call\n");
  absl::StatusOr<StepResult> step = Step(client, {{&a, 0}, {&b, 0}});
  if (!step.ok()) return step.status();
  absl::PrintF("   A: %d tokens; the client remembers them and sends look-back with every call\n", a.ids.size());
  absl::PrintF("   B: %d tokens; the server remembers them under session \"%s\"\n", b.ids.size(), b.session);
  absl::PrintF("   %.1f KiB of highway sent, as much came back updated, %.2f ms\n", step->bytes_sent / 1024.0,
               Milliseconds(step->took));

  constexpr int kSteps = 16;
  absl::PrintF("\n2. Decode: %d steps, a token of A and one of B in each\n", kSteps);
  absl::StatusOr<Latency> latency = Decode(client, {&a, &b}, kSteps);
  if (!latency.ok()) return latency.status();
  absl::PrintF("   a call took %.2f ms (median), %.2f ms (slowest)\n", Milliseconds(latency->median),
               Milliseconds(latency->slowest));

  const auto start = static_cast<int64_t>(b.ids.size());
  absl::PrintF("\n3. Speculate and roll back\n");
  for (int i = 0; i < 4; ++i) b.ids.push_back(Sample(model, b, b.ids.size(), 1));
  step = Step(client, {{&b, start}});
  if (!step.ok()) return step.status();
  absl::PrintF("   B: 4 draft tokens at positions %d..%d, %.2f ms\n", start, start + 3, Milliseconds(step->took));
  b.ids.resize(static_cast<size_t>(start) + 2);
  b.ids.push_back(Sample(model, b, b.ids.size(), 2));
  step = Step(client, {{&b, start + 2}});
  if (!step.ok()) return step.status();
  absl::PrintF("   B: 2 rejected; another token at position %d replaces them and what followed, %.2f ms\n", start + 2,
               Milliseconds(step->took));
  const std::vector<float> continued = LastPosition(model, *step);

  absl::PrintF("\n4. Check: all %d tokens of B again, in one call, without a session\n", b.ids.size());
  Story replay;
  replay.seed = b.seed;
  replay.ids = b.ids;
  step = Step(client, {{&replay, 0}});
  if (!step.ok()) return step.status();
  const std::vector<float> replayed = LastPosition(model, *step);
  if (std::memcmp(continued.data(), replayed.data(), continued.size() * sizeof(float)) != 0) {
    return absl::DataLossError("the last position differs from what the session gave");
  }
  absl::PrintF("   the last position is the same bits as after prefill, decode and rollback, %.2f ms\n",
               Milliseconds(step->took));
  return absl::OkStatus();
}

absl::Status Time(Client& client, const std::string& target) {
  Story story;
  story.seed = 3000;
  story.history = std::make_unique<SequenceHistory>(client.model().max_ngram);
  absl::StatusOr<Latency> latency = Decode(client, {&story}, 500);
  if (!latency.ok()) return latency.status();
  absl::PrintF("   %-40s %.2f ms (median of 500), %.2f ms (slowest)\n", target, Milliseconds(latency->median),
               Milliseconds(latency->slowest));
  return absl::OkStatus();
}

absl::Status Run(const std::vector<std::string>& targets) {
  std::vector<std::unique_ptr<Client>> clients;
  for (const std::string& target : targets) {
    ClientOptions options;
    options.replicas.targets = {target};
    absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(options);
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
  }
  const ModelInfo& model = clients[0]->model();
  absl::PrintF("connected to %s: engram-server %s, backend %s, tables in %s\n", targets[0], model.server_version,
               model.backend, model.residency);
  absl::Status status = Tell(*clients[0]);
  if (!status.ok()) return status;

  absl::PrintF("\n5. How long does a decode call of one token take, all layers in it?\n");
  for (size_t i = 0; i < clients.size(); ++i) {
    status = Time(*clients[i], targets[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace engram::client

int main(int argc, char** argv) {
  const std::vector<std::string> targets(argv + 1, argv + argc);
  if (targets.empty() || targets[0].starts_with("-")) {
    std::fprintf(stderr, "usage: engram-example TARGET...   (host:port or unix:/path)\n");
    return 2;
  }
  const absl::Status status = engram::client::Run(targets);
  if (!status.ok()) {
    std::fprintf(stderr, "engram-example: %s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}
