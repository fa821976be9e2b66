#include "client/bench/trace.h"

#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "client/bench/make_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::bench {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(Trace, AStepIsReadAsItIsWritten) {
  const auto steps = ParseTrace("t",
                                "\n{\"at_ms\": 1.5, \"form\": \"ROWS_NATIVE\", \"sequences\": [{\"session\": \"a\", "
                                "\"start_pos\": 7, \"tokens\": "
                                "3, \"ngram_pool\": 9}]}\n\n{\"sequences\": [{\"session\": \"b\", \"tokens\": 1}, "
                                "{\"session\": \"c\", \"tokens\": "
                                "2}]}\n");
  ASSERT_TRUE(steps.ok()) << steps.status();
  ASSERT_EQ(steps->size(), 2u);
  const TraceStep& first = steps->front();
  EXPECT_EQ(first.at, 1'500'000);
  EXPECT_EQ(first.line, 2u);
  EXPECT_EQ(first.form, client::Form::kRowsNative);
  EXPECT_EQ(first.sequences[0].session, "a");
  EXPECT_EQ(first.sequences[0].start_pos, 7);
  EXPECT_EQ(first.sequences[0].ngram_pool, 9);
  EXPECT_EQ(steps->back().at, first.at) << "without a time: with the step before";
  EXPECT_EQ(steps->back().tokens(), 3);
  const auto again = ParseTrace("t", TraceLine(first));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(TraceLine(again->front()), TraceLine(first));
}

struct Hostile {
  std::string line;
  std::string says;
};

TEST(Trace, HostileLinesAreRefusedByLineKeyAndBound) {
  const std::string one = "{\"session\": \"a\", \"tokens\": 1}";
  const std::vector<Hostile> lines = {
      {"", "holds no step"},
      {"[]", "the line is no JSON object"},
      {"{", "the line is no JSON object"},
      {"{}", "sequences is missing"},
      {"{\"sequences\": []}", "sequences is [], expected a list of at least one"},
      {"{\"sequences\": 7}", "sequences is 7"},
      {"{\"sequences\": [7]}", "sequences[0] is 7, expected an object"},
      {"{\"sequences\": [{\"tokens\": 1}]}", "sequences[0].session is missing"},
      {"{\"sequences\": [{\"session\": \"\", \"tokens\": 1}]}", "sequences[0].session is \"\""},
      {"{\"sequences\": [{\"session\": \"a\"}]}", "sequences[0].tokens is missing"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 0}]}",
       "sequences[0].tokens is 0, expected an integer in [1, "},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": -1}]}", "sequences[0].tokens is -1"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 1.5}]}", "sequences[0].tokens is 1.5"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 18446744073709551615}]}",
       "sequences[0].tokens is 18446744073709551615"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 1, \"start_pos\": 9223372036854775807}]}",
       "sequences[0].start_pos"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 1, \"start_pos\": -1}]}", "sequences[0].start_pos is -1"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 1, \"more\": 1}]}", "\"more\" is no key of a sequence"},
      {"{\"sequences\": [" + one + ", " + one + "]}", "sequences[1].session is \"a\", expected each name once"},
      {"{\"sequences\": [{\"session\": \"a\", \"tokens\": 16777216}, {\"session\": \"b\", \"tokens\": 1}]}",
       "the sum of tokens is over 16777216"},
      {"{\"sequences\": [" + one + "], \"at_ms\": -1}", "at_ms is -1"},
      {"{\"sequences\": [" + one + "], \"at_ms\": \"now\"}", "at_ms is \"now\""},
      {"{\"sequences\": [" + one + "], \"at_ms\": 1e300}", "at_ms is 1e+300"},
      {"{\"sequences\": [" + one + "], \"form\": \"auto\"}", "form is \"auto\""},
      {"{\"sequences\": [" + one + "], \"form\": 1}", "form is 1"},
      {"{\"sequences\": [" + one + "], \"form\": \"kv,kv\"}x", "no JSON object"},
      {"{\"sequences\": [" + one + "], \"what\": 1}", "\"what\" is no key of a step"},
      {"{\"sequences\": [{\"session\": \"" + std::string(65, 'x') + "\", \"tokens\": 1}]}", "a name of 1 to 64 bytes"},
      {"{\"\\u001b[31m\": 1}", "\"\\u001b[31m\" is no key of a step"},
      {std::string(2 << 20, ' ') + "{}", "is 2097154 bytes, expected at most 1 MiB"},
      {std::string(1 << 19, '['), "no JSON object"},
      {"{\"sequences\": [{\"session\": \"\xff\", \"tokens\": 1}]}", "no JSON object"},
  };
  for (const Hostile& hostile : lines) {
    const auto steps = ParseTrace("file", hostile.line);
    ASSERT_FALSE(steps.ok()) << hostile.says;
    EXPECT_THAT(std::string(steps.status().message()), HasSubstr(hostile.says));
    EXPECT_THAT(std::string(steps.status().message()), StartsWith("file:"));
    EXPECT_LT(steps.status().message().size(), 400u);
  }
}

TEST(Trace, TimeThatGoesBackIsRefused) {
  const auto steps = ParseTrace("t",
                                "{\"at_ms\": 5, \"sequences\": [{\"session\": \"a\", \"tokens\": 1}]}\n"
                                "{\"at_ms\": 4, \"sequences\": [{\"session\": \"a\", \"tokens\": 1}]}");
  ASSERT_FALSE(steps.ok());
  EXPECT_EQ(steps.status().message(), "t:2: at_ms is 4, expected no less than the step before's, 5");
}

TEST(Trace, WhatTheServerDoesNotTakeIsToldBeforeTheRun) {
  const auto steps = ParseTrace("t", "{\"sequences\": [{\"session\": \"a\", \"tokens\": 65}]}");
  ASSERT_TRUE(steps.ok());
  const absl::Status status =
      CheckTrace("t", *steps, client::Form::kHighway, client::HighwayDtype::kF32, 2, client::SampleModel());
  EXPECT_EQ(status.message(), "t:1: 65 tokens in a call, the server takes at most 64");
}

TEST(Trace, AReplayedSequenceHasItsTokensWhoeverSendsThem) {
  const std::vector<TraceStep> steps = DecodeTrace({.steps = 5, .batch = 2});
  TraceSource one(client::SampleModel(), steps, client::Form::kKv, 3, 10);
  TraceSource other(client::SampleModel(), steps, client::Form::kKv, 3, 10);
  for (size_t i = 0; i < 12; ++i) {
    Step a, b;
    one.Next(0, &a);
    other.Next(i % 3, &b);
    ASSERT_EQ(a.sequences.size(), steps[i % 5].sequences.size());
    for (size_t s = 0; s < a.sequences.size(); ++s) {
      EXPECT_EQ(a.sequences[s].token_ids, b.sequences[s].token_ids);
      EXPECT_EQ(a.sequences[s].start_pos, steps[i % 5].sequences[s].start_pos);
      EXPECT_TRUE(a.sequences[s].session.empty());
      EXPECT_EQ(a.sequences[s].lookback.size(), 3u);
    }
  }
}

std::string FileText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Lines(const std::vector<TraceStep>& steps) {
  std::string text;
  for (const TraceStep& step : steps) text += TraceLine(step) + "\n";
  return text;
}

TEST(ShippedTraces, AreWhatMakeTraceMakesAndAreRead) {
  const std::string folder = ENGRAM_TRACES;
  EXPECT_EQ(FileText(folder + "/decode.jsonl"), Lines(DecodeTrace({.seed = 1})));
  EXPECT_EQ(FileText(folder + "/prefill.jsonl"), Lines(PrefillTrace({.seed = 2})));
  for (const char* name : {"/decode.jsonl", "/prefill.jsonl"}) {
    const auto steps = ReadTrace(folder + name);
    ASSERT_TRUE(steps.ok()) << steps.status();
    EXPECT_EQ(steps->size(), 120u);
  }
}

TEST(ShippedTraces, EachSequenceGoesOnWhereItWas) {
  for (const std::vector<TraceStep>& steps : {DecodeTrace({.steps = 500}), PrefillTrace({.steps = 500})}) {
    std::map<std::string, int64_t> next;
    for (const TraceStep& step : steps) {
      for (const TraceSequence& sequence : step.sequences) {
        const auto known = next.find(sequence.session);
        if (known != next.end()) {
          EXPECT_EQ(sequence.start_pos, known->second) << sequence.session;
        }
        next[sequence.session] = sequence.start_pos + sequence.tokens;
      }
    }
    EXPECT_GT(next.size(), 20u) << "sequences come and go";
  }
}

}  // namespace
}  // namespace engram::bench
