// Random calls against the table and against the plain model of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "server/refusal/refusal.h"
#include "server/session/session_table.h"
#include "tests/session/plain_sessions.h"

namespace engram {
namespace {

// How often each thing has happened: a walk that never leaves the path proves little.
struct Tally {
  std::map<Reason, int> refused;
  int partly_served = 0, rollbacks = 0, quiet_rewrites = 0, forks = 0, expired = 0, squeezed = 0, closed = 0;
};

class Walk {
 public:
  Walk(uint32_t seed, Tally& tally)
      : random_(seed), tally_(tally), options_(MakeOptions()), table_(options_), model_(MakeModel()) {}

  void Step() {
    now_ += absl::Seconds(Draw(0, 99) == 0 ? Draw(0, 60) : Draw(0, 2));
    if (Draw(0, 49) == 0) return Close();
    const std::string principal = Draw(0, 3) == 0 ? "q" : "p";
    std::vector<SequenceClaim> claims;
    std::vector<char> names = {'a', 'b', 'c', 'd', 'e', 'f'};
    std::shuffle(names.begin(), names.end(), random_);
    for (int64_t i = Draw(1, 4); i > 0; --i) {
      claims.push_back(MakeClaim(principal, Draw(0, 9) == 0 ? "" : std::string(1, names[static_cast<size_t>(i)])));
    }
    const bool partial_ok = Draw(0, 1) == 0;
    std::map<std::string, int64_t> lengths;
    for (const std::string& key : model_.recency()) lengths[key] = model_.LengthOf(key);
    const Expected expected = model_.Commit(principal, claims, partial_ok, now_);
    const absl::StatusOr<CommitResult> got = table_.Commit(principal, claims, partial_ok);
    ASSERT_EQ(got.ok(), expected.served) << got.status();
    if (!got.ok()) return CompareRefusal(got.status(), expected);
    CompareServed(principal, claims, *got, expected, lengths);
  }

 private:
  int64_t Draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }

  SessionOptions MakeOptions() {
    SessionOptions options;
    options.max_ngram = static_cast<int>(Draw(2, 8));
    options.window = Draw(options.max_ngram, 40);
    options.ttl = absl::Seconds(30);
    options.memory_bytes = Draw(0, 1) == 0 ? 1 << 20 : Draw(300, 3000);
    options.clock = [this] { return now_; };
    return options;
  }
  PlainModel MakeModel() const { return {options_.max_ngram, options_.window, options_.ttl}; }

  int32_t DrawId() { return static_cast<int32_t>(Draw(kMasked, 5)); }

  SequenceClaim MakeClaim(const std::string& principal, const std::string& name) {
    SequenceClaim claim;
    claim.session = name;
    std::string source = name;
    if (!name.empty() && Draw(0, 4) == 0) {
      claim.fork_from = source = std::string(1, static_cast<char>('a' + Draw(0, 5)));
      ++tally_.forks;
    }
    const std::string key = SessionTable::KeyOf(principal, source);
    const int64_t length = model_.LengthOf(key);
    claim.start_pos = Draw(0, 2) > 0 ? length : std::max<int64_t>(0, length + Draw(-12, 2));
    if (Draw(0, 19) == 0) claim.start_pos = 0;
    const PlainSession* own = model_.Find(SessionTable::KeyOf(principal, name));
    const bool repeats = own != nullptr && Draw(0, 1) == 0;  // says again what is known
    const auto id_at = [&](int64_t pos) {
      return repeats && own->known.contains(pos) && Draw(0, 30) > 0 ? own->known.at(pos) : DrawId();
    };
    claim.ids.resize(static_cast<size_t>(Draw(0, 19) == 0 ? Draw(1, 60) : Draw(1, 6)));
    for (size_t i = 0; i < claim.ids.size(); ++i) claim.ids[i] = id_at(claim.start_pos + static_cast<int64_t>(i));
    if (claim.fork_from.empty() && Draw(0, 3) == 0) {
      for (int64_t pos = claim.start_pos - options_.max_ngram + 1; pos < claim.start_pos; ++pos) {
        claim.lookback.push_back(pos < 0 ? kernels::kDead : PlainModel::Seen(id_at(pos)));
      }
    }
    if (Draw(0, 2) == 0) {
      const int64_t last = own != nullptr && own->step.has_value() ? static_cast<int64_t>(*own->step) : 5;
      claim.step = static_cast<uint64_t>(std::max<int64_t>(0, last + Draw(0, 9) - 1));
    }
    return claim;
  }

  void CompareRefusal(const absl::Status& status, const Expected& expected) {
    const RefusalDetail detail = DetailOf(status);
    size_t next = 0;
    for (size_t i = 0; i < expected.refused.size(); ++i) {
      if (!expected.refused[i].has_value()) continue;
      ASSERT_LT(next, detail.offenders.size());
      ASSERT_EQ(detail.offenders[next].reason, *expected.refused[i]) << detail.offenders[next].text;
      ASSERT_EQ(detail.offenders[next].field.find("sequences[" + std::to_string(i) + "]"), 0);
      ++next;
      ++tally_.refused[*expected.refused[i]];
    }
    ASSERT_EQ(detail.total, static_cast<int64_t>(next));
    ASSERT_EQ(table_.stats().sessions, static_cast<int64_t>(model_.size()));
  }

  void CompareServed(const std::string& principal, const std::vector<SequenceClaim>& claims, const CommitResult& got,
                     const Expected& expected, const std::map<std::string, int64_t>& lengths) {
    ASSERT_EQ(got.windows, expected.windows);
    const bool any =
        std::any_of(expected.refused.begin(), expected.refused.end(), [](auto r) { return r.has_value(); });
    ASSERT_EQ(got.refused.size(), any ? claims.size() : 0);
    tally_.partly_served += any;
    for (size_t i = 0; i < got.refused.size(); ++i) {
      ASSERT_EQ(got.refused[i].ok(), !expected.refused[i].has_value());
      if (got.refused[i].ok()) continue;
      ASSERT_EQ(DetailOf(got.refused[i]).offenders.at(0).reason, *expected.refused[i]);
    }

    std::map<std::string, int64_t> rollbacks;
    for (const Rollback& rollback : got.rollbacks) {
      ASSERT_TRUE(rollbacks.emplace(rollback.key, rollback.from).second) << "named twice";
    }
    ASSERT_EQ(rollbacks, expected.rollbacks);
    tally_.rollbacks += static_cast<int>(rollbacks.size());
    for (size_t i = 0; i < claims.size(); ++i) {
      const std::string key = SessionTable::KeyOf(principal, claims[i].session);
      tally_.quiet_rewrites += !expected.refused[i].has_value() && lengths.contains(key) && !rollbacks.contains(key) &&
                               lengths.at(key) > claims[i].start_pos;
    }

    // First those whose time is over, in the order of their last use; then the least recently used, never those
    // written.
    ASSERT_GE(got.forgotten.size(), expected.expired.size());
    for (size_t i = 0; i < got.forgotten.size(); ++i) {
      if (i < expected.expired.size()) {
        ASSERT_EQ(got.forgotten[i], expected.expired[i]);
        ++tally_.expired;
        continue;
      }
      ASSERT_EQ(got.forgotten[i], model_.recency().front());
      ASSERT_FALSE(expected.written.contains(got.forgotten[i]));
      model_.Forget(got.forgotten[i]);
      ++tally_.squeezed;
    }
    const SessionStats stats = table_.stats();
    ASSERT_EQ(stats.sessions, static_cast<int64_t>(model_.size()));
    ASSERT_TRUE(stats.bytes <= options_.memory_bytes || model_.size() == expected.written.size());
  }

  void Close() {
    const std::string principal = Draw(0, 3) == 0 ? "q" : "p";
    std::vector<std::string> names, keys;
    for (int64_t i = Draw(1, 3); i > 0; --i) names.push_back(std::string(1, static_cast<char>('a' + Draw(0, 6))));
    for (const std::string& name : names) {
      const std::string key = SessionTable::KeyOf(principal, name);
      if (model_.Find(key) != nullptr) keys.push_back(key);
      model_.Forget(key);
    }
    ASSERT_EQ(table_.Close(principal, names), keys);
    tally_.closed += static_cast<int>(keys.size());
  }

  std::mt19937 random_;
  Tally& tally_;
  absl::Time now_ = absl::UnixEpoch();
  const SessionOptions options_;
  SessionTable table_;
  PlainModel model_;
};

TEST(SessionModelTest, ThousandsOfRandomCallsAgreeWithThePlainModel) {
  Tally tally;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    Walk walk(seed, tally);
    for (int step = 0; step < 4000; ++step) {
      walk.Step();
      if (HasFatalFailure()) FAIL() << "seed " << seed << " step " << step;
    }
  }
  for (const Reason reason :
       {Reason::kStaleStep, Reason::kSessionLost, Reason::kPositionGap, Reason::kLookbackLength}) {
    EXPECT_GT(tally.refused[reason], 100) << ReasonName(reason);
  }
  EXPECT_GT(tally.partly_served, 1000);
  EXPECT_GT(tally.rollbacks, 1000);
  EXPECT_GT(tally.quiet_rewrites, 1000);
  EXPECT_GT(tally.forks, 1000);
  EXPECT_GT(tally.expired, 100);
  EXPECT_GT(tally.squeezed, 1000);
  EXPECT_GT(tally.closed, 100);
  for (const auto& [reason, count] : tally.refused) RecordProperty(std::string(ReasonName(reason)), count);
  RecordProperty("rollbacks", tally.rollbacks);
  RecordProperty("quiet_rewrites", tally.quiet_rewrites);
  RecordProperty("squeezed", tally.squeezed);
}

}  // namespace
}  // namespace engram
