// Random calls against the table and against a plain model of what it promises: a map from position to id.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "server/refusal/refusal.h"
#include "server/session/session_table.h"

namespace engram {
namespace {

constexpr int32_t kDead = kernels::kDead;

// A session as a sentence would describe it: the ids it knows, by position, consecutive.
using Known = std::map<int64_t, int32_t>;

struct Outcome {
  std::vector<int32_t> window;
  Reason refused = Reason::kLoading;
  bool ok = true;
};

class PlainModel {
 public:
  PlainModel(int n, int64_t window) : before_(n - 1), window_(window) {}

  Outcome Commit(const SequenceClaim& claim) {
    Outcome outcome;
    const auto stored = sessions_.find(claim.session);
    std::map<int64_t, int32_t> past;  // what the claim may look back on
    for (int64_t j = 1; j <= before_; ++j) {
      const int64_t pos = claim.start_pos - j;
      if (pos < 0) continue;
      if (!claim.lookback.empty()) {
        past[pos] = claim.lookback[static_cast<size_t>(before_ - j)];
        continue;
      }
      if (claim.session.empty()) return {{}, Reason::kLookbackLength, false};
      if (stored == sessions_.end()) return {{}, Reason::kSessionLost, false};
      if (!stored->second.contains(pos)) return {{}, Reason::kPositionGap, false};
      past[pos] = stored->second.at(pos);
    }
    for (int64_t j = before_; j >= 1; --j) {
      const auto known = past.find(claim.start_pos - j);
      outcome.window.push_back(known == past.end() ? kDead : known->second);
    }
    outcome.window.insert(outcome.window.end(), claim.ids.begin(), claim.ids.end());
    if (claim.session.empty()) return outcome;

    Known& known = sessions_[claim.session];
    bool agrees = true;  // all of `past` stands in `known`, with the same ids
    for (const auto& [pos, id] : past) agrees &= known.contains(pos) && known.at(pos) == id;
    // A session without positions up to start_pos (a birth, or a look-back into the blue) begins with the look-back.
    if (!agrees || (claim.start_pos == 0 && !known.contains(0))) known = past;
    known.erase(known.lower_bound(claim.start_pos), known.end());
    for (size_t i = 0; i < claim.ids.size(); ++i) known[claim.start_pos + static_cast<int64_t>(i)] = claim.ids[i];
    // The window, and what a repetition of this call needs.
    while (static_cast<int64_t>(known.size()) > window_ && known.begin()->first < claim.start_pos - before_) {
      known.erase(known.begin());
    }
    return outcome;
  }

  int64_t LengthOf(const std::string& session) const {
    const auto found = sessions_.find(session);
    return found == sessions_.end() || found->second.empty() ? 0 : found->second.rbegin()->first + 1;
  }

 private:
  const int64_t before_;
  const int64_t window_;
  std::map<std::string, Known> sessions_;
};

TEST(SessionModelTest, ThousandsOfRandomCallsAgreeWithThePlainModel) {
  for (const uint32_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    std::mt19937 random(seed);
    const auto draw = [&random](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    SessionOptions options;
    options.max_ngram = static_cast<int>(draw(2, 8));
    options.window = draw(options.max_ngram, 40);
    SessionTable table(options);
    PlainModel model(options.max_ngram, options.window);
    int refused = 0;
    for (int step = 0; step < 5000; ++step) {
      SequenceClaim claim;
      if (draw(0, 9) > 0) claim.session = std::string(1, static_cast<char>('a' + draw(0, 4)));
      const int64_t length = model.LengthOf(claim.session);
      claim.start_pos = draw(0, 3) > 0 ? length : std::max<int64_t>(0, length + draw(-12, 3));
      claim.ids.resize(static_cast<size_t>(draw(1, 6)));
      for (int32_t& id : claim.ids) id = static_cast<int32_t>(draw(kDead, 9));
      if (draw(0, 4) == 0) {
        claim.lookback.resize(static_cast<size_t>(options.max_ngram - 1));
        for (size_t i = 0; i < claim.lookback.size(); ++i) {
          const int64_t pos = claim.start_pos - static_cast<int64_t>(claim.lookback.size() - i);
          claim.lookback[i] = pos < 0 ? kDead : static_cast<int32_t>(draw(kDead, 9));
        }
      }
      const Outcome expected = model.Commit(claim);
      const absl::StatusOr<std::vector<int32_t>> got = table.Commit("p", {claim});
      ASSERT_EQ(got.ok(), expected.ok) << "seed " << seed << " step " << step << ": " << got.status();
      if (got.ok()) {
        ASSERT_EQ(*got, expected.window) << "seed " << seed << " step " << step;
      } else {
        ASSERT_EQ(DetailOf(got.status()).offenders.at(0).reason, expected.refused)
            << "seed " << seed << " step " << step;
        ++refused;
      }
    }
    EXPECT_GT(refused, 50) << "the walk never left the path: it proves little";
  }
}

}  // namespace
}  // namespace engram
