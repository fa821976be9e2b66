// Sessions, tickets, budget and engine together as the server puts them together, driven by many threads; what
// ThreadSanitizer is to see (preset tsan), since the RPC part around them cannot be instrumented.
//
// Calls are made here without messages: what server/transport/step_runner.cc does at a call's commit is done in the
// same order. Whatever the threads do, an answer holds the bits of the window that its commit saw.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/admission/budget.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/engine/ticket_store.h"
#include "server/refusal/refusal.h"
#include "server/session/session_table.h"
#include "tests/engine/async_backend.h"
#include "tests/engine/event.h"
#include "tests/model/small_synth.h"

namespace engram {
namespace {

constexpr char kPrincipal[] = "p";
constexpr int kLayer = 1;
constexpr uint64_t kStream = 3;

// A call and all that became of it.
struct Job {
  std::vector<int32_t> ids;      // its own, compressed
  std::vector<int32_t> windows;  // as its commit saw them; of a ticket's use, those it was prepared with
  std::vector<kernels::Bf16> kv;
  std::string ticket;  // of a Prepare
  bool uses = false;   // one
  Permit permit;
  absl::Status status;
  Event over;
};
using Jobs = std::vector<std::shared_ptr<Job>>;

Reason ReasonOf(const absl::Status& status) {
  const RefusalDetail detail = DetailOf(status);
  return detail.offenders.empty() ? Reason::kLoading : detail.offenders.front().reason;
}

// By the backend: "cpu" computes where the engine starts a step, "async" elsewhere, with steps under way together.
class CoreRaceTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string folder = testing::TempDir() + "/core-race-" + std::to_string(::getpid());
    std::filesystem::create_directories(folder);
    auto model = EngramModel::Load(WriteSmallSynth(folder), {});
    std::filesystem::remove_all(folder);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    shape_ = ShapeOf(*model_);
    constexpr int64_t kBatch = 7;
    std::unique_ptr<CpuBackend> cpu =
        CpuBackend::Create(model_, kernels::CpuKernels(), CpuBackendOptions{3, kBatch}).value();
    std::unique_ptr<Backend> backend;
    if (std::string(GetParam()) == "async") {
      backend = std::make_unique<AsyncBackend>(std::move(cpu), hand_);
    } else {
      backend = std::move(cpu);
    }
    backend_ = backend.get();
    engine_ = std::make_unique<Engine>(model_, std::move(backend), shape_, EngineOptions{kBatch}, metrics_);
  }

  // What every call has. The job's memory is the call's until it is over.
  std::unique_ptr<Call> NewCall(const std::shared_ptr<Job>& job, Form form, Priority priority) {
    auto call = std::make_unique<Call>();
    const auto tokens = static_cast<int64_t>(job->ids.size());
    absl::StatusOr<Permit> permit = budget_.Admit({.tokens = tokens, .bytes = tokens * 100});
    EXPECT_TRUE(permit.ok()) << permit.status();
    if (permit.ok()) job->permit = *std::move(permit);
    job->kv.resize(static_cast<size_t>(tokens * shape_.kv_values()));
    call->form = form;
    call->priority = priority;
    call->layers = {{.layer = kLayer, .highway = nullptr, .out = job->kv.data()}};
    call->sequences = {{.tokens = tokens}};
    call->tokens = tokens;
    call->cancelled = [] { return false; };
    call->done = [this, job](Call& c, absl::Status status) {
      if (c.preparing != nullptr) {
        if (status.ok()) {
          tickets_.Fill(job->ticket, c.preparing);
        } else {
          tickets_.Release(kPrincipal, job->ticket);
        }
      }
      job->permit = Permit();
      job->status = std::move(status);
      job->over.Notify();
    };
    return call;
  }

  std::shared_ptr<Job> Append(const std::string& session, int64_t start, std::vector<int32_t> ids,
                              Priority priority = Priority::kDecode, bool prepare = false) {
    auto job = std::make_shared<Job>();
    job->ids = std::move(ids);
    std::unique_ptr<Call> call = NewCall(job, prepare ? Form::kPrepare : Form::kKv, priority);
    call->session_keys = {SessionTable::KeyOf(kPrincipal, session)};
    call->commit = [this, job, session, start, prepare](Call& c) {
      if (prepare) {
        absl::StatusOr<std::string> ticket = tickets_.Reserve(kPrincipal, 1000, start % 2 == 1 ? kStream : 0);
        if (!ticket.ok()) return ticket.status();
        job->ticket = *std::move(ticket);
      }
      absl::StatusOr<CommitResult> committed =
          sessions_.Commit(kPrincipal, std::vector<SequenceClaim>{{session, start, job->ids}}, false);
      if (!committed.ok()) {
        tickets_.Release(kPrincipal, job->ticket);
        return committed.status();
      }
      for (const Rollback& rollback : committed->rollbacks) tickets_.RollBack(rollback.key, rollback.from);
      for (const std::string& key : committed->forgotten) tickets_.RollBack(key, 0);
      job->windows = c.windows = committed->windows;
      if (!prepare) return absl::OkStatus();
      tickets_.Bind(job->ticket, {{c.session_keys.front(), start + c.tokens}});
      auto prepared = std::make_shared<Prepared>();
      prepared->tokens = c.tokens;
      prepared->ids.resize(static_cast<size_t>(c.tokens * shape_.layers * shape_.columns));
      prepared->layers.push_back(
          {kLayer, backend_->TakePreparedKv(static_cast<int64_t>(job->kv.size() * sizeof(job->kv[0])))});
      c.layers[0].out = prepared->layers[0].kv();
      c.preparing = std::move(prepared);
      return absl::OkStatus();
    };
    engine_->Submit(std::move(call));
    return job;
  }

  // As the decoder does, it looks at the ticket on the caller's thread first; the commit asks again.
  std::shared_ptr<Job> Use(const std::shared_ptr<Job>& prepare) {
    auto job = std::make_shared<Job>();
    job->uses = true;
    const absl::StatusOr<std::shared_ptr<const Prepared>> seen = tickets_.Get(kPrincipal, prepare->ticket);
    if (!seen.ok()) {
      job->status = seen.status();
      job->over.Notify();
      return job;
    }
    EXPECT_EQ((*seen)->tokens, static_cast<int64_t>(prepare->ids.size()));
    job->ids = prepare->ids;
    job->windows = prepare->windows;
    std::unique_ptr<Call> call = NewCall(job, Form::kKv, Priority::kDecode);
    call->commit = [this, prepare](Call& c) {
      absl::StatusOr<std::shared_ptr<const Prepared>> prepared = tickets_.Get(kPrincipal, prepare->ticket);
      if (prepared.ok()) c.prepared = *std::move(prepared);
      return prepared.status();
    };
    engine_->Submit(std::move(call));
    return job;
  }

  std::shared_ptr<Job> Close(const std::string& session) {
    auto job = std::make_shared<Job>();
    std::unique_ptr<Call> call = NewCall(job, Form::kKv, Priority::kDecode);
    call->layers.clear();
    call->sequences.clear();
    call->session_keys = {SessionTable::KeyOf(kPrincipal, session)};
    call->commit = [this, session](Call&) {
      for (const std::string& key : sessions_.Close(kPrincipal, std::vector<std::string>{session})) {
        tickets_.RollBack(key, 0);
      }
      return absl::OkStatus();
    };
    engine_->Submit(std::move(call));
    return job;
  }

  // The bits of one window, on a batch of one token.
  const std::vector<kernels::Bf16>& KvOf(const std::vector<int32_t>& window) {
    std::vector<kernels::Bf16>& kv = expected_[window];
    if (kv.empty()) {
      kernels::Workers alone(1);
      const EngramLayer& layer = model_->layers()[kLayer];
      std::vector<int64_t> ids(static_cast<size_t>(shape_.layers * shape_.columns));
      kernels::CpuKernels().hash_window(model_->hash_tables(), window.data(), 1, ids.data(), alone);
      std::vector<kernels::Bf16> rows(static_cast<size_t>(model_->geometry().inputs()));
      kernels::CpuKernels().gather_rows(layer.table, ids.data() + kLayer * shape_.columns, shape_.columns, 1,
                                        shape_.columns, rows.data(), alone);
      kv.resize(static_cast<size_t>(shape_.kv_values()));
      // The reference has the same bits and needs nothing packed.
      kernels::ReferenceKernels().project(layer.wkv, rows.data(), 1, kv.data(), nullptr, alone);
    }
    return kv;
  }

  // A served job's window ends in its own ids and its kv is that window's.
  void ExpectItsBits(const Job& job) {
    const auto before = static_cast<size_t>(shape_.max_ngram - 1);
    ASSERT_EQ(job.windows.size(), before + job.ids.size());
    ASSERT_TRUE(std::equal(job.ids.begin(), job.ids.end(), job.windows.begin() + static_cast<int64_t>(before)));
    for (size_t t = 0; t < job.ids.size(); ++t) {
      const auto first = job.windows.begin() + static_cast<int64_t>(t);
      const std::vector<kernels::Bf16>& kv = KvOf({first, first + shape_.max_ngram});
      ASSERT_EQ(std::memcmp(kv.data(), job.kv.data() + t * kv.size(), kv.size() * sizeof(kv[0])), 0) << "token " << t;
    }
  }

  // Waits for them; the served ones' bits are right, the others' reasons among `allowed`. How many were served.
  int Settle(const Jobs& jobs, const std::vector<Reason>& allowed) {
    int served = 0;
    for (const std::shared_ptr<Job>& job : jobs) {
      job->over.Await();
      if (job->status.ok()) {
        ++served;
        if (job->ticket.empty()) ExpectItsBits(*job);
      } else {
        EXPECT_NE(std::find(allowed.begin(), allowed.end(), ReasonOf(job->status)), allowed.end()) << job->status;
      }
    }
    return served;
  }

  void ExpectNothingLeft(const std::vector<std::string>& sessions) {
    Jobs closes;
    for (const std::string& session : sessions) closes.push_back(Close(session));
    for (const auto& close : closes) close->over.Await();
    EXPECT_EQ(sessions_.stats().sessions, 0);
    EXPECT_EQ(sessions_.stats().bytes, 0);
    EXPECT_EQ(tickets_.stats().tickets, 0);
    EXPECT_EQ(tickets_.stats().bytes, 0);
    EXPECT_EQ(budget_.taken().tokens, 0);
    EXPECT_EQ(budget_.taken().bytes, 0);
  }

  // Runs body(thread, its jobs) on so many threads; all the jobs.
  template <typename Body>
  static Jobs OnThreads(int count, const Body& body) {
    std::vector<Jobs> jobs(static_cast<size_t>(count));
    std::vector<std::thread> threads;
    for (int t = 0; t < count; ++t) threads.emplace_back([&, t] { body(t, jobs[static_cast<size_t>(t)]); });
    for (std::thread& thread : threads) thread.join();
    Jobs all;
    for (const Jobs& some : jobs) all.insert(all.end(), some.begin(), some.end());
    return all;
  }

  static std::vector<int32_t> Ids(std::mt19937& random, size_t most) {
    std::vector<int32_t> ids(1 + random() % most);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % 4);
    return ids;
  }

  Metrics metrics_;
  Budget budget_{BudgetOptions{}};
  SessionTable sessions_{SessionOptions{.max_ngram = 3, .window = 16}};
  TicketStore tickets_{TicketOptions{.epoch = 1, .ttl = absl::Hours(1)}};
  std::shared_ptr<const EngramModel> model_;
  StepShape shape_;
  std::map<std::vector<int32_t>, std::vector<kernels::Bf16>> expected_;
  const std::shared_ptr<AsyncBackend::Hand> hand_ = std::make_shared<AsyncBackend::Hand>();
  Backend* backend_ = nullptr;      // the engine's
  std::unique_ptr<Engine> engine_;  // last: it uses the above
};

TEST_P(CoreRaceTest, SixtyFourThreadsOnEightSessionsWhileTheyAreClosed) {
  const Jobs jobs = OnThreads(64, [this](int t, Jobs& mine) {
    std::mt19937 random(static_cast<uint32_t>(t));
    for (int i = 0; i < 12; ++i) {
      const std::string session = "s" + std::to_string(random() % 8);
      if (random() % 10 == 0) Close(session)->over.Await();
      const int64_t start = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 8);
      const Priority priority = random() % 2 == 0 ? Priority::kDecode : Priority::kPrefill;
      mine.push_back(Append(session, start, Ids(random, 9), priority));
      if (random() % 2 == 0) mine.back()->over.Await();
    }
  });
  EXPECT_GT(Settle(jobs, {Reason::kSessionLost, Reason::kPositionGap}), 200);
  EXPECT_TRUE(std::string(GetParam()) != "async" || hand_->most_under_way() > 1) << "steps were under way together";
  ExpectNothingLeft({"s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"});
}

TEST_P(CoreRaceTest, PipelinedCallsOfOneSessionKeepTheirOrderWhateverTheirPriority) {
  constexpr int kThreads = 4;
  const Jobs jobs = OnThreads(kThreads, [this](int t, Jobs& mine) {
    std::mt19937 random(static_cast<uint32_t>(t));
    int64_t start = 0;
    for (int i = 0; i < 100; ++i) {
      const Priority priority = random() % 2 == 0 ? Priority::kDecode : Priority::kPrefill;
      mine.push_back(Append(std::to_string(t), start, Ids(random, 12), priority));
      start += static_cast<int64_t>(mine.back()->ids.size());
    }
  });
  EXPECT_EQ(Settle(jobs, {}), kThreads * 100);
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (i % 100 == 0) continue;
    // The look-back is the end of the call before, so none was overtaken.
    const std::vector<int32_t>& before = jobs[i - 1]->windows;
    ASSERT_EQ(jobs[i]->windows[0], before[before.size() - 2]);
    ASSERT_EQ(jobs[i]->windows[1], before[before.size() - 1]);
  }
  ExpectNothingLeft({"0", "1", "2", "3"});
}

TEST_P(CoreRaceTest, ATicketAnswersWithTheIdsItWasPreparedWithOrNotAtAll) {
  std::mutex mutex;
  Jobs prepared;
  for (const char* session : {"a", "b"}) {
    prepared.push_back(Append(session, 0, {1, 2, 3, 0, 1, 2}, Priority::kDecode, true));
    prepared.back()->over.Await();
  }
  const std::shared_ptr<Job> steady = Append("c", 0, {1}, Priority::kDecode, true);
  steady->over.Await();
  const Jobs jobs = OnThreads(6, [&](int t, Jobs& mine) {
    std::mt19937 random(static_cast<uint32_t>(t));
    for (int i = 0; i < 60; ++i) {
      const std::string session(1, static_cast<char>('a' + random() % 2));
      const auto start = static_cast<int64_t>(2 + random() % 4);
      switch (t % 3) {
        case 0: {
          std::shared_ptr<Job> job = Append(session, start, Ids(random, 9), Priority::kDecode, true);
          job->over.Await();
          const std::lock_guard<std::mutex> lock(mutex);
          if (job->status.ok()) prepared.push_back(job);
          break;
        }
        case 1:
          mine.push_back(Append(session, start, Ids(random, 9), Priority::kPrefill));
          if (random() % 2 == 0) mine.back()->over.Await();
          break;
        default: {
          std::shared_ptr<Job> ticket;
          {
            const std::lock_guard<std::mutex> lock(mutex);
            // One of the latest, or the one of a session that nobody writes any more.
            ticket = random() % 8 == 0
                         ? steady
                         : prepared[prepared.size() - 1 - random() % std::min<size_t>(3, prepared.size())];
          }
          mine.push_back(Use(ticket));
          if (random() % 2 == 0) mine.back()->over.Await();
          // What handler threads and a scrape of metrics do meanwhile.
          if (random() % 16 == 0 && ticket != steady) tickets_.Release(kPrincipal, ticket->ticket);
          if (random() % 32 == 0) tickets_.EndStream(kStream);
          tickets_.stats();
          sessions_.stats();
        }
      }
    }
  });
  EXPECT_GT(Settle(jobs, {Reason::kPositionGap, Reason::kTicketExpired}), 60);
  EXPECT_TRUE(std::any_of(jobs.begin(), jobs.end(), [](const auto& job) { return job->uses && job->status.ok(); }));
  ExpectNothingLeft({"a", "b", "c"});
}

TEST_P(CoreRaceTest, AStopWhileBusyEndsEveryCallOnceAndLeavesNothingBehind) {
  // A call holds the engine at its commit until the others wait and the stop has begun.
  auto first = std::make_shared<Job>();
  std::unique_ptr<Call> hold = NewCall(first, Form::kKv, Priority::kDecode);
  hold->layers.clear();
  Event let_go;
  hold->commit = [&let_go](Call&) {
    let_go.Await();
    return absl::OkStatus();
  };
  engine_->Submit(std::move(hold));
  const Jobs jobs = OnThreads(8, [this](int t, Jobs& mine) {
    std::mt19937 random(static_cast<uint32_t>(t));
    for (int i = 0; i < 60; ++i) {
      const bool prepare = random() % 3 == 0;
      mine.push_back(Append(std::to_string(random() % 8), 0, Ids(random, 12), Priority::kPrefill, prepare));
    }
  });
  std::thread late([&let_go] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    let_go.Notify();
  });
  engine_.reset();
  late.join();
  const int served = Settle(jobs, {Reason::kDraining});
  first->over.Await();
  EXPECT_LT(served, static_cast<int>(jobs.size()) / 2) << "one batch at the most";
  EXPECT_EQ(budget_.taken().tokens, 0);
  EXPECT_EQ(budget_.taken().bytes, 0);
  // Tickets of calls that did not get through are gone.
  for (const std::shared_ptr<Job>& job : jobs) {
    if (!job->status.ok() && !job->ticket.empty()) {
      EXPECT_EQ(ReasonOf(tickets_.Get(kPrincipal, job->ticket).status()), Reason::kTicketExpired);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CoreRaceTest, ::testing::Values("cpu", "async"));

}  // namespace
}  // namespace engram
