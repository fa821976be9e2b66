#include "client/bench/worker/worker_options.h"

#include <algorithm>
#include <cmath>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"

namespace engram::bench {
namespace {

constexpr client::Form kForms[] = {client::Form::kRowsNative, client::Form::kRowsBf16, client::Form::kKv,
                                   client::Form::kUpdate,     client::Form::kGate,     client::Form::kHighway};

std::vector<std::string> FormNames() {
  std::vector<std::string> names;
  for (const client::Form form : kForms) names.emplace_back(client::FormName(form));
  return names;
}

// Lists may stand behind one flag, "1,2,4", or behind several.
CLI::Option* List(CLI::Option* option) { return option->delimiter(',')->expected(1)->take_all(); }

void AddRun(CLI::App* command, WorkerOptions* options) {
  List(command->add_option("--form", options->forms,
                           "What is fetched: rows-native, rows-bf16, kv, update, gate, highway"))
      ->type_name("LIST")
      ->capture_default_str()
      ->check(CLI::IsMember(FormNames()))
      ->group("Run");
  List(command->add_option("--workers", options->workers, "Workers on the server at a time, run after run: 1,2,4,8"))
      ->type_name("LIST")
      ->capture_default_str()
      ->check(CLI::Range(1, 256))
      ->group("Run");
  command->add_option("--duration", options->duration_secs, "Seconds measured of each run")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 86400.0))
      ->group("Run");
  command->add_option("--warm-up", options->warm_up_secs, "Seconds before them")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0))
      ->group("Run");
  command->add_option("--seed", options->seed, "Of ids, acceptance, arrivals: the same seed gives the same steps")
      ->capture_default_str()
      ->group("Run");
  command
      ->add_option("--verify-every", options->verify_every,
                   "Of so many steps, compare one with the answer to a plain call; 0: none")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000000))
      ->group("Run");
  command->add_option("--json", options->json, "Write the figures here")->type_name("FILE")->group("Run");
}

void AddWorkerShape(CLI::App* command, WorkerOptions* options) {
  command->add_option("--step-ms", options->step_ms, "What the GPU takes for a step, milliseconds")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 60000.0))
      ->group("Worker");
  command
      ->add_option("--depth", options->depth, "Layers of the model; engram layer L is reached at L / depth of a step")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000))
      ->group("Worker");
  command->add_option("--batch", options->batch, "Sequences in hand")
      ->capture_default_str()
      ->check(CLI::Range(1, 16384))
      ->group("Worker");
  command->add_option("--spec-k", options->spec_k, "Drafts that each of them verifies in a step")
      ->capture_default_str()
      ->check(CLI::Range(0, 64))
      ->group("Worker");
  command->add_option("--accept", options->accept, "Chance of each draft, in turn, to be accepted")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0))
      ->group("Worker");
  command->add_option("--prompt-mean", options->prompt_mean, "Mean tokens of a prompt")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20))
      ->group("Worker");
  command->add_option("--output-mean", options->output_mean, "Mean tokens after which a sequence leaves")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20))
      ->group("Worker");
  command
      ->add_option("--prefill-chunk", options->prefill_chunk,
                   "Most prompt tokens that ride along in a step; 0: prompts are prefilled elsewhere")
      ->capture_default_str()
      ->check(CLI::Range(0, 65536))
      ->group("Worker");
  command->add_option("--tp", options->tp, "Tensor-parallel ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 64))
      ->group("Worker");
  command
      ->add_option("--fanout", options->fanout,
                   "slice: each rank fetches its part, over a connection of its own; broadcast: one fetches all, and "
                   "passing it on costs nothing here")
      ->capture_default_str()
      ->check(CLI::IsMember({"slice", "broadcast"}))
      ->group("Worker");
  command
      ->add_option(
          "--calls", options->calls,
          "Of rows and kv: chain, a call per layer, each when the one before has arrived; layer, a call per layer, "
          "all at once; step, one call for all")
      ->capture_default_str()
      ->check(CLI::IsMember({"chain", "layer", "step"}))
      ->group("Worker");
  command->add_option("--dtype", options->dtype, "Of the highway: f32, bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->group("Worker");
}

void AddConnection(CLI::App* command, WorkerOptions* options) {
  command
      ->add_option("--target", options->targets,
                   "Server: host:port or unix:/path; several, or a name with several addresses, are replicas")
      ->delimiter(',')
      ->expected(1)
      ->take_all()
      ->type_name("ADDR")
      ->capture_default_str()
      ->group("Connection");
  const CLI::Range seconds(0.001, 86400.0);
  command
      ->add_option("--connect-timeout", options->connect_timeout_secs, "Seconds to wait for a server that is starting")
      ->capture_default_str()
      ->check(seconds)
      ->group("Connection");
  command->add_option("--timeout", options->timeout_secs, "Seconds a call may take")
      ->capture_default_str()
      ->check(seconds)
      ->group("Connection");
  command
      ->add_option(
          "--metrics", options->metrics,
          "The server's metrics listener, host:port: how busy its engine is, and whether that bounds the workers")
      ->group("Connection");
}

void AddBaseline(CLI::App* command, WorkerOptions* options) {
  command
      ->add_option("--baseline", options->baseline,
                   "local: after every run the same one with the table in this process; needs --model")
      ->check(CLI::IsMember({"local"}))
      ->group("Baseline");
  command->add_option("--model", options->model, "The model's file; it must be the one that is served")
      ->check(CLI::ExistingFile)
      ->group("Baseline");
  command->add_option("--residency", options->residency, "Of its tables: ram, mmap")
      ->capture_default_str()
      ->check(CLI::IsMember({"ram", "mmap"}))
      ->group("Baseline");
}

}  // namespace

void AddWorkerFlags(CLI::App* command, WorkerOptions* options) {
  AddConnection(command, options);
  AddRun(command, options);
  AddWorkerShape(command, options);
  AddBaseline(command, options);
  command->footer(
      "Example:\n"
      "  engram-bench worker --target unix:/run/engram.sock --metrics 127.0.0.1:8002 --form rows-native,kv \\\n"
      "      --workers 1,2,4 --tp 8 --fanout slice");
}

absl::Status CheckWorkerOptions(const WorkerOptions& options) {
  if (!options.baseline.empty() && options.model.empty()) {
    return absl::InvalidArgumentError("--baseline local needs --model, the file that is served");
  }
  if (options.baseline.empty() && !options.model.empty()) {
    return absl::InvalidArgumentError("--model is given, but nothing reads it without --baseline local");
  }
  return absl::OkStatus();
}

client::Form FormOf(const std::string& name) {
  for (const client::Form form : kForms) {
    if (client::FormName(form) == name) return form;
  }
  return client::Form::kAuto;
}

absl::StatusOr<PlayOptions> PlayOptionsOf(const WorkerOptions& options, const client::ModelInfo& model, int workers) {
  PlayOptions play;
  play.step = absl::Milliseconds(options.step_ms);
  play.depth = options.depth;
  for (const client::ModelInfo::Layer& layer : model.layers) {
    if (layer.layer_id < options.depth) {
      play.layer_ids.push_back(layer.layer_id);
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat("--depth is ", options.depth, "; the model has an engram layer ",
                                                   layer.layer_id, ", expected more than that"));
  }
  play.workers = workers;
  play.population = {.batch = options.batch,
                     .spec_k = options.spec_k,
                     .accept = options.accept,
                     .prompt_mean = options.prompt_mean,
                     .output_mean = options.output_mean,
                     .prefill_chunk = options.prefill_chunk,
                     .vocab = model.vocab,
                     .max_ngram = model.max_ngram,
                     .position_limit = model.limits.position_limit,
                     .seed = options.seed};
  if (model.limits.position_limit < options.spec_k + 2) {
    return absl::InvalidArgumentError(absl::StrCat("--spec-k is ", options.spec_k,
                                                   "; the server allows positions below ", model.limits.position_limit,
                                                   ", which a sequence of one step passes"));
  }
  play.warm_up = absl::Seconds(options.warm_up_secs);
  play.duration = absl::Seconds(options.duration_secs);
  play.verify_every = options.verify_every;
  return play;
}

WireFetchOptions FetchOptionsOf(const WorkerOptions& options, const PlayOptions& play, client::Form form) {
  WireFetchOptions fetch;
  fetch.form = form;
  fetch.dtype = options.dtype == "f32" ? client::HighwayDtype::kF32 : client::HighwayDtype::kBf16;
  fetch.ranks = options.tp;
  fetch.fanout = options.fanout == "slice" ? Fanout::kSlice : Fanout::kBroadcast;
  fetch.calls = options.calls == "chain" ? Calls::kChain : options.calls == "layer" ? Calls::kLayer : Calls::kStep;
  fetch.max_step_tokens = int64_t{play.population.batch} * (play.population.spec_k + 1) + play.population.prefill_chunk;
  fetch.timeout = absl::Seconds(options.timeout_secs);
  return fetch;
}

}  // namespace engram::bench
