#include "server/transport/step_runner.h"

#include <algorithm>
#include <utility>

namespace engram {
namespace {

// The commit point of a call by sequences: histories are checked and written, tickets that this rolls back go, and a
// Prepare gets its own.
class SequenceCommit {
 public:
  SequenceCommit(const Core& core, StepReply& reply, uint64_t stream) : core_(core), reply_(reply), stream_(stream) {}

  absl::Status Run(Call& call) {
    StepCall& step = reply_.call;
    std::string ticket;
    if (step.form == Form::kPrepare) {
      absl::StatusOr<std::string> reserved =
          core_.tickets.Reserve(core_.principal, PreparedBytes(step, core_.shape), stream_);
      if (!reserved.ok()) return reserved.status();
      ticket = *std::move(reserved);
    }
    absl::StatusOr<CommitResult> committed = core_.sessions.Commit(core_.principal, step.claims, step.partial_ok);
    if (!committed.ok()) {
      core_.tickets.Release(core_.principal, ticket);
      return committed.status();
    }
    for (const Rollback& rollback : committed->rollbacks) core_.tickets.RollBack(rollback.key, rollback.from);
    for (const std::string& key : committed->forgotten) core_.tickets.RollBack(key, 0);
    if (!ticket.empty()) core_.tickets.Bind(ticket, Spans());
    reply_.ticket = std::move(ticket);
    TakeRefusals(call, committed->refused);
    TakeWindows(call, committed->windows);
    if (step.form != Form::kPrepare) return absl::OkStatus();
    absl::Status room = MakeRoom(call);
    if (!room.ok()) core_.tickets.Release(core_.principal, reply_.ticket);
    return room;
  }

 private:
  // Memory for the result: only now, since the ticket store has a bound and a queue of Prepares has none of bytes.
  absl::Status MakeRoom(Call& call) {
    const StepCall& step = reply_.call;
    auto prepared = std::make_shared<Prepared>();
    prepared->tokens = step.tokens;
    prepared->token_mask = step.token_mask;
    prepared->ids.resize(static_cast<size_t>(step.tokens * core_.shape.layers * core_.shape.columns));
    const int64_t bytes = step.tokens * core_.shape.kv_values() * static_cast<int64_t>(sizeof(kernels::Bf16));
    for (CallLayer& layer : call.layers) {
      prepared->layers.push_back({layer.layer, core_.engine.backend().TakePreparedKv(bytes)});
      layer.out = prepared->layers.back().kv();
      if (layer.out == nullptr) return OutOfMemory(bytes);
    }
    call.preparing = std::move(prepared);
    return absl::OkStatus();
  }

  std::vector<TicketSpan> Spans() const {
    std::vector<TicketSpan> spans;
    for (const SequenceClaim& claim : reply_.call.claims) {
      if (claim.session.empty()) continue;
      spans.push_back({SessionTable::KeyOf(core_.principal, claim.session),
                       claim.start_pos + static_cast<int64_t>(claim.ids.size())});
    }
    return spans;
  }

  void TakeRefusals(Call& call, const std::vector<absl::Status>& refused) {
    StepCall& step = reply_.call;
    for (size_t c = 0; c < refused.size(); ++c) {
      if (refused[c].ok()) continue;
      const size_t sequence = step.claim_of[c];
      step.statuses[sequence] = refused[c];
      call.sequences[sequence].refused = true;
    }
    reply_.statuses = step.statuses;
  }

  // Sequences that the decoder refused have no claim: their windows are filled up, so that the layout stays.
  void TakeWindows(Call& call, std::vector<int32_t>& windows) {
    const StepCall& step = reply_.call;
    if (step.claims.size() == step.sequences.size()) {
      call.windows = std::move(windows);
      return;
    }
    const int64_t before = core_.shape.max_ngram - 1;
    auto from = windows.begin();
    size_t next_claim = 0;
    for (size_t s = 0; s < step.sequences.size(); ++s) {
      const int64_t ids = before + step.sequences[s].tokens;
      if (next_claim < step.claim_of.size() && step.claim_of[next_claim] == s) {
        call.windows.insert(call.windows.end(), from, from + ids);
        from += ids;
        ++next_claim;
      } else {
        call.windows.insert(call.windows.end(), static_cast<size_t>(ids), kernels::kDead);
      }
    }
  }

  const Core& core_;
  StepReply& reply_;
  const uint64_t stream_;
};

std::vector<std::string> SessionKeys(const Core& core, const StepCall& step) {
  std::vector<std::string> keys;
  for (const SequenceClaim& claim : step.claims) {
    if (!claim.session.empty()) keys.push_back(SessionTable::KeyOf(core.principal, claim.session));
    if (!claim.fork_from.empty()) keys.push_back(SessionTable::KeyOf(core.principal, claim.fork_from));
  }
  return keys;
}

// Of a call by ticket: is nothing left to project?
bool KvIsReady(const Core& core, const StepCall& step) {
  const absl::StatusOr<std::shared_ptr<const Prepared>> prepared = core.tickets.Get(core.principal, step.ticket);
  return prepared.ok() && std::all_of(step.layers.begin(), step.layers.end(),
                                      [&prepared](int layer) { return (*prepared)->Find(layer) != nullptr; });
}

absl::Status LayOutAll(const Core& core, StepReply& reply, Call& call) {
  reply.results.resize(reply.call.layers.size());
  for (size_t i = 0; i < reply.call.layers.size(); ++i) {
    const StagingMemory none;
    absl::StatusOr<CallLayer> layer = LayOut(reply.call, i, *core.model, core.shape, core.staging,
                                             reply.highways.empty() ? none : reply.highways[i], reply.results[i]);
    if (!layer.ok()) return layer.status();
    call.layers.push_back(*layer);
  }
  return absl::OkStatus();
}

// The call is over. A Prepare's ticket becomes good; a ticket's use is noted.
void Settle(const Core& core, const StepReply& reply, const Call& call, const absl::Status& status) {
  if (call.preparing != nullptr && !reply.ticket.empty()) {
    if (status.ok()) {
      core.tickets.Fill(reply.ticket, call.preparing);
    } else {
      core.tickets.Release(core.principal, reply.ticket);
    }
  }
  if (reply.call.source == StepCall::Source::kTicket && status.ok() && ReadsHighway(call.form)) {
    for (const int layer : reply.call.layers) {
      core.tickets.Applied(reply.call.ticket, layer, call.prepared_first, call.tokens);
    }
  }
}

}  // namespace

absl::Status StageHighways(const Core& core, const ArrivedMessage& message, StepReply& reply) {
  if (!ReadsHighway(reply.call.form) || reply.call.in_region.region != nullptr) return absl::OkStatus();
  for (size_t i = 0; i < message.highway_bytes().size(); ++i) {
    reply.highways.push_back(core.staging.Take(message.highway_bytes()[i]));
    if (reply.highways.back() == nullptr) return OutOfMemory(message.highway_bytes()[i]);
    message.CopyHighway(i, reply.highways.back().get());
  }
  return absl::OkStatus();
}

void RunStep(const Core& core, StepReply& reply, StepHooks hooks) {
  const StepCall& step = reply.call;
  auto call = std::make_unique<Call>();
  call->form = step.form;
  call->highway_type = step.highway_type;
  call->priority = step.priority;
  call->sequences = step.sequences;
  call->tokens = step.tokens;
  call->token_mask = step.token_mask;
  call->slice = step.slice;
  call->deadline = hooks.deadline;
  call->session_keys = SessionKeys(core, step);
  if (const absl::Status status = LayOutAll(core, reply, *call); !status.ok()) return hooks.done(status);

  call->cancelled = std::move(hooks.cancelled);
  switch (step.source) {
    case StepCall::Source::kSequences:
      call->commit = [commit = SequenceCommit(core, reply, hooks.stream)](Call& c) mutable { return commit.Run(c); };
      break;
    case StepCall::Source::kTicket:
      call->prepared_first = step.prepared_first;
      call->kv_ready = KvIsReady(core, step);
      call->commit = [&core, &reply](Call& c) {
        absl::StatusOr<std::shared_ptr<const Prepared>> prepared = core.tickets.Get(core.principal, reply.call.ticket);
        if (!prepared.ok()) return prepared.status();
        c.prepared = *std::move(prepared);
        return absl::OkStatus();
      };
      break;
    case StepCall::Source::kRowIds:
      call->row_ids = step.row_ids;
      call->commit = [](Call&) { return absl::OkStatus(); };
      break;
  }
  const auto finish_layer = [&core, &reply](const Call& c, size_t index) {
    if (reply.call.partial_ok) DropRefused(reply.call, c.sequences, core.shape, reply.results[index]);
  };
  call->layer_done = [finish_layer, layer_done = std::move(hooks.layer_done)](const Call& c, size_t index) mutable {
    finish_layer(c, index);
    if (layer_done) layer_done(index);
  };
  call->done = [&core, &reply, done = std::move(hooks.done)](Call& c, absl::Status status) mutable {
    Settle(core, reply, c, status);
    done(std::move(status));
  };
  core.engine.Submit(std::move(call));
}

void RunCloseSessions(const Core& core, std::vector<std::string> sessions, absl::Time deadline,
                      absl::AnyInvocable<void(absl::Status, int32_t closed)> done) {
  auto call = std::make_unique<Call>();
  call->deadline = deadline;
  for (const std::string& session : sessions) {
    call->session_keys.push_back(SessionTable::KeyOf(core.principal, session));
  }
  auto closed = std::make_shared<int32_t>(0);
  call->commit = [&core, closed, names = std::move(sessions)](Call&) {
    for (const std::string& key : core.sessions.Close(core.principal, names)) {
      core.tickets.RollBack(key, 0);
      ++*closed;
    }
    return absl::OkStatus();
  };
  call->cancelled = [] { return false; };
  call->done = [closed, done = std::move(done)](Call&, absl::Status status) mutable {
    done(std::move(status), *closed);
  };
  core.engine.Submit(std::move(call));
}

}  // namespace engram
