#include "client/call_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/refusal.h"

namespace engram::client {
namespace {

// As the server's: the longest sequence of a call that is taken for DECODE where the client does not say.
constexpr int64_t kMostDecodeTokens = 16;

// Bounds of what a message holds besides tensors: model_key (34), ticket (26), slice (26) and scalars; a layer's tags
// and lengths; a sequence's tags, numbers and N-1 <= 7 ids of look-back; a token's id and mask.
constexpr int64_t kCallEnvelope = 256;
constexpr int64_t kLayerEnvelope = 32;
// Two spans of a region, each two tags and lengths and two numbers of up to 10 bytes.
constexpr int64_t kRegionLayerEnvelope = 52;
constexpr int64_t kPieceEnvelope = 128;
constexpr int64_t kTokenEnvelope = 5;

// Bytes that a token of one layer takes of a request's tensors and of a reply's.
struct TokenBytes {
  int64_t up = 0;
  int64_t down = 0;

  int64_t larger() const { return std::max(up, down); }
};

TokenBytes BytesOfLayer(const ModelInfo& model, const CheckedCall& call, const CheckedLayer& layer) {
  TokenBytes bytes;
  if (layer.highway != nullptr && call.region == nullptr) bytes.up = model.HighwayTokenBytes(call.dtype);
  if (call.row_ids != nullptr) bytes.up = int64_t{model.n_hash_cols} * 4;
  for (const Landing& landing : layer.landings) bytes.down += landing.token_bytes;
  return bytes;
}

// Layers [first, first + layers) and what a token takes of them together.
struct LayerGroup {
  size_t first = 0;
  size_t layers = 0;
  TokenBytes bytes;
};

absl::Status TokenTooLarge(const CheckedCall& call, size_t layer, const TokenBytes& bytes, int64_t room) {
  const bool up = bytes.up > room;
  return Refuse(Reason::kMessageBytes, absl::StrCat("layers[", layer, "]"), absl::StrCat(bytes.larger()),
                absl::StrCat("<= ", room),
                absl::StrCat("one token of layer ", call.layers[layer].layer_id, " takes ", bytes.larger(),
                             " bytes of the ", up ? "request" : "reply", ", a message may have ", room));
}

// All layers, or as few groups as fit a message of one token.
absl::StatusOr<std::vector<LayerGroup>> GroupLayers(const ModelInfo& model, const CheckedCall& call, int64_t room) {
  std::vector<LayerGroup> groups;
  for (size_t i = 0; i < call.layers.size(); ++i) {
    const TokenBytes bytes = BytesOfLayer(model, call, call.layers[i]);
    if (bytes.larger() > room) return TokenTooLarge(call, i, bytes, room);
    if (groups.empty() || std::max(groups.back().bytes.up + bytes.up, groups.back().bytes.down + bytes.down) > room) {
      groups.push_back({i, 0, {}});
    }
    ++groups.back().layers;
    groups.back().bytes.up += bytes.up;
    groups.back().bytes.down += bytes.down;
  }
  return groups;
}

// What a server keeps of a prepared token: the kv of the layers asked for, and the row ids of all.
int64_t PreparedTokenBytes(const ModelInfo& model, const CheckedCall& call) {
  return static_cast<int64_t>(call.layers.size()) * model.KvTokenBytes() +
         static_cast<int64_t>(model.layers.size()) * model.n_hash_cols * 8;
}

class Planner {
 public:
  Planner(const ModelInfo& model, const PlanLimits& limits, const CheckedCall& call)
      : model_(model), limits_(limits), call_(call) {}

  absl::StatusOr<CallPlan> Plan() {
    absl::StatusOr<std::vector<LayerGroup>> groups = GroupLayers(model_, call_, limits_.max_message_bytes);
    if (!groups.ok()) return groups.status();
    groups_ = *std::move(groups);
    if (call_.method == Method::kPrepare && groups_.size() > 1) {
      // A ticket stands for all layers of its tokens.
      const TokenBytes all{0, static_cast<int64_t>(call_.layers.size()) * model_.ValueTokenBytes()};
      return Refuse(Reason::kMessageBytes, "layer_ids", absl::StrCat(all.down),
                    absl::StrCat("<= ", limits_.max_message_bytes),
                    absl::StrCat("the values of one token of all layers take ", all.down,
                                 " bytes of the reply, a message may have ", limits_.max_message_bytes));
    }
    int64_t tokens = 0;
    for (size_t i = 0; i < call_.sequences.size(); ++i) {
      const CheckedSequence& sequence = call_.sequences[i];
      if (!sequence.refused.ok()) continue;
      // Of a prepared result only a slice may be wanted.
      const int64_t first = std::max<int64_t>(0, -sequence.at);
      const int64_t end = std::min(sequence.tokens, call_.tokens - sequence.at);
      if (first >= end) continue;
      wanted_.push_back({i, first, end - first});
      tokens += end - first;
    }
    if (absl::Status status = CheckPreparedMemory(tokens); !status.ok()) return status;
    // Sessions that live in different servers cannot share a message. A prepared result is kept in the call's order.
    // A region has one server.
    if (call_.method != Method::kPrepare && call_.prepared.state() == nullptr && call_.region == nullptr) {
      std::stable_sort(wanted_.begin(), wanted_.end(),
                       [this](const Piece& a, const Piece& b) { return HomeOf(a) < HomeOf(b); });
    }
    const int64_t most = MostTokens(tokens);
    const int64_t parts = (tokens + most - 1) / most;
    if (parts > 0) Cut((tokens + parts - 1) / parts);
    if (absl::Status status = CheckTickets(); !status.ok()) return status;
    CallPlan plan;
    plan.parts = std::move(parts_);
    plan.ordered = Ordered(plan.parts);
    plan.tokens_together = HalfAQueue();
    plan.priority = PriorityOf(plan.parts.size());
    return plan;
  }

 private:
  const std::string& HomeOf(const Piece& piece) const { return call_.sequences[piece.sequence].home; }

  absl::Status CheckPreparedMemory(int64_t tokens) const {
    const int64_t room = model_.limits.prepare_memory_bytes;
    const int64_t bytes = tokens * PreparedTokenBytes(model_, call_);
    if (call_.method != Method::kPrepare || bytes <= room) return absl::OkStatus();
    return Refuse(Reason::kTooManyTokens, "sequences", absl::StrCat(bytes), absl::StrCat("<= ", room),
                  absl::StrCat("the result of ", tokens, " tokens takes ", bytes,
                               " bytes, all prepared results together may take ", room));
  }

  int64_t HalfAQueue() const { return std::max<int64_t>(1, limits_.max_call_tokens / 2); }

  // Of one part of `tokens`. At least 1: every group fits a token.
  int64_t MostTokens(int64_t tokens) const {
    int64_t most = tokens <= limits_.max_call_tokens ? limits_.max_call_tokens : HalfAQueue();
    bool sessions = false;
    for (const Piece& piece : wanted_) sessions |= !call_.sequences[piece.sequence].session.empty();
    for (const LayerGroup& group : groups_) {
      if (group.bytes.larger() == 0) continue;
      most = std::min(most, limits_.max_message_bytes / group.bytes.larger());
      if (!sessions && limits_.stripe_bytes > 0) {
        most = std::min(most, std::max<int64_t>(1, limits_.stripe_bytes / group.bytes.larger()));
      }
    }
    return most;
  }

  // Bytes of names that the piece brings into a message, and how many tokens still fit.
  int64_t PieceEnvelope(const Piece& piece) const {
    const CheckedSequence& sequence = call_.sequences[piece.sequence];
    return kPieceEnvelope + static_cast<int64_t>(sequence.session.size() + sequence.fork_from.size());
  }

  int64_t EmptyEnvelope() const {
    const int64_t layer = kLayerEnvelope + (call_.region != nullptr ? kRegionLayerEnvelope : 0);
    return kCallEnvelope + static_cast<int64_t>(call_.layers.size()) * layer;
  }

  // In a region a part's tokens are one span: none may be missing between two pieces.
  bool LeavesGap(const Piece& piece) const {
    const Piece& last = open_.pieces.back();
    return call_.region != nullptr && PlaceOf(call_, last) + last.tokens != PlaceOf(call_, piece);
  }

  // Fills parts in order up to `tokens` each; a part also ends where the envelope is full, and at the end of a ticket.
  void Cut(int64_t tokens) {
    for (const Piece& piece : wanted_) {
      for (int64_t done = 0; done < piece.tokens;) {
        Piece rest{piece.sequence, piece.first + done, piece.tokens - done};
        const int64_t room = RoomFor(rest, tokens);
        if (room <= 0) {
          Close();
          continue;
        }
        rest.tokens = std::min(rest.tokens, room);
        Add(rest);
        done += rest.tokens;
      }
    }
    Close();
  }

  // Tokens of `piece` that the open part still takes.
  int64_t RoomFor(const Piece& piece, int64_t tokens) {
    if (!open_.pieces.empty() && (HomeOf(open_.pieces.back()) != HomeOf(piece) || LeavesGap(piece))) return 0;
    int64_t room = tokens - open_.tokens;
    if (call_.prepared.state() != nullptr) {
      const int64_t at = call_.prepared_first + PlaceOf(call_, piece);
      const std::vector<PreparedPart>& tickets = call_.prepared.state()->parts;
      size_t ticket = 0;
      while (ticket + 1 < tickets.size() && at >= tickets[ticket + 1].first_token) ++ticket;
      if (!open_.pieces.empty() && open_.ticket != ticket) return 0;
      if (open_.pieces.empty()) {
        open_.ticket = ticket;
        open_.ticket_slice.begin = at - tickets[ticket].first_token;
      }
      room = std::min(room, tickets[ticket].first_token + tickets[ticket].tokens - at);
    }
    const int64_t envelope = (open_.pieces.empty() ? EmptyEnvelope() : envelope_) + PieceEnvelope(piece);
    // A name is at most 64 KiB and layers are at most 1024, so an empty part always has room.
    return std::min(room, (kMaxEnvelopeBytes - envelope) / kTokenEnvelope);
  }

  void Add(const Piece& piece) {
    if (open_.pieces.empty()) envelope_ = EmptyEnvelope();
    envelope_ += PieceEnvelope(piece) + piece.tokens * kTokenEnvelope;
    open_.tokens += piece.tokens;
    open_.pieces.push_back(piece);
  }

  void Close() {
    if (open_.pieces.empty()) return;
    open_.ticket_slice.end = open_.ticket_slice.begin + open_.tokens;
    if (open_.ticket.has_value() && call_.method == Method::kLookup) {
      // A Lookup by ticket has no slice of tokens.
      const PreparedPart& whole = call_.prepared.state()->parts[*open_.ticket];
      if (open_.tokens != whole.tokens) open_.ticket.reset();
    }
    for (const LayerGroup& group : groups_) {
      Part part = open_;
      part.first_layer = group.first;
      part.layers = group.layers;
      part.bytes = part.tokens * (group.bytes.up + group.bytes.down);
      parts_.push_back(std::move(part));
    }
    open_ = {};
    envelope_ = 0;
  }

  // What goes by no ticket must be known by its ids.
  absl::Status CheckTickets() const {
    if (call_.prepared.state() == nullptr) return absl::OkStatus();
    for (const Part& part : parts_) {
      if (part.ticket.has_value() || GoesByIds(model_, call_, part)) continue;
      return Refuse(Reason::kMessageBytes, "prepared", absl::StrCat(call_.tokens), absl::StrCat("<= ", part.tokens),
                    absl::StrCat("a Lookup takes all tokens of a ticket, a message may have ", part.tokens,
                                 " of them, and only the session knows the ids before them"));
    }
    return absl::OkStatus();
  }

  // Parts of one session change its history one after the other. What is prepared names none.
  bool Ordered(const std::vector<Part>& parts) const {
    std::vector<int> times(call_.sequences.size(), 0);
    for (const Part& part : parts) {
      for (const Piece& piece : part.pieces) {
        const CheckedSequence& sequence = call_.sequences[piece.sequence];
        if (!sequence.session.empty() && ++times[piece.sequence] > 1) return true;
      }
    }
    return false;
  }

  Priority PriorityOf(size_t parts) const {
    if (call_.priority != Priority::kAuto || parts < 2) return call_.priority;
    if (call_.row_ids != nullptr || call_.prepared.state() != nullptr) return call_.priority;
    for (const Piece& piece : wanted_) {
      if (piece.tokens > kMostDecodeTokens) return Priority::kPrefill;
    }
    return Priority::kDecode;
  }

  const ModelInfo& model_;
  const PlanLimits& limits_;
  const CheckedCall& call_;
  std::vector<LayerGroup> groups_;
  std::vector<Piece> wanted_;
  std::vector<Part> parts_;
  Part open_;
  int64_t envelope_ = 0;
};

}  // namespace

absl::StatusOr<CallPlan> PlanCall(const ModelInfo& model, const PlanLimits& limits, const CheckedCall& call) {
  return Planner(model, limits, call).Plan();
}

std::vector<int32_t> LookbackOf(const CheckedSequence& sequence, int64_t first, int lookback_length) {
  std::vector<int32_t> lookback;
  for (int64_t i = 1; i <= lookback_length; ++i) {
    const int64_t own = first - i;
    if (own >= 0) {
      const auto at = static_cast<size_t>(own);
      const bool masked = !sequence.token_mask.empty() && sequence.token_mask[at] == 0;
      lookback.push_back(masked ? kDeadToken : sequence.token_ids[at]);
    } else if (sequence.lookback.empty()) {
      return {};
    } else {
      lookback.push_back(sequence.lookback[static_cast<size_t>(-own - 1)]);
    }
  }
  return lookback;
}

bool GoesByIds(const ModelInfo& model, const CheckedCall& call, const Part& part) {
  return std::all_of(part.pieces.begin(), part.pieces.end(), [&](const Piece& piece) {
    return !LookbackOf(call.sequences[piece.sequence], piece.first, model.lookback_length()).empty();
  });
}

}  // namespace engram::client
