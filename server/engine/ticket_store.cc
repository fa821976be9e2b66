#include "server/engine/ticket_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

std::string TicketOf(uint64_t epoch, uint64_t number, uint64_t word) {
  std::string ticket(3 * sizeof(uint64_t), '\0');
  std::memcpy(ticket.data(), &epoch, sizeof epoch);
  std::memcpy(ticket.data() + 8, &number, sizeof number);
  std::memcpy(ticket.data() + 16, &word, sizeof word);
  return ticket;
}

absl::Status Expired() {
  return Refuse({Reason::kTicketExpired, "ticket", "", "a good ticket of this server",
                 "this ticket is not good (any more): it was released, outlived, rolled back, or is another server's: "
                 "prepare again"});
}

}  // namespace

TicketStore::TicketStore(TicketOptions options)
    : options_(std::move(options)), random_(std::random_device{}() ^ options_.epoch) {}

absl::StatusOr<std::string> TicketStore::Reserve(absl::string_view principal, int64_t bytes, uint64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Expire();
  for (auto it = entries_.begin(); it != entries_.end() && bytes > options_.memory_bytes - bytes_;) {
    const auto entry = it++;
    if (entry->fully_applied) Forget(entry);
  }
  if (bytes > options_.memory_bytes - bytes_) {
    return Refuse({Reason::kPrepareFull, "sequences", absl::StrCat(bytes),
                   absl::StrCat("<= ", options_.memory_bytes - bytes_),
                   absl::StrCat("prepared results hold ", bytes_, " of ", options_.memory_bytes, " bytes, ", bytes,
                                " more do not fit: release tickets, or apply without")});
  }
  Entry entry;
  entry.ticket = TicketOf(options_.epoch, next_++, random_());
  entry.principal = std::string(principal);
  entry.stream = stream;
  entry.bytes = bytes;
  entry.born = options_.clock();
  bytes_ += bytes;
  const std::string ticket = entry.ticket;
  if (stream != 0) by_stream_[stream].insert(ticket);
  by_ticket_.emplace(ticket, entries_.insert(entries_.end(), std::move(entry)));
  return ticket;
}

void TicketStore::Bind(const std::string& ticket, std::vector<TicketSpan> spans) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end()) return;
  for (const TicketSpan& span : spans) by_session_[span.session_key].insert(ticket);
  found->second->spans = std::move(spans);
}

void TicketStore::Fill(const std::string& ticket, std::shared_ptr<const Prepared> prepared) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_ticket_.find(ticket);
  if (found != by_ticket_.end()) found->second->prepared = std::move(prepared);
}

absl::StatusOr<std::shared_ptr<const Prepared>> TicketStore::Get(absl::string_view principal,
                                                                 absl::string_view ticket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end() || found->second->principal != principal || found->second->prepared == nullptr ||
      options_.clock() - found->second->born > options_.ttl) {
    return Expired();
  }
  return found->second->prepared;
}

void TicketStore::Applied(absl::string_view ticket, int layer, int64_t first, int64_t tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end() || found->second->prepared == nullptr) return;
  Entry& entry = *found->second;
  if (entry.fully_applied || entry.prepared->Find(layer) == nullptr) return;
  std::vector<bool>& applied = entry.applied[layer];
  applied.resize(static_cast<size_t>(entry.prepared->tokens));
  std::fill_n(applied.begin() + first, tokens, true);
  entry.fully_applied =
      std::all_of(entry.prepared->layers.begin(), entry.prepared->layers.end(), [&entry](const auto& kv) {
        const auto of_layer = entry.applied.find(kv.layer);
        return of_layer != entry.applied.end() &&
               std::find(of_layer->second.begin(), of_layer->second.end(), false) == of_layer->second.end();
      });
}

bool TicketStore::Release(absl::string_view principal, absl::string_view ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Expire();
  const auto found = by_ticket_.find(ticket);
  if (found == by_ticket_.end() || found->second->principal != principal) return false;
  Forget(found->second);
  return true;
}

void TicketStore::EndStream(uint64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_stream_.find(stream);
  if (found == by_stream_.end()) return;
  const std::vector<std::string> tickets(found->second.begin(), found->second.end());
  for (const std::string& ticket : tickets) Forget(by_ticket_.at(ticket));
}

void TicketStore::RollBack(const std::string& session_key, int64_t from) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_session_.find(session_key);
  if (found == by_session_.end()) return;
  const std::vector<std::string> tickets(found->second.begin(), found->second.end());
  for (const std::string& ticket : tickets) {
    const Entries::iterator entry = by_ticket_.at(ticket);
    const bool hit = std::any_of(entry->spans.begin(), entry->spans.end(), [&](const TicketSpan& span) {
      return span.session_key == session_key && span.end > from;
    });
    if (hit) Forget(entry);
  }
}

TicketStats TicketStore::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Expire();
  return {static_cast<int64_t>(entries_.size()), bytes_};
}

void TicketStore::Expire() {
  const absl::Time now = options_.clock();
  while (!entries_.empty() && now - entries_.front().born > options_.ttl) Forget(entries_.begin());
}

void TicketStore::Forget(Entries::iterator entry) {
  const auto drop = [&](auto& index, const auto& key) {
    const auto found = index.find(key);
    if (found == index.end()) return;
    found->second.erase(entry->ticket);
    if (found->second.empty()) index.erase(found);
  };
  for (const TicketSpan& span : entry->spans) drop(by_session_, span.session_key);
  if (entry->stream != 0) drop(by_stream_, entry->stream);
  bytes_ -= entry->bytes;
  by_ticket_.erase(entry->ticket);
  entries_.erase(entry);
}

}  // namespace engram
