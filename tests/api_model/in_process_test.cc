// The step API without a network: messages decoded, admitted and run by the server's own parts, against the plain
// model.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <utility>

#include "server/engine/cpu_backend.h"
#include "server/transport/step_runner.h"
#include "server/transport/stream_call.h"
#include "tests/api_model/walk.h"
#include "tests/e2e/process.h"
#include "tests/model/small_synth.h"

namespace engram {
namespace {

struct InProcessOptions {
  int64_t max_batch_tokens = 7;  // small: calls are cut and share batches
  int threads = 2;
  int64_t session_memory_bytes = int64_t{1} << 30;
};

class InProcess final : public ApiDriver {
 public:
  InProcess(const std::shared_ptr<const EngramModel>& model, const WalkOptions& walk, InProcessOptions options,
            std::function<absl::Time()> clock)
      : sessions_({.max_ngram = model->geometry().max_ngram,
                   .window = walk.plain.session_window,
                   .memory_bytes = options.session_memory_bytes,
                   .ttl = walk.plain.session_ttl,
                   .clock = clock}),
        tickets_({.epoch = 7,
                  .memory_bytes = walk.plain.prepare_memory_bytes,
                  .ttl = walk.plain.ticket_ttl,
                  .clock = clock}),
        engine_(model,
                CpuBackend::Create(model, kernels::CpuKernels(),
                                   CpuBackendOptions{options.threads, options.max_batch_tokens})
                    .value(),
                ShapeOf(*model), EngineOptions{options.max_batch_tokens}, metrics_),
        core_({.model = model,
               .shape = ShapeOf(*model),
               .limits = {.position_limit = walk.calls.position_limit,
                          .session_window = walk.plain.session_window,
                          .prepare_memory_bytes = walk.plain.prepare_memory_bytes},
               .identity = {7, "cpu", "", "", "ram"},
               .budget = budget_,
               .sessions = sessions_,
               .tickets = tickets_,
               .engine = engine_,
               .staging = staging_,
               .metrics = metrics_}) {}

  std::vector<Reply> Run(const std::vector<Planned>& calls) override {
    std::vector<std::shared_ptr<Pending>> pending;
    for (const Planned& call : calls) {
      pending.push_back(std::make_shared<Pending>());
      Submit(call, pending.back());
    }
    std::vector<Reply> replies;
    for (const std::shared_ptr<Pending>& one : pending) {
      one->done.get_future().wait();
      replies.push_back(ReplyOf(*one));
    }
    return replies;
  }

  void EndStream(uint64_t stream, const std::string&) override { tickets_.EndStream(stream); }

  SessionStats session_stats() const { return sessions_.stats(); }
  TicketStats ticket_stats() { return tickets_.stats(); }
  Cost taken() const { return budget_.taken(); }

 private:
  // Stands for the call's handler; the call's hooks share it.
  struct Pending {
    StepReply step;
    size_t layers_done = 0;
    Permit permit;
    absl::Status status;
    int32_t released = 0, closed = 0;
    std::promise<void> done;
  };

  void Submit(const Planned& planned, const std::shared_ptr<Pending>& pending) {
    const std::string bytes = planned.request.SerializeAsString();
    const grpc::Slice slice(bytes);
    ArrivedMessage arrived(grpc::ByteBuffer(&slice, 1));
    v1::StreamRequest request;
    const absl::Status parsed = arrived.Parse(core_.list_limits(), request);
    ASSERT_TRUE(parsed.ok()) << parsed;
    switch (request.request_case()) {
      case v1::StreamRequest::kApply:
        return SubmitStep(DecodeApply(request.apply(), arrived.highway_bytes(), core_.decode_context()), arrived,
                          planned.stream, pending);
      case v1::StreamRequest::kPrepare:
        return SubmitStep(DecodePrepare(request.prepare(), core_.decode_context()), arrived, planned.stream, pending);
      case v1::StreamRequest::kLookup:
        return SubmitStep(DecodeLookup(request.lookup(), core_.decode_context()), arrived, planned.stream, pending);
      case v1::StreamRequest::kRelease:
        pending->released = ReleaseTickets(core_, request.release());
        return pending->done.set_value();
      default:
        RunCloseSessions(core_,
                         {request.close_sessions().sessions().begin(), request.close_sessions().sessions().end()},
                         absl::InfiniteFuture(), [pending](absl::Status status, int32_t closed) {
                           pending->status = std::move(status);
                           pending->closed = closed;
                           pending->done.set_value();
                         });
    }
  }

  void SubmitStep(absl::StatusOr<StepCall> step, const ArrivedMessage& arrived, uint64_t stream,
                  const std::shared_ptr<Pending>& pending) {
    if (!step.ok()) {
      pending->status = step.status();
      return pending->done.set_value();
    }
    absl::StatusOr<Permit> permit =
        budget_.Admit({.tokens = step->tokens, .bytes = step->request_bytes + step->reply_bytes});
    ASSERT_TRUE(permit.ok()) << permit.status();
    pending->permit = *std::move(permit);
    pending->step.call = *std::move(step);
    ASSERT_TRUE(StageHighways(core_, arrived, pending->step).ok());
    StepHooks hooks;
    hooks.stream = stream;
    hooks.cancelled = [] { return false; };
    hooks.layer_done = [pending](size_t) { ++pending->layers_done; };
    hooks.done = [pending](absl::Status status) {
      pending->permit = Permit();
      pending->status = std::move(status);
      pending->done.set_value();
    };
    RunStep(core_, pending->step, std::move(hooks));
  }

  static Reply ReplyOf(Pending& pending) {
    Reply reply;
    reply.released = pending.released;
    reply.closed = pending.closed;
    if (!pending.status.ok()) {
      const RefusalDetail detail = DetailOf(pending.status);
      reply.reason = detail.offenders.empty() ? pending.status.ToString()
                                              : std::string(ReasonName(detail.offenders.front().reason));
      return reply;
    }
    EXPECT_EQ(pending.layers_done, pending.step.results.size()) << "what a stream sends its replies by";
    for (const absl::Status& status : pending.step.statuses) {
      const RefusalDetail detail = DetailOf(status);
      reply.statuses.emplace_back(detail.offenders.empty() ? "" : ReasonName(detail.offenders.front().reason));
    }
    const bool prepares = pending.step.call.form == Form::kPrepare;
    grpc::ByteBuffer written = WriteReply(pending.step, 7).Take();
    grpc::Slice whole;
    EXPECT_TRUE(written.DumpToSingleSlice(&whole).ok());
    const auto size = static_cast<int>(whole.size());
    if (prepares) {
      v1::PrepareResponse response;
      EXPECT_TRUE(response.ParseFromArray(whole.begin(), size));
      EXPECT_EQ(response.server_epoch(), 7);
      reply.ticket = response.ticket();
      reply.layers = {response.layers().begin(), response.layers().end()};
    } else {
      v1::ApplyResponse response;  // a LookupResponse has the same fields
      EXPECT_TRUE(response.ParseFromArray(whole.begin(), size));
      EXPECT_EQ(response.server_epoch(), 7);
      EXPECT_EQ(response.sequences_size(), static_cast<int>(pending.step.statuses.size()));
      reply.layers = {response.layers().begin(), response.layers().end()};
    }
    return reply;
  }

  Metrics metrics_;
  Budget budget_{BudgetOptions{}};
  SessionTable sessions_;
  TicketStore tickets_;
  StagingPool staging_{int64_t{64} << 20};
  Engine engine_;
  const Core core_;
};

class InProcessModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const e2e::TempDir dir;
    Load(WriteSmallSynth(dir.path()));
  }

  void Load(const std::string& path) {
    auto model = EngramModel::Load(path, {});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    compute_ = std::make_unique<PlainCompute>(model_);
  }

  // Walks, and after each step compares what is counted.
  void WalkThrough(uint32_t seed, int64_t steps, const WalkOptions& options, InProcessOptions server_options,
                   Tally& tally) {
    const Walk* clock = nullptr;
    InProcess server(model_, options, server_options, [&clock] { return clock->now(); });
    Walk walk(seed, *compute_, options, server, tally);
    clock = &walk;
    int64_t squeezed = 0;
    for (int64_t step = 0; step < steps; ++step) {
      walk.Step();
      if (HasFatalFailure()) FAIL() << "seed " << seed << " step " << step;
      const SessionStats sessions = server.session_stats();
      // Memory takes the least recently used; that it took no others shows in what later calls are answered.
      walk.plain().Squeeze(sessions.evicted_memory - squeezed);
      squeezed = sessions.evicted_memory;
      ASSERT_EQ(sessions.sessions, static_cast<int64_t>(walk.plain().sessions().size()));
      walk.plain().tickets().Expire(walk.now());
      const TicketStats tickets = server.ticket_stats();
      ASSERT_EQ(tickets.tickets, walk.plain().tickets().alive()) << "seed " << seed << " step " << step;
      ASSERT_EQ(tickets.bytes, walk.plain().tickets().held());
      ASSERT_EQ(server.taken().tokens, 0);
      ASSERT_EQ(server.taken().bytes, 0);
    }
    squeezed_sessions_ += squeezed;
    squeezed_tickets_ += walk.plain().tickets().squeezed();
  }

  std::shared_ptr<const EngramModel> model_;
  std::unique_ptr<PlainCompute> compute_;
  int64_t squeezed_sessions_ = 0, squeezed_tickets_ = 0;
};

TEST_F(InProcessModelTest, EveryAnswerIsThePlainModelsBitForBit) {
  Tally tally;
  const bool judged = WalkSeeds(4, 1500, [&](uint32_t seed, int64_t steps) {
    InProcessOptions server;
    server.max_batch_tokens = 3 + seed * 5 % 17;
    WalkThrough(seed, steps, {}, server, tally);
  });
  if (judged && !HasFailure()) ExpectWellTravelled(tally);
}

// Another geometry, with weights that a real quantiser has made.
TEST_F(InProcessModelTest, SoItIsWithTheFixturesModel) {
  Load(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf");
  Tally tally;
  WalkSeeds(1, 300, [&](uint32_t seed, int64_t steps) { WalkThrough(seed, steps, {}, {}, tally); });
}

// Clocks that pass, sessions and tickets that memory is short of: one call at a time, so that each outcome is certain.
TEST_F(InProcessModelTest, TimeAndMemoryTakeWhatTheyShouldAndNothingElse) {
  Tally tally;
  WalkOptions options;
  options.longest_burst = 1;
  options.longest_wait = absl::Seconds(8);
  options.plain.session_ttl = absl::Seconds(30);
  options.plain.ticket_ttl = absl::Seconds(100);
  options.plain.session_window = 12;
  options.calls.longest = 6;
  // Of twelve tokens with all their layers.
  const StepShape& shape = compute_->shape();
  options.plain.prepare_memory_bytes = int64_t{12} * shape.layers * (shape.kv_values() * 2 + shape.columns * 8);
  options.calls.drop_tickets = false;
  const bool judged = WalkSeeds(4, 2500, [&](uint32_t seed, int64_t steps) {
    InProcessOptions server;
    if (seed % 2 == 0) server.session_memory_bytes = 900;  // takes most tickets along
    WalkThrough(seed, steps, options, server, tally);
  });
  if (!judged || HasFailure()) return;
  EXPECT_GE(squeezed_sessions_, 100);
  EXPECT_GE(squeezed_tickets_, 20);
  EXPECT_GE(tally.refused["PREPARE_FULL"], 20);
  EXPECT_GE(tally.refused["TOO_MANY_TOKENS"], 5);
}

}  // namespace
}  // namespace engram
