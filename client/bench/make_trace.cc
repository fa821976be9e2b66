#include "client/bench/make_trace.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "client/bench/token_source.h"

namespace engram::bench {
namespace {

// Phrases that prompts are made of: some thousand, so that most of a chunk's n-grams have been seen and some are new.
constexpr int64_t kPromptPool = 4000;
constexpr int64_t kChunkTokens = 256;

// Whole numbers from mixed bits alone: the standard library's distributions differ between libraries.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(Mix(seed)) {}
  // In [low, high].
  int64_t Roll(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  uint64_t Next() { return state_ = Mix(state_); }

 private:
  uint64_t state_;
};

struct Running {
  std::string session;
  int64_t position = 0;
  int64_t steps_left = 0;
  int64_t pool = 0;
};

// Tokens that a decoding sequence gets in a step.
int64_t DecodedTokens(Dice& dice) { return dice.Roll(0, 3) == 0 ? dice.Roll(2, 4) : 1; }

int64_t StepTime(const TraceShape& shape, int64_t step, Dice& dice) {
  // Steps take 0.9 to 1.1 of their time, and are rounded to 10 us so that the file reads well.
  const double jitter = 0.2 * UnitOf(dice.Next()) - 0.1;
  return static_cast<int64_t>(std::max(0.0, (static_cast<double>(step) + jitter) * shape.step_ms * 100)) * 10'000;
}

}  // namespace

std::vector<TraceStep> DecodeTrace(const TraceShape& shape) {
  Dice dice(shape.seed);
  int64_t named = 0;
  const auto arrive = [&] {
    return Running{absl::StrCat("chat-", named++), dice.Roll(50, 2000), dice.Roll(20, 200), 0};
  };
  std::vector<Running> batch;
  for (int64_t i = 0; i < shape.batch; ++i) batch.push_back(arrive());
  std::vector<TraceStep> steps;
  for (int64_t number = 0; number < shape.steps; ++number) {
    TraceStep step;
    step.at = StepTime(shape, number, dice);
    for (Running& running : batch) {
      if (running.steps_left-- == 0) running = arrive();
      const int64_t tokens = DecodedTokens(dice);
      step.sequences.push_back({running.session, running.position, tokens, running.pool});
      running.position += tokens;
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

std::vector<TraceStep> PrefillTrace(const TraceShape& shape) {
  Dice dice(shape.seed);
  int64_t named = 0;
  std::vector<Running> batch;
  Running prompt;
  int64_t prompt_tokens = 0;
  std::vector<TraceStep> steps;
  for (int64_t number = 0; number < shape.steps; ++number) {
    TraceStep step;
    step.at = StepTime(shape, number, dice);
    if (prompt.position >= prompt_tokens) {
      if (!prompt.session.empty()) {
        prompt.steps_left = dice.Roll(20, 100);
        batch.push_back(prompt);
        if (static_cast<int64_t>(batch.size()) > std::max<int64_t>(1, shape.batch / 2)) batch.erase(batch.begin());
      }
      prompt = {absl::StrCat("prompt-", named++), 0, 0, kPromptPool};
      prompt_tokens = dice.Roll(200, 3000);
    }
    const int64_t chunk = std::min(kChunkTokens, prompt_tokens - prompt.position);
    step.sequences.push_back({prompt.session, prompt.position, chunk, prompt.pool});
    prompt.position += chunk;
    for (Running& running : batch) {
      if (running.steps_left <= 0) continue;
      --running.steps_left;
      step.sequences.push_back({running.session, running.position, 1, running.pool});
      ++running.position;
    }
    steps.push_back(std::move(step));
  }
  return steps;
}

Command AddMakeTraceCommand(CLI::App& app) {
  struct Flags {
    std::string kind;
    std::string out;
    TraceShape shape;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("make-trace", "Make up a trace for --trace: decode steps, or mostly prompts");
  command->add_option("KIND", flags->kind, "decode or prefill")
      ->required()
      ->check(CLI::IsMember({"decode", "prefill"}));
  command->add_option("--out", flags->out, "File to write")->required()->type_name("FILE");
  command->add_option("--steps", flags->shape.steps, "Steps of the trace")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command->add_option("--batch", flags->shape.batch, "Sequences that decode at a time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--step-ms", flags->shape.step_ms, "Milliseconds between steps, give or take a tenth")
      ->check(CLI::Range(0.01, 1e6))
      ->capture_default_str();
  command->add_option("--seed", flags->shape.seed, "The same seed makes the same trace")->capture_default_str();
  command->footer("Example:\n  engram-bench make-trace decode --steps 1000 --batch 32 --out decode.jsonl");
  return {command, [flags] {
            const std::vector<TraceStep> steps =
                flags->kind == "decode" ? DecodeTrace(flags->shape) : PrefillTrace(flags->shape);
            std::ofstream file(flags->out, std::ios::binary | std::ios::trunc);
            for (const TraceStep& step : steps) file << TraceLine(step) << '\n';
            file.close();
            if (file) return kExitOk;
            std::fprintf(stderr, "engram-bench: --out %s: cannot be written\n", flags->out.c_str());
            return kExitError;
          }};
}

}  // namespace engram::bench
