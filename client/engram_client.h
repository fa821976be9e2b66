// The client of an engram server: one connection, one model, any number of threads.
//
//   auto client = Client::Connect({.target = "127.0.0.1:8001"});
//   SequenceHistory history((*client)->model().max_ngram);
//   ApplyCall call;
//   call.sequences = {{.history = &history, .start_pos = 0, .token_ids = ids}};
//   call.layers = {{.layer_id = 1, .highway = bytes, .out = bytes}};
//   absl::Status status = (*client)->Apply(call);
//
// A failed call changes nothing here: no output is written, no history moves; make it again. The server may have
// committed it all the same, and answers the repetition with the same bits.
// Errors keep the server's code and message; error_details.h reads the reason and the offenders, also of what is
// refused here before it is sent. A call that nobody answered is DEADLINE_EXCEEDED or UNAVAILABLE and names the target.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/apply_call.h"
#include "client/model_info.h"
#include "engram/v1/engram.grpc.pb.h"

namespace engram::client {

struct ClientOptions {
  // "host:port" or "unix:/path". Reached directly: proxies named in the environment are not used.
  std::string target = {};

  // Until the server answered GetModel; a server still starting is waited for.
  absl::Duration connect_timeout = absl::Seconds(10);

  // The hash_digest computed from the caller's own tokenizer and config, as 64 hex digits or 32 raw bytes. Connect
  // fails when the server's differs: two token maps of one size give plausible and wrong rows. Empty: not checked.
  std::string hash_digest = {};

  // The client's own ceiling for the tensors of one message; the smaller of this and the server's limit holds. It
  // bounds what a faulty server can make the client allocate.
  int64_t max_message_bytes = int64_t{256} << 20;
};

// Thread-safe; a SequenceHistory is not, and belongs to one call at a time.
class Client {
 public:
  // Opens the connection and asks for the model. UNAVAILABLE or DEADLINE_EXCEEDED name the target and what happened;
  // DIGEST_MISMATCH names both digests.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // What the server said when the connection was made.
  const ModelInfo& model() const { return model_; }

  // Of the tensors of one request or reply: the server's limit or ClientOptions', whichever is smaller.
  int64_t max_message_bytes() const { return max_message_bytes_; }

  // One engine step, blocking until the reply or the deadline. Sizes are checked before anything is sent and before
  // anything is copied back.
  absl::Status Apply(const ApplyCall& call);

 private:
  Client(std::string target, ModelInfo model, int64_t max_message_bytes, std::unique_ptr<v1::EngramService::Stub> stub);

  const std::string target_;
  const ModelInfo model_;
  const int64_t max_message_bytes_;
  const std::unique_ptr<v1::EngramService::Stub> stub_;
};

}  // namespace engram::client
