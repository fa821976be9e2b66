// A synthetic model of some hundred kilobytes with all that matters to a step: three layers, two copies, trigrams,
// tokens without an id.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "server/model/synth.h"

namespace engram {

// Writes it into the folder; its path.
inline std::string WriteSmallSynth(const std::string& folder) {
  SynthOptions options;
  options.out = folder + "/small.gguf";
  options.layers = {1, 5, 9};
  options.dim = 32;
  options.hc = 2;
  options.max_ngram = 3;
  options.heads = 2;
  options.vocab = 64;
  options.compressed_vocab = 50;
  options.dead_tokens = 3;
  options.force = true;
  const auto written = WriteSynthModel(options);
  EXPECT_TRUE(written.ok()) << written.status();
  return options.out;
}

}  // namespace engram
