// What a worker needs, over the wire by the client library: rows and kv by Lookup, the rest by Prepare and Apply.
//
// Ids and look-back go with every call; no session is kept on the server. With several tensor-parallel ranks, either
// each fetches its own part (kSlice: columns of rows, outputs of kv, tokens of an Apply) over a connection of its own
// and the layer waits for the slowest, or one fetches all and passes it on inside the node, which costs nothing here
// (kBroadcast).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/bench/worker/step_fetch.h"
#include "client/engram_client.h"

namespace engram::bench {

enum class Fanout { kSlice, kBroadcast };

// Of rows and kv, all of which could be asked for at the top of a step.
enum class Calls {
  kChain,  // a call per layer, each sent when the one before has arrived: the first layer's bytes wait for no others
  kLayer,  // a call per layer, all at once
  kStep,   // one call for all layers: nothing is there before everything is
};

struct WireFetchOptions {
  client::Form form = client::Form::kRowsNative;
  client::HighwayDtype dtype = client::HighwayDtype::kBf16;
  int ranks = 1;  // tensor-parallel, >= 1
  Fanout fanout = Fanout::kSlice;
  Calls calls = Calls::kChain;
  int64_t max_step_tokens = 0;
  absl::Duration timeout = absl::Seconds(30);
  client::Client* plain = nullptr;  // whom Verify asks; null: there will be no Verify
};

// `client` is the worker's own, for all of its ranks; it outlives the fetch, and so does options.plain.
std::unique_ptr<StepFetch> MakeWireFetch(client::Client& client, const WireFetchOptions& options);

// The two kinds that it makes.
std::unique_ptr<StepFetch> MakeLookupFetch(client::Client& client, const WireFetchOptions& options);
std::unique_ptr<StepFetch> MakeApplyFetch(client::Client& client, const WireFetchOptions& options);

// [0, all) in as many parts of nearly equal size as there are ranks; fewer where there is not enough for each. One part
// for kBroadcast.
std::vector<client::Range> PartsOf(int64_t all, const WireFetchOptions& options);

// The step's runs as calls take them, which borrow from it.
std::vector<client::SequenceRun> RunsOf(const PlannedStep& step);

// Of the runs in a request: ids, look-back, positions, tags.
int64_t BytesOfRuns(const PlannedStep& step);

// "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED QUEUE_FULL".
void CountErrors(const std::vector<absl::Status>& failures, std::map<std::string, int64_t>& errors);

// `got` equals `expected` of this layer; DATA_LOSS says from which byte on it does not.
absl::Status SameBytes(int32_t layer_id, absl::Span<const char> got, absl::Span<const char> expected);

}  // namespace engram::bench
