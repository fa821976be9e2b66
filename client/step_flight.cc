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

// Parts of a call under way at a time: no client has more connections to fill. Their requests and replies are in memory
// then, here and in the server, whose queue has room for 1 GiB of all its clients: 16 parts of 8 MiB each way are 256.
constexpr size_t kMostTogether = 16;
constexpr int64_t kMostBytesTogether = int64_t{256} << 20;

// Between two rounds of kRetry: doubled each time, and a random half of it, so that clients do not return in step.
constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLongestPause = absl::Seconds(2);

// A ticket that is not good any more, or a server that is gone or serves another model: the ids say the same, where
// they are known.
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
      trips_(plan_.parts.size()),
      together_(plan_.ordered ? 1 : kMostTogether) {}

void StepFlight::Start(absl::AnyInvocable<void()> over) {
  on_over_ = std::move(over);
  self_ = shared_from_this();
  if (plan_.parts.empty()) {
    {
      absl::MutexLock lock(&mutex_);
      over_ = true;
    }
    return Over();
  }
  Depart();
}

// Called once; what it holds may be the last that keeps this alive.
void StepFlight::Over() {
  const std::shared_ptr<StepFlight> self = std::move(self_);
  absl::AnyInvocable<void()> over = std::move(on_over_);
  over();
}

std::optional<size_t> StepFlight::Next() {
  if (over_) return std::nullopt;
  if (!again_.empty()) {
    const size_t index = again_.back();
    again_.pop_back();
    return index;
  }
  if (next_ == plan_.parts.size() || flying_ >= together_) return std::nullopt;
  const Part& part = plan_.parts[next_];
  const bool full =
      flying_tokens_ + part.tokens > plan_.tokens_together || flying_bytes_ + part.bytes > kMostBytesTogether;
  if (flying_ > 0 && full) return std::nullopt;
  ++flying_;
  flying_tokens_ += part.tokens;
  flying_bytes_ += part.bytes;
  return next_++;
}

std::string StepFlight::ReplicaOf(const Part& part, bool by_ids) const {
  if (call_.region != nullptr) return call_.region->replica();
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
  raw.repeatable = call_.region == nullptr;
  for (const Piece& piece : part.pieces) raw.hedgeable &= call_.sequences[piece.sequence].session.empty();
  return raw;
}

void StepFlight::Depart() {
  const std::shared_ptr<StepFlight> self = shared_from_this();
  const std::thread::id me = std::this_thread::get_id();
  {
    absl::MutexLock lock(&mutex_);
    if (std::find(departing_.begin(), departing_.end(), me) != departing_.end()) return;
    departing_.push_back(me);
  }
  while (true) {
    std::optional<size_t> index;
    bool by_ids = false;
    {
      absl::MutexLock lock(&mutex_);
      index = Next();
      if (!index.has_value()) {
        departing_.erase(std::find(departing_.begin(), departing_.end(), me));
        return;
      }
      by_ids = trips_[*index].by_ids;
    }
    carrier_.send(RawCallOf(*index, by_ids), [self, at = *index](RawReply raw) { self->Answered(at, std::move(raw)); });
  }
}

void StepFlight::DepartAgain(size_t index) {
  {
    absl::MutexLock lock(&mutex_);
    again_.push_back(index);
  }
  Depart();
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
  // Of a call with a region, what was not refused may have been written, and may be still.
  if (call_.region != nullptr && ErrorReason(status).empty()) return false;
  const Part& part = plan_.parts[index];
  absl::Time again = absl::InfinitePast();
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return true;  // nobody waits for it
    Trip& trip = trips_[index];
    if (part.ticket.has_value() && !trip.by_ids && TicketIsGone(status) && GoesByIds(model_, call_, part)) {
      trip.by_ids = true;
    } else {
      // Parts of one call may fill a queue: that passes with them.
      const bool own_making = plan_.parts.size() > 1 && ErrorReason(status) == "QUEUE_FULL";
      if (own_making) together_ = std::max<size_t>(1, std::min(together_, flying_) / 2);
      if ((call_.on_failure != OnFailure::kRetry && !own_making) || !IsPassing(status)) return false;
      const absl::Duration pause = std::min(kFirstPause * (int64_t{1} << std::min(trip.rounds, 10)), kLongestPause);
      ++trip.rounds;
      absl::BitGen random;
      again = absl::Now() + std::max(pause * absl::Uniform(random, 0.5, 1.0), RetryDelay(status));
      if (again >= deadline_) return false;
    }
  }
  if (again == absl::InfinitePast()) {
    DepartAgain(index);
    return true;
  }
  carrier_.pause(again, [self = shared_from_this(), index](bool due) {
    if (due) return self->DepartAgain(index);
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
    if (Restarted(index)) return DepartAgain(index);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return;
    trips_[index].attempts += raw.attempts;
    trips_[index].replica = raw.replica;
  }
  if (!status.ok() && SendAgain(index, status)) return;
  if (!status.ok() && call_.region != nullptr && raw.attempts > 0 && ErrorReason(status).empty()) {
    call_.region->Spoil();
  }
  if (status.ok() && call_.prepared.state() == nullptr) KeepHomes(part, raw.replica);

  bool over = false;
  {
    absl::MutexLock lock(&mutex_);
    if (over_) return;
    --flying_;
    flying_tokens_ -= part.tokens;
    flying_bytes_ -= part.bytes;
    Trip& trip = trips_[index];
    trip.ended = true;
    trip.reply = std::move(reply);
    if (!status.ok()) trip.status = Named(status, index, raw.replica);
    ++ended_;
    if (!status.ok() && !Skips(status)) {
      failure_ = trip.status;
      over_ = true;
      // The caller goes on, and the server with the other parts.
      if (call_.region != nullptr && flying_ > 0) call_.region->Spoil();
    } else if (!status.ok() && plan_.ordered) {
      // What follows in the same sessions would be a gap: it is skipped with it.
      for (; next_ < plan_.parts.size(); ++next_, ++ended_) {
        trips_[next_].ended = true;
        trips_[next_].status = trip.status;
      }
    }
    over_ |= ended_ == plan_.parts.size();
    over = over_;
  }
  over ? Over() : Depart();
}

// A sequence that one part refused is refused as a whole: its other parts are not written either.
std::vector<bool> StepFlight::Refused(const std::vector<Trip>& trips, CallReport& report) const {
  std::vector<bool> refused(call_.sequences.size());
  if (!call_.partial_ok) return refused;
  report.sequences.resize(call_.sequences.size());
  const auto refuse = [&](size_t sequence, const absl::Status& status) {
    if (status.ok() || refused[sequence]) return;
    refused[sequence] = true;
    report.sequences[sequence] = status;
  };
  for (size_t s = 0; s < call_.sequences.size(); ++s) refuse(s, call_.sequences[s].refused);
  for (size_t i = 0; i < trips.size(); ++i) {
    if (!trips[i].reply.has_value()) continue;
    const std::vector<absl::Status>& statuses = trips[i].reply->sequences();
    for (size_t p = 0; p < statuses.size(); ++p) refuse(plan_.parts[i].pieces[p].sequence, statuses[p]);
  }
  return refused;
}

void StepFlight::ReportSkip(size_t index, const absl::Status& why, CallReport& report) const {
  const Part& part = plan_.parts[index];
  std::vector<int32_t> layer_ids;
  for (size_t l = 0; l < part.layers; ++l) layer_ids.push_back(call_.layers[part.first_layer + l].layer_id);
  for (const Piece& piece : part.pieces) {
    const int64_t at = PlaceOf(call_, piece);
    report.skipped.push_back({layer_ids, {at, at + piece.tokens}, why});
  }
}

absl::Status StepFlight::Finish(CallReport* report) {
  CallReport unwanted;
  CallReport& out = report == nullptr ? unwanted : *report;
  out = {};
  // Copies take long, and a thread of the carrier's may still look whether there is more to send.
  std::vector<Trip> trips;
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    trips.swap(trips_);
    status = failure_;
  }
  out.parts = static_cast<int>(plan_.parts.size());
  for (const Trip& trip : trips) {
    out.attempts += trip.attempts;
    if (!trip.reply.has_value()) continue;
    out.replica = trip.replica;
    out.server_epoch = trip.reply->server_epoch();
  }
  if (status.ok()) status = Land(trips, out);
  absl::MutexLock lock(&mutex_);
  trips.swap(trips_);
  return status;
}

absl::Status StepFlight::Land(const std::vector<Trip>& trips, CallReport& report) {
  const std::vector<bool> refused = Refused(trips, report);
  for (size_t i = 0; i < trips.size(); ++i) {
    const Part& part = plan_.parts[i];
    if (trips[i].reply.has_value()) {
      LandPart(model_, call_, part, *trips[i].reply, refused);
      continue;
    }
    SkipPart(model_, call_, part, refused);
    ReportSkip(i, trips[i].status, report);
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
    kept.start_pos = sequence.start_pos;
    kept.token_ids.assign(sequence.token_ids.begin(), sequence.token_ids.end());
    kept.token_mask.assign(sequence.token_mask.begin(), sequence.token_mask.end());
    kept.lookback = sequence.lookback;
    // Before position 0 there is nothing, which needs no session to know.
    if (kept.lookback.empty() && sequence.start_pos == 0) {
      kept.lookback.assign(static_cast<size_t>(model_.lookback_length()), kDeadToken);
    }
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
