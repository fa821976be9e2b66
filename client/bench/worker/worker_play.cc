#include "client/bench/worker/worker_play.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "client/bench/worker/clock.h"
#include "client/bench/worker/step_schedule.h"

namespace engram::bench {
namespace {

// SplitMix64's mixing: seeds of neighbours have nothing in common.
uint64_t Mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// How long something of a step was on its way: what spans have in common counts once.
absl::Duration FetchedTime(std::vector<FetchSpan> spans) {
  std::sort(spans.begin(), spans.end(), [](const FetchSpan& a, const FetchSpan& b) { return a.begin < b.begin; });
  absl::Duration total, covered;
  for (const FetchSpan& span : spans) {
    total += std::max(absl::ZeroDuration(), span.end - std::max(span.begin, covered));
    covered = std::max(covered, span.end);
  }
  return total;
}

// The run's moments, the same for all workers.
struct RunTimes {
  absl::Duration begin, measure, end;
};

class Worker {
 public:
  Worker(const PlayOptions& options, int number, std::unique_ptr<StepFetch> fetch)
      : options_(options),
        population_([&] {
          PopulationOptions population = options.population;
          population.seed = Mixed(population.seed + static_cast<uint64_t>(number));
          return population;
        }()),
        schedule_(options.step, options.depth, options.layer_ids),
        // Workers do not step together.
        phase_(options.step * number / options.workers),
        fetch_(std::move(fetch)) {
    figures_.waits.resize(options.layer_ids.size());
    figures_.fetches.resize(options.layer_ids.size());
  }

  PlayFigures Run(const RunTimes& times) {
    SleepExactly();
    absl::Duration start = times.begin + phase_;
    PlannedStep step = population_.Next();
    int64_t steps = 0;
    while (start < times.end || figures_.steps == 0) {
      // A step that warmed up for longer than all of the time measured: the next one counts.
      const bool counts = start >= times.measure;
      SleepUntil(start);
      PlannedStep next = RunStep(step, start, counts);
      start = schedule_.end();
      if (options_.verify_every > 0 && ++steps % options_.verify_every == 0) {
        const absl::Status same = fetch_->Verify(step);
        if (!same.ok() && figures_.mismatch.empty()) figures_.mismatch = std::string(same.message());
        figures_.totals.verified += fetch_->TakeTotals().verified;
        // Not a part of what is played.
        start = std::max(start, ClockNow());
      }
      step = std::move(next);
    }
    return std::move(figures_);
  }

 private:
  // The step after it, which is made while there is nothing else to do.
  PlannedStep RunStep(const PlannedStep& step, absl::Duration start, bool counts) {
    schedule_.Begin(start);
    const absl::Duration late = ClockNow() - start;
    fetch_->Begin(step);
    std::vector<FetchSpan> fetched;
    for (size_t layer = 0; layer < schedule_.layers(); ++layer) {
      SleepUntil(schedule_.ReachedAt(layer));
      const LayerArrival arrival = fetch_->Await(layer);
      const absl::Duration wait = schedule_.Arrived(layer, arrival.ready());
      fetched.insert(fetched.end(), {arrival.ahead, arrival.then});
      if (!counts) continue;
      figures_.waits[layer].Add(wait);
      figures_.fetches[layer].Add(arrival.latency());
    }
    const FetchTotals totals = fetch_->TakeTotals();
    if (counts) Count(step, late, FetchedTime(std::move(fetched)), totals);
    return population_.Next();
  }

  void Count(const PlannedStep& step, absl::Duration late, absl::Duration fetched, const FetchTotals& totals) {
    figures_.steps += 1;
    if (!totals.errors.empty()) figures_.failed_steps += 1;
    figures_.tokens += step.tokens;
    figures_.prefill_tokens += step.prefill_tokens;
    figures_.emitted += step.emitted;
    figures_.arrived += step.arrived;
    figures_.realised += schedule_.end() - schedule_.start();
    figures_.fetched += fetched;
    figures_.exposed += schedule_.exposed();
    figures_.totals.Add(totals);
    figures_.late.Add(late);
  }

  const PlayOptions& options_;
  Population population_;
  StepSchedule schedule_;
  const absl::Duration phase_;
  const std::unique_ptr<StepFetch> fetch_;
  PlayFigures figures_;
};

}  // namespace

void PlayFigures::Merge(const PlayFigures& other) {
  steps += other.steps;
  failed_steps += other.failed_steps;
  tokens += other.tokens;
  prefill_tokens += other.prefill_tokens;
  emitted += other.emitted;
  arrived += other.arrived;
  realised += other.realised;
  fetched += other.fetched;
  exposed += other.exposed;
  if (waits.size() < other.waits.size()) waits.resize(other.waits.size());
  if (fetches.size() < other.fetches.size()) fetches.resize(other.fetches.size());
  for (size_t i = 0; i < other.waits.size(); ++i) waits[i].Merge(other.waits[i]);
  for (size_t i = 0; i < other.fetches.size(); ++i) fetches[i].Merge(other.fetches[i]);
  late.Merge(other.late);
  totals.Add(other.totals);
  if (mismatch.empty()) mismatch = other.mismatch;
}

double PlayFigures::slowdown(absl::Duration step) const {
  return steps == 0 ? 0 : absl::FDivDuration(realised, step * steps) - 1;
}

double PlayFigures::hidden() const {
  // A wait may be longer than what it waited for: a worker's thread that wakes up late sends late.
  return fetched <= absl::ZeroDuration() ? 1 : std::max(0.0, 1 - absl::FDivDuration(exposed, fetched));
}

absl::StatusOr<PlayFigures> Play(const PlayOptions& options, const FetchMaker& make,
                                 const std::function<void()>& measuring, const std::function<void()>& measured) {
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < options.workers; ++i) {
    absl::StatusOr<std::unique_ptr<StepFetch>> fetch = make(i);
    if (!fetch.ok()) return fetch.status();
    workers.push_back(std::make_unique<Worker>(options, i, *std::move(fetch)));
  }
  // Threads are there before the first step.
  RunTimes times;
  times.begin = ClockNow() + absl::Milliseconds(20);
  times.measure = times.begin + options.warm_up;
  times.end = times.measure + options.duration;
  std::vector<PlayFigures> figures(workers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers.size(); ++i) {
    threads.emplace_back([&, i] { figures[i] = workers[i]->Run(times); });
  }
  SleepUntil(times.measure);
  measuring();
  SleepUntil(times.end);
  measured();
  for (std::thread& thread : threads) thread.join();
  PlayFigures all;
  for (const PlayFigures& one : figures) all.Merge(one);
  return all;
}

}  // namespace engram::bench
