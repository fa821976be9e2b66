// Steps as the bytes of request messages, at the least cost: the small fields are written anew for each call, the
// highway is slices of memory that is made once and never copied.
//
// The bytes are those that protobuf would write, fields in the order of their numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/bench/step.h"
#include "client/model_info.h"
#include "grpcpp/support/byte_buffer.h"

namespace engram::bench {

// A call ready to be sent. A ROWS or KV step is a Lookup; every form by ticket but ROWS is an Apply.
struct Composed {
  const char* method = "";  // "/engram.v1.EngramService/Apply"
  grpc::ByteBuffer message;
  int64_t tokens = 0;
  int64_t payload_up = 0;    // bytes of the highway, and 4 for each token id that is sent
  int64_t payload_down = 0;  // bytes of the tensors that an answer holds
};

// Immutable; any thread. Composed messages point into it: it outlives every call.
class RequestComposer {
 public:
  // `layer_ids` are the model's. Steps have at most `most_tokens` tokens; the highway is the same for the same seed.
  RequestComposer(const client::ModelInfo& model, std::vector<int32_t> layer_ids, client::HighwayDtype dtype,
                  int64_t most_tokens, uint64_t seed);
  RequestComposer(const RequestComposer&) = delete;
  RequestComposer& operator=(const RequestComposer&) = delete;

  // Not by ticket where `ticket` is empty.
  Composed Compose(const Step& step, const std::string& ticket) const;
  Composed ComposePrepare(const Step& step) const;

  // The same number of bytes for an echo server (echo_server.h): the last 8 say how many bytes the answer has, as many
  // as the service's would. Its method is Apply's whatever the step's form.
  Composed ComposeEcho(const Step& step, const std::string& ticket) const;

  // Different starts that `highway_at` may take: [0, highway_starts()).
  int64_t highway_starts() const { return kSpareTokens; }
  // [tokens of the step, hc, dim] of `dtype`, what a step's layer (an index into layer_ids) sends.
  const char* HighwayOf(const Step& step, size_t layer) const;

  const std::vector<int32_t>& layer_ids() const { return layer_ids_; }
  client::HighwayDtype dtype() const { return dtype_; }

 private:
  // Each step begins at one of so many tokens of the pool, each layer one further, so that no two highways of a call
  // and few of a run are the same.
  static constexpr int64_t kSpareTokens = 61;

  Composed Start(const Step& step, const std::string& ticket) const;
  Composed Write(const Step& step, const std::string& ticket, bool echo) const;
  int64_t ReplyTokenBytes(client::Form form, size_t layer) const;
  int64_t ReplyMessageBytes(const Step& step) const;

  const client::ModelInfo model_;
  const std::vector<int32_t> layer_ids_;
  const client::HighwayDtype dtype_;
  const int64_t token_bytes_;  // of the highway
  std::vector<char> pool_;     // [most_tokens + kSpareTokens + layers, hc, dim]
};

// Whether a call of this form goes to Lookup where it brings its own tokens.
bool IsLookup(client::Form form);
// Whether its request holds a highway.
bool SendsHighway(client::Form form);

}  // namespace engram::bench
