#include "tests/api_model/random_calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace engram {

RandomCalls::RandomCalls(uint32_t seed, PlainApi& plain, RandomCallsOptions options)
    : random_(seed), plain_(plain), options_(options) {
  const absl::Span<const int32_t> map = plain_.compute().model().token_map();
  for (size_t token = 0; token < map.size(); ++token) {
    if (map[token] < 0 && tokens_.size() < 2) tokens_.push_back(static_cast<int32_t>(token));  // dead in the hash
  }
  while (tokens_.size() < 8) tokens_.push_back(static_cast<int32_t>(Draw(0, static_cast<int64_t>(map.size()) - 1)));
}

int32_t RandomCalls::Token() { return tokens_[static_cast<size_t>(Draw(0, static_cast<int64_t>(tokens_.size()) - 1))]; }

Planned RandomCalls::Next(uint64_t stream) {
  Planned planned;
  planned.stream = stream;
  const int64_t kind = Draw(0, 99);
  if (kind < 40) {
    Apply(planned);
  } else if (kind < 58) {
    ApplyByTicket(planned);
  } else if (kind < 72) {
    Prepare(planned);
  } else if (kind < 82) {
    Lookup(planned);
  } else if (kind < 87) {
    LookupByTicket(planned);
  } else if (kind < 93) {
    LookupRows(planned);
  } else if (kind < 97) {
    Release(planned);
  } else {
    Close(planned);
  }
  return planned;
}

std::vector<int32_t> RandomCalls::SomeLayers() {
  std::vector<int32_t> layers;
  for (const EngramLayer& layer : plain_.compute().model().layers()) {
    layers.push_back(static_cast<int32_t>(layer.layer_id));
  }
  std::shuffle(layers.begin(), layers.end(), random_);
  layers.resize(static_cast<size_t>(Draw(1, static_cast<int64_t>(layers.size()))));
  return layers;
}

void RandomCalls::FillSequence(v1::Sequence& sequence) {
  const int64_t before = plain_.compute().shape().max_ngram - 1;
  const std::string name = sequence.session();
  std::string source = name;
  if (!name.empty() && OnceIn(8)) {
    source = Name();
    sequence.mutable_fork_from()->set_session(source);
  }
  const int64_t length = plain_.sessions().LengthOf(PlainApi::KeyOf(source));
  int64_t start = OnceIn(3) ? std::max<int64_t>(0, length + Draw(-12, 1)) : length;
  const int64_t count = OnceIn(12) ? Draw(1, options_.longest) : Draw(1, 5);
  if (name.empty()) start = Draw(0, 20);
  if (OnceIn(16) || start + count + 2 > options_.position_limit) start = 0;
  sequence.set_start_pos(start);

  // What is said again must be said in tokens; the history has compressed ids. The first of the drawn tokens that has
  // the id stands for it.
  const PlainSession* own = plain_.sessions().Find(PlainApi::KeyOf(name));
  const absl::Span<const int32_t> map = plain_.compute().model().token_map();
  const bool repeats = own != nullptr && OnceIn(2);
  const bool masks = OnceIn(2);
  const auto token_at = [&](int64_t pos) -> int32_t {
    if (!repeats || !own->known.contains(pos) || OnceIn(30)) return masks && OnceIn(6) ? kMasked : Token();
    const int32_t id = own->known.at(pos);
    const auto found = std::find_if(tokens_.begin(), tokens_.end(),
                                    [&](int32_t token) { return map[static_cast<size_t>(token)] == id; });
    return found == tokens_.end() ? kMasked : *found;
  };
  std::string mask;
  bool masked = masks;
  for (int64_t t = 0; t < count; ++t) {
    const int32_t token = token_at(start + t);
    masked |= token == kMasked;
    mask.push_back(token == kMasked ? '\0' : static_cast<char>(Draw(1, 255)));
    sequence.add_token_ids(token == kMasked ? Token() : token);
  }
  if (masked) sequence.set_token_mask(mask);
  if (!sequence.has_fork_from() && (OnceIn(4) || (name.empty() && !OnceIn(6)))) {
    for (int64_t pos = start - 1; pos >= start - before; --pos) {
      const int32_t token = pos < 0 ? -1 : token_at(pos);
      sequence.add_lookback_token_ids(token == kMasked ? -1 : token);
    }
  }
  if (OnceIn(3)) {
    const int64_t last = own != nullptr && own->step.has_value() ? static_cast<int64_t>(*own->step) : 5;
    sequence.set_step(static_cast<uint64_t>(std::max<int64_t>(0, last + Draw(-1, 8))));
  }
}

void RandomCalls::AddSequences(Sequences& sequences, Planned& planned) {
  std::vector<char> names = {'a', 'b', 'c', 'd', 'e', 'f'};
  std::shuffle(names.begin(), names.end(), random_);
  const int64_t count = Draw(1, 3);
  for (int64_t i = 0; i < count; ++i) {
    v1::Sequence& sequence = *sequences.Add();
    if (!OnceIn(8)) sequence.set_session(std::string(1, names[static_cast<size_t>(i)]));
    FillSequence(sequence);
  }
  if (OnceIn(10)) {
    const int index = static_cast<int>(Draw(0, count - 1));
    while (!BendSequence(sequences, index, planned)) {
    }
  }
}

bool RandomCalls::BendSequence(Sequences& sequences, int index, Planned& planned) {
  v1::Sequence& sequence = sequences[index];
  const auto vocab = static_cast<int32_t>(plain_.compute().model().token_map().size());
  const int last = sequence.token_ids_size() - 1;
  Reason reason = Reason::kEmptyCall;
  switch (Draw(0, 7)) {
    case 0:
      sequence.clear_token_ids();
      sequence.clear_token_mask();
      break;
    case 1:
      sequence.set_token_ids(last, OnceIn(2) ? vocab : -1);
      reason = Reason::kTokenOutOfRange;
      break;
    case 2:
      sequence.set_token_mask(std::string(static_cast<size_t>(last + 2), '\1'));
      reason = Reason::kTokenMaskLength;
      break;
    case 3:
      if (sequence.has_fork_from()) return false;
      if (sequence.lookback_token_ids().empty()) {
        for (int j = 0; j < plain_.compute().shape().max_ngram; ++j) sequence.add_lookback_token_ids(-1);
      } else {
        sequence.add_lookback_token_ids(-1);
      }
      reason = Reason::kLookbackLength;
      break;
    case 4:
      if (index == 0 || sequences[index - 1].session().empty()) return false;
      sequence.set_session(sequences[index - 1].session());
      reason = Reason::kDuplicateSession;
      break;
    case 5:
      sequence.set_start_pos(options_.position_limit - last);
      reason = Reason::kPositionLimit;
      break;
    case 6:
      sequence.set_session(std::string(65, 'x'));
      reason = Reason::kSessionLength;
      break;
    default:
      sequence.set_start_pos(-1);
      sequence.clear_lookback_token_ids();
      reason = Reason::kPositionGap;
      break;
  }
  planned.fault = Planned::Fault{reason, index};
  return true;
}

v1::Slice RandomCalls::SomeSlice(int64_t all) {
  v1::Slice slice;
  slice.set_begin(Draw(0, all - 1));
  slice.set_end(Draw(slice.begin() + 1, all));
  return slice;
}

// Finite values in [-1, 1): in bf16 the upper half of their bits.
void RandomCalls::FillHighways(v1::ApplyRequest& request, int64_t tokens) {
  if (request.form() == v1::FORM_KV) return;
  const size_t width = request.highway_dtype() == v1::HIGHWAY_DTYPE_BF16 ? 2 : 4;
  for (v1::LayerInput& input : *request.mutable_layers()) {
    std::string& bytes = *input.mutable_highway();
    for (int64_t i = tokens * plain_.compute().shape().highway_values(); i > 0; --i) {
      const float value = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31f;
      char word[4];
      std::memcpy(word, &value, 4);
      bytes.append(word + 4 - width, width);
    }
  }
}

void RandomCalls::BendLayers(google::protobuf::RepeatedField<int32_t>& layer_ids, Planned& planned) {
  if (planned.fault.has_value() || !OnceIn(40)) return;
  layer_ids.Set(0, OnceIn(2) ? 1000 : layer_ids.Get(layer_ids.size() - 1));
  if (layer_ids.size() == 1) layer_ids.Set(0, 1000);
  planned.fault = Planned::Fault{Reason::kLayerUnknown};
}

v1::ApplyRequest& RandomCalls::Apply(Planned& planned) {
  static constexpr v1::Form kForms[] = {v1::FORM_UNSPECIFIED, v1::FORM_HIGHWAY, v1::FORM_KV, v1::FORM_UPDATE,
                                        v1::FORM_GATE};
  v1::ApplyRequest& request = *planned.request.mutable_apply();
  request.set_form(kForms[Draw(0, 4)]);
  request.set_highway_dtype(static_cast<v1::HighwayDtype>(Draw(0, 2)));
  request.set_priority(static_cast<v1::Priority>(Draw(0, 2)));
  request.set_partial_ok(OnceIn(2));
  AddSequences(*request.mutable_sequences(), planned);
  int64_t tokens = 0;
  for (const v1::Sequence& sequence : request.sequences()) tokens += sequence.token_ids_size();
  for (const int32_t layer : SomeLayers()) request.add_layers()->set_layer_id(layer);
  FillHighways(request, tokens);
  if (planned.fault.has_value()) return request;
  if (OnceIn(40)) {
    request.mutable_layers(0)->mutable_highway()->push_back('\0');
    planned.fault = Planned::Fault{Reason::kHighwaySize};
  } else if (OnceIn(60)) {
    request.set_model_key(std::string(16, 'k'));
    planned.fault = Planned::Fault{Reason::kDigestMismatch};
  } else if (OnceIn(60)) {
    *request.mutable_token_slice() = SomeSlice(4);
    planned.fault = Planned::Fault{Reason::kSlice};
  } else if (OnceIn(60)) {
    request.set_form(v1::FORM_ROWS_BF16);
    for (v1::LayerInput& layer : *request.mutable_layers()) layer.clear_highway();
    planned.fault = Planned::Fault{Reason::kForm};
  }
  return request;
}

// Of a ticket that lives, mostly; else of one that is gone, or that never was.
std::string RandomCalls::TicketName() {
  std::vector<const PlainTicket*> alive, gone;
  for (const PlainTicket& ticket : plain_.tickets().all()) {
    if (!ticket.name.empty()) (ticket.alive ? alive : gone).push_back(&ticket);
  }
  const auto& from = alive.empty() || (!gone.empty() && OnceIn(6)) ? gone : alive;
  if (from.empty() || OnceIn(40)) return std::string(static_cast<size_t>(OnceIn(2) ? 24 : Draw(1, 40)), 't');
  return from[static_cast<size_t>(Draw(0, static_cast<int64_t>(from.size()) - 1))]->name;
}

void RandomCalls::ApplyByTicket(Planned& planned) {
  v1::ApplyRequest& request = Apply(planned);
  planned.fault.reset();
  request.clear_sequences();
  request.clear_model_key();
  request.clear_token_slice();
  if (request.form() == v1::FORM_ROWS_BF16) request.set_form(v1::FORM_UPDATE);
  request.set_ticket(TicketName());
  const PlainTicket* ticket = plain_.tickets().Find(request.ticket());
  int64_t tokens = ticket == nullptr ? 1 : static_cast<int64_t>(ticket->tokens.size());
  if (OnceIn(2)) {
    *request.mutable_token_slice() = SomeSlice(tokens);
    tokens = request.token_slice().end() - request.token_slice().begin();
  }
  for (v1::LayerInput& layer : *request.mutable_layers()) layer.clear_highway();
  FillHighways(request, tokens);
}

void RandomCalls::Lookup(Planned& planned) {
  static constexpr v1::Form kForms[] = {v1::FORM_UNSPECIFIED, v1::FORM_KV, v1::FORM_ROWS_NATIVE, v1::FORM_ROWS_BF16};
  v1::LookupRequest& request = *planned.request.mutable_lookup();
  request.set_form(kForms[Draw(0, 3)]);
  request.set_priority(static_cast<v1::Priority>(Draw(0, 2)));
  request.set_partial_ok(OnceIn(2));
  AddSequences(*request.mutable_sequences(), planned);
  for (const int32_t layer : SomeLayers()) request.add_layer_ids(layer);
  const StepShape& shape = plain_.compute().shape();
  const int64_t all = request.form() == v1::FORM_KV ? shape.kv_values() : shape.columns;
  if (OnceIn(2)) *request.mutable_slice() = SomeSlice(all);
  if (planned.fault.has_value()) return;
  if (OnceIn(30)) {
    request.mutable_slice()->set_begin(0);
    request.mutable_slice()->set_end(OnceIn(2) ? all + 1 : 0);
    planned.fault = Planned::Fault{Reason::kSlice};
    return;
  }
  BendLayers(*request.mutable_layer_ids(), planned);
}

void RandomCalls::LookupByTicket(Planned& planned) {
  Lookup(planned);
  planned.fault.reset();
  v1::LookupRequest& request = *planned.request.mutable_lookup();
  request.clear_sequences();
  request.set_ticket(TicketName());
  request.clear_layer_ids();
  for (const int32_t layer : SomeLayers()) request.add_layer_ids(layer);
  if (request.slice().end() == 0 || request.slice().end() > plain_.compute().shape().columns) request.clear_slice();
}

void RandomCalls::LookupRows(Planned& planned) {
  LookupByTicket(planned);
  v1::LookupRequest& request = *planned.request.mutable_lookup();
  request.clear_ticket();
  const bool bent = OnceIn(10);
  for (int64_t t = Draw(1, 12); t > 0; --t) {
    for (const int32_t layer_id : request.layer_ids()) {
      const absl::Span<const EngramLayer> layers = plain_.compute().model().layers();
      const auto layer =
          std::find_if(layers.begin(), layers.end(), [&](const auto& l) { return l.layer_id == layer_id; });
      for (int c = 0; c < plain_.compute().shape().columns; ++c) {
        request.add_row_ids(static_cast<int32_t>(Draw(-1, layer->table.rows - 1)));
      }
      if (bent)
        request.set_row_ids(request.row_ids_size() - 1, static_cast<int32_t>(OnceIn(2) ? layer->table.rows : -2));
    }
  }
  if (bent) planned.fault = Planned::Fault{Reason::kRowOutOfRange};
}

void RandomCalls::Prepare(Planned& planned) {
  v1::PrepareRequest& request = *planned.request.mutable_prepare();
  request.set_return_values(OnceIn(2));
  request.set_priority(static_cast<v1::Priority>(Draw(0, 2)));
  AddSequences(*request.mutable_sequences(), planned);
  for (const int32_t layer : SomeLayers()) request.add_layer_ids(layer);
  BendLayers(*request.mutable_layer_ids(), planned);
}

void RandomCalls::Release(Planned& planned) {
  v1::ReleaseRequest& request = *planned.request.mutable_release();
  if (!options_.drop_tickets) return;
  for (int64_t i = Draw(1, 2); i > 0; --i) request.add_tickets(TicketName());
}

void RandomCalls::Close(Planned& planned) {
  v1::CloseSessionsRequest& request = *planned.request.mutable_close_sessions();
  for (int64_t i = Draw(1, 2); i > 0; --i) request.add_sessions(OnceIn(10) ? "unknown" : Name());
}

}  // namespace engram
