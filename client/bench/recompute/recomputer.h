// What a server should answer, computed in this process from the model's file: the server's own reading of it, its
// engine's step and its kernels, without anything of the way there and back (sessions, batches, tickets, the wire).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/expected_reply.h"
#include "client/bench/step.h"
#include "client/model_info.h"

namespace engram::bench {

// Used by one thread at a time.
class Recomputer {
 public:
  // Reads the model at `path` where it lies (mapped). FAILED_PRECONDITION, DIGEST_MISMATCH by name, where it is not the
  // one that `served` describes; else EngramModel's errors.
  static absl::StatusOr<std::unique_ptr<Recomputer>> Load(const std::string& path, const client::ModelInfo& served);
  ~Recomputer();

  // Whether kv, gates and highways of the server are these bits, and not only within tolerances.
  bool same_numerics() const;
  const std::string& numerics_id() const;

  // One for each of `layer_ids`, whose highways, [tokens, hc, dim] of `dtype`, are at `highways`, null where the form
  // reads none. On the calling thread alone.
  absl::StatusOr<std::vector<ExpectedLayer>> Compute(const Step& step, const std::vector<int32_t>& layer_ids,
                                                     client::HighwayDtype dtype,
                                                     const std::vector<const char*>& highways);

 private:
  struct Parts;
  explicit Recomputer(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace engram::bench
