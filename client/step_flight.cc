#include "client/step_flight.h"

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/error_details.h"
#include "client/failure.h"
#include "client/reply_landing.h"
#include "client/request_writer.h"

namespace engram::client {
namespace {

// Parts of a call under way at a time. Their requests and replies are in memory then: 16 of 64 MiB are 2 GiB, and no
// client has more connections to fill.
constexpr size_t kMostTogether = 16;

// Between two rounds of kRetry: doubled each time, and a random half of it, so that clients do not return in step.
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);

// A ticket that is not good any more, or a server that is gone or serves another model: the ids say the same.
bool TicketIsGone(const absl::Status& status) {
  const std::string reason = ErrorReason(status);
  return reason == "TICKET_EXPIRED" || reason == "DIGEST_MISMATCH" || absl::IsUnavailable(status);
}

absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status result(status.code(), message);
  status.ForEachPayload(
      [&result](absl::string_view url, const absl::Cord& payload) { result.SetPayload(url, payload); });
  return result;
}

}  // namespace

StepFlight::StepFlight(const ModelInfo& model, const Carrier& carrier, SessionHomes* homes, CheckedCall call,
                       CallPlan plan)
    : model_(model),
      carrier_(carrier),
      homes_(homes),
      call_(std::move(call)),
      plan_(std::move(plan)),
      deadline_(absl::Now() + call_.timeout),
      trips_(plan_.parts.size()) {}

void StepFlight::Start(absl::AnyInvocable<void()> over) {
  on_over_ = std::move(over);
  self_ = shared_from_this();
  std::vector<size_t> first;
  {
    absl::MutexLock lock(&mutex_);
    const size_t together = plan_.ordered ? 1 : kMostTogether;
    while (first.size() < together) {
      const std::optional<size_t> index = Next();
      if (!index.has_value()) break;
      first.push_back(*index);
    }
    over_ = first.empty();
  }
  if (first.empty()) return Over();
  for (const size_t index : first) Send(index);
}

// Called once; what it holds may be the last that keeps this alive.
void StepFlight::Over() {
  const std::shared_ptr<StepFlight> self = std::move(self_);
  absl::AnyInvocable<void()> over = std::move(on_over_);
  over();
}

std::optional<size_t> StepFlight::Next() {
  if (over_ || next_ == plan_.parts.size()) return std::nullopt;
  return next_++;
}

std::string StepFlight::ReplicaOf(const Part& part, bool by_ids) const {
  if (part.ticket.has_value() && !by_ids) return call_.prepared.state()->parts[*part.ticket].replica;
  for (const Piece& piece : part.pieces) {
    const CheckedSequence& sequence = call_.sequences[piece.sequence];
    if (!sequence.by_session()) continue;
    // The plan has put no two homes into a part.
    if (!sequence.home.empty()) return sequence.home;
    // Born by an earlier part.
    if (piece.first == 0) continue;
    std::string home = homes_->Find(sequence.session);
    if (!home.empty()) return home;
  }
  return "";
}

RawCall StepFlight::RawCallOf(size_t index, bool by_ids) const {
  const Part& part = plan_.parts[index];
  RawCall raw;
  raw.method = MethodPath(call_.method);
  raw.request = WriteRequest(model_, call_, plan_, part, by_ids);
  raw.deadline = deadline_;
  raw.weight_tokens = part.tokens;
  raw.replica = ReplicaOf(part, by_ids);
  raw.hedgeable = call_.method != Method::kPrepare && raw.replica.empty();
  for (const Piece& piece : part.pieces) raw.hedgeable &= call_.sequences[piece.sequence].session.empty();
  return raw;
}

void StepFlight::Send(size_t index) {
  bool by_ids = false;
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return;
    by_ids = trips_[index].by_ids;
  }
  carrier_.send(RawCallOf(index, by_ids),
                [self = shared_from_this(), index](RawReply raw) { self->Answered(index, std::move(raw)); });
}

// A call that nobody answered says whom it asked and how long; a part says which it is.
absl::Status StepFlight::Named(const absl::Status& status, size_t index, const std::string& replica) const {
  std::string message(status.message());
  if (absl::IsDeadlineExceeded(status) && ErrorReason(status).empty()) {
    message = absl::StrCat("no answer from ", replica, " within ", absl::FormatDuration(call_.timeout));
  }
  if (plan_.parts.size() > 1) {
    absl::StrAppend(&message, " (part ", index + 1, " of ", plan_.parts.size(), " of the call, ",
                    plan_.parts[index].tokens, " tokens)");
  }
  return WithMessage(status, message);
}

// CANCELLED is the client's own end, which says nothing about the servers.
bool StepFlight::Skips(const absl::Status& status) const {
  return call_.on_failure == OnFailure::kSkip && !IsRefusal(status) && !absl::IsCancelled(status);
}

bool StepFlight::SendAgain(size_t index, const absl::Status& status) {
  const Part& part = plan_.parts[index];
  absl::Time again = absl::InfinitePast();
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return true;  // nobody waits for it
    Trip& trip = trips_[index];
    if (part.ticket.has_value() && !trip.by_ids && TicketIsGone(status)) {
      trip.by_ids = true;
    } else {
      if (call_.on_failure != OnFailure::kRetry || !IsPassing(status)) return false;
      const absl::Duration pause = std::min(kFirstPause * (int64_t{1} << std::min(trip.rounds, 10)), kLongestPause);
      ++trip.rounds;
      absl::BitGen random;
      again = absl::Now() + std::max(pause * absl::Uniform(random, 0.5, 1.0), RetryDelay(status));
      if (again >= deadline_) return false;
    }
  }
  if (again == absl::InfinitePast()) {
    Send(index);
    return true;
  }
  carrier_.pause(again, [self = shared_from_this(), index](bool due) {
    if (due) return self->Send(index);
    RawReply ending;
    ending.status = absl::CancelledError("the client is ending");
    self->Answered(index, std::move(ending));
  });
  return true;
}

// The same call again, to a server that has been asked who it is. A server that is another one with every reply ends
// it.
bool StepFlight::Restarted(size_t index) {
  constexpr int kMostRestarts = 3;
  absl::MutexLock lock(&mutex_);
  return !over_ && ++trips_[index].restarts <= kMostRestarts;
}

void StepFlight::KeepHomes(const Part& part, const std::string& replica) {
  for (const Piece& piece : part.pieces) {
    const std::string& session = call_.sequences[piece.sequence].session;
    if (!session.empty()) homes_->Put(session, replica);
  }
}

void StepFlight::Answered(size_t index, RawReply raw) {
  const Part& part = plan_.parts[index];
  absl::Status status = raw.status;
  std::optional<Reply> reply;
  if (status.ok()) {
    absl::StatusOr<Reply> parsed = Reply::Parse(call_.method, part, std::move(raw.body));
    status = parsed.ok() ? CheckReply(call_, part, *parsed) : parsed.status();
    if (status.ok()) reply = *std::move(parsed);
  }
  if (status.ok() && raw.server_epoch != reply->server_epoch() &&
      !carrier_.knows_epoch(raw.replica, reply->server_epoch())) {
    status = absl::UnavailableError(absl::StrCat(raw.replica, " has restarted: its numerics_id is not known"));
    reply.reset();
    if (Restarted(index)) return Send(index);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return;
    trips_[index].attempts += raw.attempts;
    trips_[index].replica = raw.replica;
  }
  if (!status.ok() && SendAgain(index, status)) return;
  if (status.ok() && call_.prepared.state() == nullptr) KeepHomes(part, raw.replica);

  std::optional<size_t> next;
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return;
    Trip& trip = trips_[index];
    trip.ended = true;
    trip.reply = std::move(reply);
    if (!status.ok()) trip.status = Named(status, index, raw.replica);
    ++ended_;
    if (!status.ok() && !Skips(status)) {
      failure_ = trip.status;
      over_ = true;
    } else if (!status.ok() && plan_.ordered) {
      // What follows in the same sessions would be a gap: it is skipped with it.
      for (; next_ < plan_.parts.size(); ++next_, ++ended_) {
        trips_[next_].ended = true;
        trips_[next_].status = trip.status;
      }
    }
    if (!over_) next = Next();
    over_ |= ended_ == plan_.parts.size();
    if (!over_ && !next.has_value()) return;
  }
  if (next.has_value()) return Send(*next);
  Over();
}

// A sequence that one part refused is refused as a whole: its other parts are not written either.
std::vector<bool> StepFlight::Refused(CallReport& report) const {
  std::vector<bool> refused(call_.sequences.size());
  if (!call_.partial_ok) return refused;
  report.sequences.resize(call_.sequences.size());
  const auto refuse = [&](size_t sequence, const absl::Status& status) {
    if (status.ok() || refused[sequence]) return;
    refused[sequence] = true;
    report.sequences[sequence] = status;
  };
  for (size_t s = 0; s < call_.sequences.size(); ++s) refuse(s, call_.sequences[s].refused);
  for (size_t i = 0; i < trips_.size(); ++i) {
    if (!trips_[i].reply.has_value()) continue;
    const std::vector<absl::Status>& statuses = trips_[i].reply->sequences();
    for (size_t p = 0; p < statuses.size(); ++p) refuse(plan_.parts[i].pieces[p].sequence, statuses[p]);
  }
  return refused;
}

void StepFlight::ReportSkip(size_t index, CallReport& report) const {
  const Part& part = plan_.parts[index];
  std::vector<int32_t> layer_ids;
  for (size_t l = 0; l < part.layers; ++l) layer_ids.push_back(call_.layers[part.first_layer + l].layer_id);
  for (const Piece& piece : part.pieces) {
    const int64_t at = PlaceOf(call_, piece);
    report.skipped.push_back({layer_ids, {at, at + piece.tokens}, trips_[index].status});
  }
}

absl::Status StepFlight::Finish(CallReport* report) {
  CallReport unwanted;
  CallReport& out = report == nullptr ? unwanted : *report;
  out = {};
  absl::MutexLock lock(&mutex_);
  out.parts = static_cast<int>(plan_.parts.size());
  for (const Trip& trip : trips_) {
    out.attempts += trip.attempts;
    if (!trip.reply.has_value()) continue;
    out.replica = trip.replica;
    out.server_epoch = trip.reply->server_epoch();
  }
  if (!failure_.ok()) return failure_;

  const std::vector<bool> refused = Refused(out);
  for (size_t i = 0; i < trips_.size(); ++i) {
    const Part& part = plan_.parts[i];
    if (trips_[i].reply.has_value()) {
      LandPart(model_, call_, part, *trips_[i].reply, refused);
      continue;
    }
    SkipPart(model_, call_, part, refused);
    ReportSkip(i, out);
  }
  // The tokens were consumed, also where the engram was skipped.
  for (size_t s = 0; s < call_.sequences.size(); ++s) {
    const CheckedSequence& sequence = call_.sequences[s];
    if (sequence.history == nullptr || refused[s]) continue;
    // Cannot fail: the check of the call was of the same write.
    absl::Status status = sequence.history->Write(sequence.start_pos, sequence.token_ids, sequence.token_mask);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

Prepared StepFlight::TakePrepared() const {
  auto state = std::make_shared<PreparedState>();
  state->tokens = call_.tokens;
  for (const CheckedLayer& layer : call_.layers) state->layer_ids.push_back(layer.layer_id);
  for (const CheckedSequence& sequence : call_.sequences) {
    PreparedSequence kept;
    kept.session = sequence.session;
    kept.home = homes_->Find(sequence.session);
    kept.start_pos = sequence.start_pos;
    kept.token_ids.assign(sequence.token_ids.begin(), sequence.token_ids.end());
    kept.token_mask.assign(sequence.token_mask.begin(), sequence.token_mask.end());
    kept.lookback = sequence.lookback;
    kept.step = sequence.step;
    state->sequences.push_back(std::move(kept));
  }
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < trips_.size(); ++i) {
    const Part& part = plan_.parts[i];
    const Reply& reply = *trips_[i].reply;
    state->parts.push_back(
        {trips_[i].replica, reply.ticket(), PlaceOf(call_, part.pieces.front()), part.tokens, reply.server_epoch()});
  }
  return Prepared(std::move(state));
}

}  // namespace engram::client
