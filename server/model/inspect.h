// A look at a model file by its header and small tensors; the tables are never read.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/digests.h"
#include "server/model/engram_header.h"
#include "server/model/model_files.h"

namespace engram {

struct Inspection {
  ModelFiles files;
  EngramHeader header;
  std::vector<WeightDigests> weights;  // per layer
  Digest hash_digest, config_digest;
};

// All rules of docs/formats.md are checked: an Inspection is of a file that would load.
absl::StatusOr<Inspection> InspectModel(const std::string& path);

std::string InspectionText(const Inspection& inspection);
std::string InspectionJson(const Inspection& inspection);

// The digests alone. `sidecar`: where they were written; empty: nowhere.
std::string DigestsText(const Inspection& inspection, const Digest& content_digest);
std::string DigestsJson(const Inspection& inspection, const Digest& content_digest, const std::string& sidecar);

}  // namespace engram
