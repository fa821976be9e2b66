// Random calls of the whole step API, drawn from where the plain model stands so that most of them matter: sequences go
// on where they ended, rewind, repeat themselves, fork; tickets are used while they live and after.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engram/v1/engram.pb.h"
#include "tests/api_model/plain_api.h"

namespace engram {

struct RandomCallsOptions {
  int64_t position_limit = 400;
  int64_t longest = 24;      // tokens of a sequence
  uint64_t streams = 2;      // that a call may come in by, besides unary
  bool drop_tickets = true;  // now and then a ticket is released
};

class RandomCalls {
 public:
  RandomCalls(uint32_t seed, PlainApi& plain, RandomCallsOptions options);

  int64_t Draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  // True once in `n`.
  bool OnceIn(int64_t n) { return Draw(1, n) == 1; }

  Planned Next(uint64_t stream);

 private:
  using Sequences = google::protobuf::RepeatedPtrField<v1::Sequence>;

  v1::ApplyRequest& Apply(Planned& planned);
  void ApplyByTicket(Planned& planned);
  void Lookup(Planned& planned);
  void LookupByTicket(Planned& planned);
  void LookupRows(Planned& planned);
  void Prepare(Planned& planned);
  void Release(Planned& planned);
  void Close(Planned& planned);

  void AddSequences(Sequences& sequences, Planned& planned);
  void FillSequence(v1::Sequence& sequence);
  // Bends one of the sequences. False: it would have been no fault.
  bool BendSequence(Sequences& sequences, int index, Planned& planned);
  std::vector<int32_t> SomeLayers();
  void FillHighways(v1::ApplyRequest& request, int64_t tokens);
  v1::Slice SomeSlice(int64_t all);
  // The call's own faults: the layers', the slice's, the model's.
  void BendLayers(google::protobuf::RepeatedField<int32_t>& layer_ids, Planned& planned);
  std::string TicketName();
  int32_t Token();
  std::string Name() { return std::string(1, static_cast<char>('a' + Draw(0, 5))); }

  std::mt19937 random_;
  PlainApi& plain_;
  const RandomCallsOptions options_;
  std::vector<int32_t> tokens_;  // what is drawn from: few, so that windows come again
};

}  // namespace engram
