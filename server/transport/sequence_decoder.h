// The sequences of a request: ids, masks, look-back and names from the wire to claims on histories.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "engram/v1/engram.pb.h"
#include "server/refusal/refusal.h"
#include "server/transport/step_call.h"

namespace engram {

// Not thread-safe; one per request.
class SequenceDecoder {
 public:
  // Refused sequences go to `refusals`, or with call.partial_ok to call.statuses.
  SequenceDecoder(const DecodeContext& context, Refusals& refusals, StepCall& call)
      : context_(context), refusals_(refusals), call_(call) {}

  // False: the call is beyond any further look (too many tokens).
  bool Decode(const google::protobuf::RepeatedPtrField<v1::Sequence>& sequences);

 private:
  bool CountTokens(const google::protobuf::RepeatedPtrField<v1::Sequence>& sequences);
  void Sequence(int index, const v1::Sequence& sequence);
  void Name(const std::string& path, const v1::Sequence& sequence);
  void Position(const std::string& path, int64_t start_pos, int64_t tokens);
  void Fork(const std::string& path, const v1::Sequence& sequence, SequenceClaim& claim);
  int32_t Compressed(int32_t token, const std::string& list, int index);
  void TokenIds(const std::string& path, const v1::Sequence& sequence, std::vector<int32_t>& ids);
  void Lookback(const std::string& path, const v1::Sequence& sequence, std::vector<int32_t>& lookback);
  void Refuse(Reason reason, std::string field, std::string value, std::string bound, std::string text);

  const DecodeContext& context_;
  Refusals& refusals_;
  StepCall& call_;
  bool masked_ = false;      // some sequence has a mask
  Refusals* own_ = nullptr;  // of the sequence at hand
  absl::flat_hash_set<std::string> names_;
};

}  // namespace engram
