#include "client/reply_landing.h"

#include <cstring>

#include "client/highway_update.h"
#include "engram/v1/engram.pb.h"

namespace engram::client {
namespace {

PayloadPlace PlaceIn(const ReplyLayer& layer, int field) { return layer.payloads[static_cast<size_t>(field)]; }

// h + g * v of one piece, gates and values read where they lie: `from` tokens into the reply's payloads.
void UpdatePiece(const ModelInfo& model, const CheckedCall& call, const Piece& piece, const CheckedLayer& layer,
                 const Reply& reply, const ReplyLayer& got, int64_t from) {
  const CheckedSequence& sequence = call.sequences[piece.sequence];
  const int64_t highway_bytes = model.HighwayTokenBytes(call.dtype);
  const int64_t value_bytes = model.ValueTokenBytes();
  const int64_t gates_bytes = model.GatesTokenBytes();
  const PayloadPlace gates = PlaceIn(got, v1::LayerOutput::kGatesFieldNumber);
  const PayloadPlace values = PlaceIn(got, v1::LayerOutput::kValueFieldNumber);
  std::vector<char> gate(static_cast<size_t>(gates_bytes));
  std::vector<char> crossing(static_cast<size_t>(value_bytes));
  for (int64_t t = 0; t < piece.tokens; ++t) {
    reply.Copy(gates.offset + (from + t) * gates_bytes, gates_bytes, gate.data());
    const int64_t offset = values.offset + (from + t) * value_bytes;
    const char* value = reply.Contiguous(offset, value_bytes);
    if (value == nullptr) {
      reply.Copy(offset, value_bytes, crossing.data());
      value = crossing.data();
    }
    const int64_t at = (sequence.at + piece.first + t) * highway_bytes;
    HighwayUpdate update{.dtype = call.dtype, .tokens = 1, .hc = model.hc, .dim = model.dim};
    update.gates = gate.data();
    update.value = value;
    if (!sequence.token_mask.empty()) update.token_mask = sequence.token_mask.data() + piece.first + t;
    update.highway = layer.highway + at;
    update.out = layer.updated + at;
    UpdateHighway(update);
  }
}

}  // namespace

void LandPart(const ModelInfo& model, const CheckedCall& call, const Part& part, const Reply& reply,
              const std::vector<bool>& refused) {
  for (size_t i = 0; i < part.layers; ++i) {
    const CheckedLayer& layer = call.layers[part.first_layer + i];
    if (layer.landings.empty()) continue;
    const ReplyLayer& got = reply.layers()[i];
    int64_t from = 0;  // tokens into the payloads, which hold those served here alone
    for (size_t p = 0; p < part.pieces.size(); ++p) {
      const Piece& piece = part.pieces[p];
      if (call.partial_ok && !reply.sequences()[p].ok()) continue;
      if (!refused[piece.sequence]) {
        if (layer.updated != nullptr) {
          UpdatePiece(model, call, piece, layer, reply, got, from);
        } else {
          for (const Landing& landing : layer.landings) {
            reply.Copy(PlaceIn(got, landing.field).offset + from * landing.token_bytes,
                       piece.tokens * landing.token_bytes, landing.out + PlaceOf(call, piece) * landing.token_bytes);
          }
        }
      }
      from += piece.tokens;
    }
  }
}

void SkipPart(const ModelInfo& model, const CheckedCall& call, const Part& part, const std::vector<bool>& refused) {
  const int64_t highway_bytes = model.HighwayTokenBytes(call.dtype);
  for (size_t i = 0; i < part.layers; ++i) {
    const CheckedLayer& layer = call.layers[part.first_layer + i];
    for (const Piece& piece : part.pieces) {
      if (refused[piece.sequence]) continue;
      const int64_t at = PlaceOf(call, piece);
      char* highway = call.form == Form::kHighway ? layer.landings.front().out : layer.updated;
      if (highway != nullptr) {
        // memmove: `out` may be the highway itself.
        std::memmove(highway + at * highway_bytes, layer.highway + at * highway_bytes,
                     static_cast<size_t>(piece.tokens * highway_bytes));
        continue;
      }
      for (const Landing& landing : layer.landings) {
        std::memset(landing.out + at * landing.token_bytes, 0, static_cast<size_t>(piece.tokens * landing.token_bytes));
      }
    }
  }
}

}  // namespace engram::client
