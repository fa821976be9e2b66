// A fixture: sequences of calls with their expected results, from expected.json and the expected.bin beside it.
//
// Both files are checked before anything is believed: every extent lies inside expected.bin and has the size its shape
// gives. Immutable after loading.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace engram::client {

struct FixtureLayer {
  int32_t layer_id = 0;
  std::vector<float> highway;    // [T, hc, dim], the input
  std::vector<double> kv_exact;  // [T, (hc + 1) * dim], before its rounding to bf16
  std::vector<float> kv;         // the same rounded to bf16: what `gate` was computed on
  std::vector<double> gate;      // [T, hc]; 0 where masked
};

struct FixtureCall {
  int64_t start_pos = 0;
  std::vector<int32_t> tokens;    // [T]
  std::vector<uint8_t> mask;      // [T], or empty: all live
  std::vector<int32_t> lookback;  // N-1 ids newest first, or empty: not given
  std::vector<FixtureLayer> layers;

  bool Live(int64_t token) const { return mask.empty() || mask[token] != 0; }
};

// The calls of one fresh sequence, in order.
struct FixtureCase {
  std::string name;
  std::vector<FixtureCall> calls;
};

struct Fixture {
  std::string name;
  int64_t dim = 0;
  int64_t hc = 0;
  int64_t head_dim = 0;
  int64_t max_ngram = 0;
  int64_t heads = 0;
  int64_t cols = 0;
  int64_t vocab = 0;
  int64_t pad_id = 0;
  double eps = 0;
  std::string row_type;
  std::string wkv_type;
  std::vector<int32_t> layer_ids;
  std::vector<int64_t> rows;  // per layer
  std::vector<FixtureCase> cases;

  std::vector<std::string> files;  // names of the model's files, which lie beside the fixture; may be empty

  // The tolerances in the file's own words.
  std::string kv_tolerance;
  std::string out_tolerance;
};

// `path` names expected.json. An error names the file, the key, and what was expected; for a file that is something
// else altogether it says "not a fixture", whatever lies beside it.
absl::StatusOr<Fixture> LoadFixture(const std::string& path);

}  // namespace engram::client
