#include "tests/api_model/plain_api.h"

#include <algorithm>
#include <utility>

namespace engram {
namespace {

Form FormOf(v1::Form form, Form otherwise) {
  switch (form) {
    case v1::FORM_HIGHWAY:
      return Form::kHighway;
    case v1::FORM_KV:
      return Form::kKv;
    case v1::FORM_ROWS_NATIVE:
      return Form::kRowsNative;
    case v1::FORM_ROWS_BF16:
      return Form::kRowsBf16;
    case v1::FORM_UPDATE:
      return Form::kUpdate;
    case v1::FORM_GATE:
      return Form::kGate;
    default:
      return otherwise;
  }
}

std::string NameOf(Reason reason) { return std::string(ReasonName(reason)); }

}  // namespace

void SortLayers(Reply& reply) {
  std::sort(reply.layers.begin(), reply.layers.end(),
            [](const auto& a, const auto& b) { return a.layer_id() < b.layer_id(); });
}

PlainApi::PlainApi(PlainCompute& compute, PlainApiOptions options)
    : compute_(compute),
      sessions_(compute.shape().max_ngram, options.session_window, options.session_ttl),
      tickets_(options.prepare_memory_bytes, options.ticket_ttl) {}

int PlainApi::LayerIndex(int32_t layer_id) const {
  int index = 0;
  for (const EngramLayer& layer : compute_.model().layers()) {
    if (layer.layer_id == layer_id) return index;
    ++index;
  }
  return -1;
}

ExpectedReply PlainApi::Run(const Planned& planned, absl::Time now) {
  ExpectedReply expected;
  if (planned.fault.has_value() && planned.fault->sequence < 0) {
    expected.reply.reason = NameOf(planned.fault->reason);
    return expected;
  }
  const v1::StreamRequest& request = planned.request;
  switch (request.request_case()) {
    case v1::StreamRequest::kApply:
      Apply(request.apply(), planned, now, expected);
      break;
    case v1::StreamRequest::kLookup:
      Lookup(request.lookup(), planned, now, expected);
      break;
    case v1::StreamRequest::kPrepare:
      Prepare(request.prepare(), planned, now, expected);
      break;
    case v1::StreamRequest::kRelease:
      Release(request.release(), now, expected);
      break;
    case v1::StreamRequest::kCloseSessions:
      Close(request.close_sessions(), expected);
      break;
    case v1::StreamRequest::REQUEST_NOT_SET:
      expected.reply.reason = NameOf(Reason::kEmptyCall);
      break;
  }
  if (!expected.reply.reason.empty()) expected.reply.layers.clear();
  SortLayers(expected.reply);
  return expected;
}

void PlainApi::Squeeze(int64_t sessions) {
  for (; sessions > 0; --sessions) {
    const std::string key = sessions_.recency().front();
    sessions_.Forget(key);
    tickets_.RollBack(key, 0);
  }
}

SequenceClaim PlainApi::ClaimOf(const v1::Sequence& sequence) const {
  const absl::Span<const int32_t> map = compute_.model().token_map();
  SequenceClaim claim;
  claim.session = sequence.session();
  claim.start_pos = sequence.start_pos();
  for (int t = 0; t < sequence.token_ids_size(); ++t) {
    const bool live = sequence.token_mask().empty() || sequence.token_mask()[static_cast<size_t>(t)] != 0;
    claim.ids.push_back(live ? map[static_cast<size_t>(sequence.token_ids(t))] : kMasked);
  }
  for (int j = sequence.lookback_token_ids_size() - 1; j >= 0; --j) {
    const int32_t token = sequence.lookback_token_ids(j);
    claim.lookback.push_back(token < 0 ? kernels::kDead : map[static_cast<size_t>(token)]);
  }
  if (sequence.has_step()) claim.step = sequence.step();
  claim.fork_from = sequence.fork_from().session();
  return claim;
}

std::optional<PlainApi::Committed> PlainApi::Commit(const Sequences& sequences, const Planned& planned, bool partial_ok,
                                                    absl::Time now, Reply& reply) {
  if (planned.fault.has_value() && !partial_ok) {
    reply.reason = NameOf(planned.fault->reason);
    return std::nullopt;
  }
  std::vector<SequenceClaim> claims;
  std::vector<int> claimed;  // the sequence of each
  for (int s = 0; s < sequences.size(); ++s) {
    if (planned.fault.has_value() && planned.fault->sequence == s) continue;
    claims.push_back(ClaimOf(sequences[s]));
    claimed.push_back(s);
  }
  const Expected written = sessions_.Commit("anonymous", claims, partial_ok, now);
  if (!written.served) {
    for (const std::optional<Reason>& reason : written.refused) {
      if (!reason.has_value()) continue;
      reply.reason = NameOf(*reason);
      return std::nullopt;
    }
  }
  for (const auto& [key, from] : written.rollbacks) tickets_.RollBack(key, from);
  for (const std::string& key : written.expired) tickets_.RollBack(key, 0);

  Committed committed;
  if (partial_ok) reply.statuses.resize(static_cast<size_t>(sequences.size()));
  if (planned.fault.has_value()) {
    reply.statuses[static_cast<size_t>(planned.fault->sequence)] = NameOf(planned.fault->reason);
  }
  const auto before = static_cast<size_t>(compute_.shape().max_ngram - 1);
  const int32_t* window = written.windows.data();
  size_t claim = 0;
  size_t place = 0;
  for (int s = 0; s < sequences.size(); ++s) {
    const auto tokens = static_cast<size_t>(sequences[s].token_ids_size());
    if (claim < claimed.size() && claimed[claim] == s) {
      if (written.refused[claim].has_value()) {
        reply.statuses[static_cast<size_t>(s)] = NameOf(*written.refused[claim]);
      } else {
        for (size_t t = 0; t < tokens; ++t) {
          const bool live = claims[claim].ids[t] != kMasked;
          committed.tokens.push_back(compute_.TokenAt({window + t, before + 1}, live));
          committed.places.push_back(place + t);
        }
      }
      window += before + tokens;
      ++claim;
    }
    place += tokens;
  }
  return committed;
}

PlainTicket* PlainApi::TicketFor(const std::string& name, absl::Time now, ExpectedReply& expected) {
  tickets_.Expire(now);
  PlainTicket* ticket = tickets_.Find(name);
  if (ticket == nullptr || (!ticket->alive && !tickets_.DiedInThisBurst(*ticket))) {
    expected.reply.reason = NameOf(Reason::kTicketExpired);
    return nullptr;
  }
  expected.used = ticket;
  return ticket;
}

void PlainApi::Apply(const v1::ApplyRequest& request, const Planned& planned, absl::Time now, ExpectedReply& expected) {
  const bool bf16 = request.highway_dtype() == v1::HIGHWAY_DTYPE_BF16;
  const PlainForm form{
      FormOf(request.form(), Form::kHighway), bf16 ? kernels::HighwayType::kBf16 : kernels::HighwayType::kF32, {}};
  Committed committed;
  PlainTicket* ticket = nullptr;
  size_t first = 0;
  if (!request.ticket().empty()) {
    ticket = TicketFor(request.ticket(), now, expected);
    if (ticket == nullptr) return;
    first = static_cast<size_t>(request.token_slice().begin());
    const size_t end =
        request.has_token_slice() ? static_cast<size_t>(request.token_slice().end()) : ticket->tokens.size();
    for (size_t t = first; t < end; ++t) {
      committed.tokens.push_back(ticket->tokens[t]);
      committed.places.push_back(t - first);
    }
  } else {
    std::optional<Committed> done = Commit(request.sequences(), planned, request.partial_ok(), now, expected.reply);
    if (!done.has_value()) return;
    committed = *std::move(done);
  }
  const auto highway_bytes = static_cast<size_t>(HighwayBytes(compute_.shape(), form.type));
  for (const v1::LayerInput& input : request.layers()) {
    v1::LayerOutput& output = expected.reply.layers.emplace_back();
    output.set_layer_id(input.layer_id());
    const int layer = LayerIndex(input.layer_id());
    for (size_t t = 0; t < committed.tokens.size(); ++t) {
      absl::string_view highway;
      if (ReadsHighway(form.form)) {
        highway = absl::string_view(input.highway()).substr(committed.places[t] * highway_bytes, highway_bytes);
      }
      compute_.Append(committed.tokens[t], layer, form, highway, output);
      if (ticket != nullptr && ReadsHighway(form.form)) ticket->applied.insert({layer, first + t});
    }
  }
}

void PlainApi::Lookup(const v1::LookupRequest& request, const Planned& planned, absl::Time now,
                      ExpectedReply& expected) {
  const PlainForm form{FormOf(request.form(), Form::kRowsNative), {}, {request.slice().begin(), request.slice().end()}};
  std::vector<PlainToken> tokens;
  if (!request.ticket().empty()) {
    PlainTicket* ticket = TicketFor(request.ticket(), now, expected);
    if (ticket == nullptr) return;
    tokens = ticket->tokens;
  } else if (!request.row_ids().empty()) {
    const StepShape& shape = compute_.shape();
    const int per_token = request.layer_ids_size() * shape.columns;
    for (int first = 0; first < request.row_ids_size(); first += per_token) {
      PlainToken& token = tokens.emplace_back();
      token.ids.assign(static_cast<size_t>(shape.layers * shape.columns), -1);
      for (int i = 0; i < per_token; ++i) {
        const int layer = LayerIndex(request.layer_ids(i / shape.columns));
        token.ids[static_cast<size_t>(layer * shape.columns + i % shape.columns)] = request.row_ids(first + i);
      }
    }
  } else {
    std::optional<Committed> done = Commit(request.sequences(), planned, request.partial_ok(), now, expected.reply);
    if (!done.has_value()) return;
    tokens = std::move(done->tokens);
  }
  for (const int32_t layer_id : request.layer_ids()) {
    v1::LayerOutput& output = expected.reply.layers.emplace_back();
    output.set_layer_id(layer_id);
    for (const PlainToken& token : tokens) compute_.Append(token, LayerIndex(layer_id), form, {}, output);
  }
}

void PlainApi::Prepare(const v1::PrepareRequest& request, const Planned& planned, absl::Time now,
                       ExpectedReply& expected) {
  if (planned.fault.has_value()) {
    expected.reply.reason = NameOf(planned.fault->reason);
    return;
  }
  const StepShape& shape = compute_.shape();
  PlainTicket ticket;
  int64_t tokens = 0;
  for (const v1::Sequence& sequence : request.sequences()) tokens += sequence.token_ids_size();
  ticket.bytes =
      tokens * (request.layer_ids_size() * shape.kv_values() * 2 + int64_t{shape.layers} * shape.columns * 8);
  if (ticket.bytes > tickets_.memory_bytes()) {
    expected.reply.reason = NameOf(Reason::kTooManyTokens);
    return;
  }
  tickets_.Expire(now);
  if (!tickets_.MakeRoom(ticket.bytes)) {
    expected.reply.reason = NameOf(Reason::kPrepareFull);
    return;
  }
  std::optional<Committed> done = Commit(request.sequences(), planned, false, now, expected.reply);
  if (!done.has_value()) return;
  ticket.tokens = std::move(done->tokens);
  ticket.born = now;
  ticket.stream = planned.stream;
  for (const v1::Sequence& sequence : request.sequences()) {
    if (!sequence.session().empty()) {
      ticket.ends[KeyOf(sequence.session())] = sequence.start_pos() + sequence.token_ids_size();
    }
  }
  for (const int32_t layer_id : request.layer_ids()) {
    ticket.layers.insert(LayerIndex(layer_id));
    if (!request.return_values()) continue;
    v1::LayerOutput& output = expected.reply.layers.emplace_back();
    output.set_layer_id(layer_id);
    for (const PlainToken& token : ticket.tokens) {
      compute_.Append(token, LayerIndex(layer_id), {Form::kPrepare, {}, {}}, {}, output);
    }
  }
  expected.made = &tickets_.Add(std::move(ticket));
}

void PlainApi::Release(const v1::ReleaseRequest& request, absl::Time now, ExpectedReply& expected) {
  tickets_.Expire(now);
  for (const std::string& name : request.tickets()) {
    PlainTicket* ticket = tickets_.Find(name);
    if (ticket == nullptr) continue;
    if (ticket->alive) {
      tickets_.Kill(*ticket);
      ++expected.reply.released;
    } else if (tickets_.DiedInThisBurst(*ticket)) {
      ++expected.release_slack;
    }
  }
}

void PlainApi::Close(const v1::CloseSessionsRequest& request, ExpectedReply& expected) {
  for (const std::string& session : request.sessions()) {
    const std::string key = KeyOf(session);
    if (sessions_.Find(key) == nullptr) continue;
    sessions_.Forget(key);
    tickets_.RollBack(key, 0);
    ++expected.reply.closed;
  }
}

}  // namespace engram
