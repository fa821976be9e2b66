#include "tests/api_model/walk.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>

namespace engram {
namespace {

// Without highways, which nobody reads.
std::string Text(const Planned& planned) {
  v1::StreamRequest request = planned.request;
  for (v1::LayerInput& layer : *request.mutable_apply()->mutable_layers()) {
    layer.set_highway(std::to_string(layer.highway().size()) + " bytes");
  }
  const bool apply = planned.request.has_apply();
  return "stream " + std::to_string(planned.stream) + ": " +
         (apply ? request : planned.request).ShortDebugString().substr(0, 2000);
}

std::string KindOf(const v1::StreamRequest& request) {
  switch (request.request_case()) {
    case v1::StreamRequest::kApply:
      return std::string(request.apply().ticket().empty() ? "Apply " : "Apply by ticket ") +
             v1::Form_Name(request.apply().form());
    case v1::StreamRequest::kLookup:
      return std::string(!request.lookup().ticket().empty()    ? "Lookup by ticket "
                         : !request.lookup().row_ids().empty() ? "Lookup by row ids "
                                                               : "Lookup ") +
             v1::Form_Name(request.lookup().form());
    case v1::StreamRequest::kPrepare:
      return "Prepare";
    case v1::StreamRequest::kRelease:
      return "Release";
    case v1::StreamRequest::kCloseSessions:
      return "CloseSessions";
    default:
      return "";
  }
}

void ExpectSameLayers(const std::vector<v1::LayerOutput>& got, const std::vector<v1::LayerOutput>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t l = 0; l < got.size(); ++l) {
    ASSERT_EQ(got[l].layer_id(), expected[l].layer_id());
    const auto same = [](const std::string& a, const std::string& b) {
      return a == b ? testing::AssertionSuccess()
                    : testing::AssertionFailure() << a.size() << " bytes got, " << b.size() << " expected";
    };
    ASSERT_TRUE(same(got[l].highway(), expected[l].highway())) << "highway of layer " << got[l].layer_id();
    ASSERT_TRUE(same(got[l].kv(), expected[l].kv())) << "kv of layer " << got[l].layer_id();
    ASSERT_TRUE(same(got[l].gates(), expected[l].gates())) << "gates of layer " << got[l].layer_id();
    ASSERT_TRUE(same(got[l].value(), expected[l].value())) << "value of layer " << got[l].layer_id();
    ASSERT_TRUE(same(got[l].rows(), expected[l].rows())) << "rows of layer " << got[l].layer_id();
  }
}

}  // namespace

Walk::Walk(uint32_t seed, PlainCompute& compute, WalkOptions options, ApiDriver& driver, Tally& tally)
    : tally_(tally),
      options_(options),
      plain_(compute, options.plain),
      calls_(seed, plain_, options.calls),
      driver_(driver) {}

void Walk::EndStream() {
  const auto stream = static_cast<uint64_t>(calls_.Draw(1, static_cast<int64_t>(options_.calls.streams)));
  std::string one;
  for (const PlainTicket& ticket : plain_.tickets().all()) {
    if (ticket.alive && ticket.stream == stream) one = ticket.name;
  }
  plain_.tickets().BeginBurst(++bursts_);
  plain_.tickets().EndStream(stream);
  driver_.EndStream(stream, one);
}

void Walk::Step() {
  if (options_.longest_wait > absl::ZeroDuration() && calls_.OnceIn(8)) {
    now_ += options_.longest_wait * (static_cast<double>(calls_.Draw(0, 100)) / 100);
  }
  if (options_.calls.streams > 0 && calls_.OnceIn(60)) return EndStream();
  const auto stream = static_cast<uint64_t>(calls_.Draw(0, static_cast<int64_t>(options_.calls.streams)));
  const int64_t count = stream == 0 ? 1 : calls_.Draw(1, options_.longest_burst);
  plain_.tickets().Expire(now_);  // of the burst before: nothing of this one may see it
  plain_.tickets().BeginBurst(++bursts_);
  plain_.tickets().Forget();
  std::vector<Planned> planned;
  std::vector<ExpectedReply> expected;
  for (int64_t i = 0; i < count; ++i) {
    planned.push_back(calls_.Next(stream));
    expected.push_back(plain_.Run(planned.back(), now_));
  }
  tally_.bursts += count > 1;
  std::vector<Reply> got = driver_.Run(planned);
  if (testing::Test::HasFatalFailure()) return;
  ASSERT_EQ(got.size(), planned.size());
  for (size_t i = 0; i < planned.size(); ++i) {
    SortLayers(got[i]);
    Check(planned[i], expected[i], got[i]);
    if (testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << "call " << i + 1 << " of " << count << ": " << Text(planned[i]);
      return;
    }
    if (expected[i].made != nullptr) expected[i].made->name = got[i].ticket;
  }
}

void Walk::Check(const Planned& planned, const ExpectedReply& expected, const Reply& got) {
  const Reply& reply = expected.reply;
  const std::string expired(ReasonName(Reason::kTicketExpired));
  if (expected.used != nullptr && plain_.tickets().DiedInThisBurst(*expected.used) && got.reason == expired) {
    ++tally_.gone_tickets;
    return;
  }
  ASSERT_EQ(got.reason, reply.reason);
  ++tally_.answered[KindOf(planned.request)];
  if (!reply.reason.empty()) {
    ++tally_.refused[reply.reason];
    return;
  }
  ASSERT_EQ(got.statuses, reply.statuses);
  size_t refused = 0;
  for (const std::string& reason : reply.statuses) {
    refused += !reason.empty();
    if (!reason.empty()) ++tally_.refused[reason];
  }
  tally_.partly_served += refused > 0 && refused < reply.statuses.size();
  tally_.none_served += refused > 0 && refused == reply.statuses.size();
  ExpectSameLayers(got.layers, reply.layers);
  if (testing::Test::HasFatalFailure()) return;
  ASSERT_EQ(got.closed, reply.closed);
  ASSERT_GE(got.released, reply.released);
  ASSERT_LE(got.released, reply.released + expected.release_slack);
  ASSERT_EQ(got.ticket.empty(), expected.made == nullptr);
}

bool WalkSeeds(uint32_t seeds, int64_t steps, const std::function<void(uint32_t seed, int64_t steps)>& walk_seed) {
  const char* seed_text = std::getenv("ENGRAM_MODEL_TEST_SEED");
  const char* steps_text = std::getenv("ENGRAM_MODEL_TEST_STEPS");
  uint32_t first = 1;
  if (seed_text != nullptr) {
    first = static_cast<uint32_t>(std::strtoul(seed_text, nullptr, 10));
    seeds = 1;
  }
  if (steps_text != nullptr) steps = std::strtoll(steps_text, nullptr, 10);
  for (uint32_t seed = first; seed < first + seeds; ++seed) {
    walk_seed(seed, steps);
    if (testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << "again with ENGRAM_MODEL_TEST_SEED=" << seed << " ENGRAM_MODEL_TEST_STEPS=" << steps;
      break;
    }
  }
  return seed_text == nullptr && steps_text == nullptr;
}

void ExpectWellTravelled(const Tally& tally) {
  const auto met = [](const std::map<std::string, int>& counts, const std::string& key) {
    const auto found = counts.find(key);
    return found == counts.end() ? 0 : found->second;
  };
  for (const Reason reason :
       {Reason::kEmptyCall, Reason::kTokenOutOfRange, Reason::kTokenMaskLength, Reason::kLookbackLength,
        Reason::kDuplicateSession, Reason::kPositionLimit, Reason::kSessionLength, Reason::kHighwaySize,
        Reason::kLayerUnknown, Reason::kDigestMismatch, Reason::kSlice, Reason::kForm, Reason::kRowOutOfRange,
        Reason::kPositionGap, Reason::kStaleStep, Reason::kSessionLost, Reason::kTicketExpired}) {
    EXPECT_GE(met(tally.refused, std::string(ReasonName(reason))), 3) << ReasonName(reason);
  }
  for (const char* kind :
       {"Apply FORM_HIGHWAY", "Apply FORM_KV", "Apply FORM_UPDATE", "Apply FORM_GATE", "Apply by ticket FORM_HIGHWAY",
        "Apply by ticket FORM_KV", "Apply by ticket FORM_UPDATE", "Apply by ticket FORM_GATE", "Lookup FORM_KV",
        "Lookup FORM_ROWS_NATIVE", "Lookup FORM_ROWS_BF16", "Lookup by ticket FORM_KV",
        "Lookup by ticket FORM_ROWS_BF16", "Lookup by row ids FORM_KV", "Lookup by row ids FORM_ROWS_NATIVE", "Prepare",
        "Release", "CloseSessions"}) {
    EXPECT_GE(met(tally.answered, kind), 20) << kind;
  }
  EXPECT_GE(tally.partly_served, 20);
  EXPECT_GE(tally.none_served, 5);
}

}  // namespace engram
