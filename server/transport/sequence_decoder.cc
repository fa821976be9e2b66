#include "server/transport/sequence_decoder.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"

namespace engram {
namespace {

// The longest sequence of a call that is taken for DECODE where the client does not say: a token and its drafts.
constexpr int64_t kMostDecodeTokens = 16;

}  // namespace

void SequenceDecoder::Refuse(Reason reason, std::string field, std::string value, std::string bound, std::string text) {
  own_->Add({reason, std::move(field), std::move(value), std::move(bound), std::move(text)});
}

bool SequenceDecoder::Decode(const google::protobuf::RepeatedPtrField<v1::Sequence>& sequences) {
  if (sequences.empty()) {
    refusals_.Add({Reason::kEmptyCall, "sequences", "0", ">= 1", "a call needs at least one sequence"});
  }
  if (!CountTokens(sequences)) return false;
  for (int i = 0; i < sequences.size(); ++i) Sequence(i, sequences[i]);
  return true;
}

// T, which everything else is measured against.
bool SequenceDecoder::CountTokens(const google::protobuf::RepeatedPtrField<v1::Sequence>& sequences) {
  const int64_t most = context_.limits.max_call_tokens;
  if (sequences.size() > most) {  // each has at least one token, or is refused anyway: not worth a walk
    refusals_.Add({Reason::kTooManyTokens, "sequences", absl::StrCat(sequences.size()), absl::StrCat("<= ", most),
                   absl::StrCat("a call may have ", most, " tokens, this one has ", sequences.size(), " sequences")});
    return false;
  }
  for (const v1::Sequence& sequence : sequences) {
    call_.tokens += sequence.token_ids_size();
    call_.sequences.push_back({.tokens = sequence.token_ids_size(), .refused = false});
    masked_ |= !sequence.token_mask().empty();
    if (sequence.token_ids_size() > kMostDecodeTokens) call_.priority = Priority::kPrefill;
  }
  if (call_.tokens > most) {
    refusals_.Add({Reason::kTooManyTokens, "sequences", absl::StrCat(call_.tokens), absl::StrCat("<= ", most),
                   absl::StrCat("a call may have ", most, " tokens, this one has ", call_.tokens)});
    return false;
  }
  if (masked_) call_.token_mask.reserve(static_cast<size_t>(call_.tokens));
  return true;
}

void SequenceDecoder::Sequence(int index, const v1::Sequence& sequence) {
  Refusals own;
  own_ = call_.partial_ok ? &own : &refusals_;
  const std::string path = absl::StrCat("sequences[", index, "]");
  SequenceClaim claim;
  claim.index = static_cast<size_t>(index);
  claim.session = sequence.session();
  claim.start_pos = sequence.start_pos();
  if (sequence.has_step()) claim.step = sequence.step();
  if (sequence.token_ids().empty()) {
    Refuse(Reason::kEmptyCall, absl::StrCat(path, ".token_ids"), "0", ">= 1", "a sequence needs at least one token");
  }
  Name(path, sequence);
  Position(path, sequence.start_pos(), sequence.token_ids_size());
  TokenIds(path, sequence, claim.ids);
  Lookback(path, sequence, claim.lookback);
  Fork(path, sequence, claim);
  if (call_.partial_ok) call_.statuses.push_back(own.ToStatus());
  if (!own.empty()) {
    call_.sequences[static_cast<size_t>(index)].refused = true;
    return;
  }
  call_.claim_of.push_back(static_cast<size_t>(index));
  call_.claims.push_back(std::move(claim));
}

void SequenceDecoder::Name(const std::string& path, const v1::Sequence& sequence) {
  const std::string field = absl::StrCat(path, ".session");
  const auto most = static_cast<size_t>(context_.limits.max_session_bytes);
  if (sequence.session().size() > most) {
    Refuse(Reason::kSessionLength, field, absl::StrCat(sequence.session().size()), absl::StrCat("<= ", most),
           absl::StrCat("a session's name has 1 to ", most, " bytes, this one has ", sequence.session().size()));
  }
  if (!sequence.session().empty() && !names_.insert(sequence.session()).second) {
    Refuse(Reason::kDuplicateSession, field, absl::StrCat(sequence.session().size(), " bytes"), "each session once",
           "this session stands in the call more than once");
  }
}

void SequenceDecoder::Position(const std::string& path, int64_t start_pos, int64_t tokens) {
  const std::string field = absl::StrCat(path, ".start_pos");
  const int64_t last = context_.limits.position_limit - tokens;
  if (start_pos < 0) {
    Refuse(Reason::kPositionGap, field, absl::StrCat(start_pos), ">= 0",
           absl::StrCat("position ", start_pos, " lies before the sequence's start, 0"));
  } else if (start_pos > last) {
    Refuse(Reason::kPositionLimit, field, absl::StrCat(start_pos), absl::StrCat("<= ", last),
           absl::StrCat(tokens, " tokens from position ", start_pos, " pass the position limit of ",
                        context_.limits.position_limit));
  }
}

void SequenceDecoder::Fork(const std::string& path, const v1::Sequence& sequence, SequenceClaim& claim) {
  if (!sequence.has_fork_from()) return;
  const std::string field = absl::StrCat(path, ".fork_from.session");
  claim.fork_from = sequence.fork_from().session();
  const auto most = static_cast<size_t>(context_.limits.max_session_bytes);
  if (claim.fork_from.empty() || claim.fork_from.size() > most) {
    Refuse(Reason::kSessionLength, field, absl::StrCat(claim.fork_from.size()), absl::StrCat("1 to ", most),
           absl::StrCat("the parent's name has 1 to ", most, " bytes, this one has ", claim.fork_from.size()));
  }
  if (sequence.session().empty()) {
    Refuse(Reason::kSessionLength, absl::StrCat(path, ".session"), "0", absl::StrCat("1 to ", most),
           "a stateless sequence cannot fork: name the session that the copy becomes");
  }
  if (!sequence.lookback_token_ids().empty()) {
    Refuse(Reason::kLookbackLength, absl::StrCat(path, ".lookback_token_ids"),
           absl::StrCat(sequence.lookback_token_ids_size()), "0",
           "a fork takes its history from its parent: no look-back");
  }
}

// The compressed id of a token, or kDead with a refusal where there is no such token.
int32_t SequenceDecoder::Compressed(int32_t token, const std::string& list, int index) {
  const absl::Span<const int32_t> map = context_.model.token_map();
  if (token < 0 || static_cast<size_t>(token) >= map.size()) {
    const std::string bound = absl::StrCat("[0, ", map.size(), ")");
    Refuse(Reason::kTokenOutOfRange, absl::StrCat(list, "[", index, "]"), absl::StrCat(token), bound,
           absl::StrCat("token id ", token, " is outside ", bound));
    return kernels::kDead;
  }
  return map[static_cast<size_t>(token)];
}

void SequenceDecoder::TokenIds(const std::string& path, const v1::Sequence& sequence, std::vector<int32_t>& ids) {
  const int tokens = sequence.token_ids_size();
  const std::string& mask = sequence.token_mask();
  const bool right_mask = mask.empty() || mask.size() == static_cast<size_t>(tokens);
  if (!right_mask) {
    Refuse(Reason::kTokenMaskLength, absl::StrCat(path, ".token_mask"), absl::StrCat(mask.size()), absl::StrCat(tokens),
           absl::StrCat("token_mask has ", mask.size(), " bytes for ", tokens, " tokens"));
  }
  const std::string list = absl::StrCat(path, ".token_ids");
  ids.reserve(static_cast<size_t>(tokens));
  for (int t = 0; t < tokens; ++t) {
    // A masked token's id is checked too: a bad one is a fault of the caller's all the same.
    const int32_t id = Compressed(sequence.token_ids(t), list, t);
    const bool live = mask.empty() || !right_mask || mask[static_cast<size_t>(t)] != 0;
    ids.push_back(live ? id : kMasked);
    if (masked_) call_.token_mask.push_back(live ? 1 : 0);
  }
}

void SequenceDecoder::Lookback(const std::string& path, const v1::Sequence& sequence, std::vector<int32_t>& lookback) {
  const int given = sequence.lookback_token_ids_size();
  if (given == 0) return;
  const int before = context_.shape.max_ngram - 1;
  const std::string list = absl::StrCat(path, ".lookback_token_ids");
  if (given != before) {
    Refuse(Reason::kLookbackLength, list, absl::StrCat(given), absl::StrCat(before),
           absl::StrCat("look-back has exactly ", before, " ids, newest first (-1 = masked or before the start), got ",
                        given));
    return;
  }
  lookback.assign(static_cast<size_t>(before), kernels::kDead);
  for (int j = 0; j < before; ++j) {
    const int32_t token = sequence.lookback_token_ids(j);
    if (token == kernels::kDead) continue;
    // Without overflow: start_pos - 1 - j < 0.
    if (sequence.start_pos() <= j) {
      Refuse(Reason::kTokenOutOfRange, absl::StrCat(list, "[", j, "]"), absl::StrCat(token), "-1",
             absl::StrCat("token id ", token, " stands before the sequence's start: send -1 there"));
      continue;
    }
    lookback[static_cast<size_t>(before - 1 - j)] = Compressed(token, list, j);
  }
}

}  // namespace engram
