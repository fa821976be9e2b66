// The ring under a session's history.
#include "server/session/history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <vector>

namespace engram {
namespace {

TEST(HistoryTest, TheRingAgreesWithADequeAndNeverHoldsMuchMoreThanItKeeps) {
  for (const int64_t window : {1, 3, 7, 64, 1000}) {
    std::mt19937 random(static_cast<uint32_t>(window));
    const auto draw = [&random](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    History history(5);
    std::deque<int32_t> plain;
    int64_t base = 5;
    for (int step = 0; step < 3000; ++step) {
      if (draw(0, 3) == 0) {
        const int64_t length = draw(base, base + static_cast<int64_t>(plain.size()));
        plain.resize(static_cast<size_t>(length - base));
        if (draw(0, 1) == 0) history = history.Prefix(length);
        history.Truncate(length);
      }
      std::vector<int32_t> ids(static_cast<size_t>(draw(0, 9) == 0 ? draw(1, 2 * window + 9) : 1));
      for (int32_t& id : ids) id = static_cast<int32_t>(draw(-2, 1000));
      history.Append(ids, window);
      plain.insert(plain.end(), ids.begin(), ids.end());
      for (; static_cast<int64_t>(plain.size()) > window; ++base) plain.pop_front();
      ASSERT_EQ(history.base(), base);
      ASSERT_EQ(history.size(), static_cast<int64_t>(plain.size()));
      for (size_t i = 0; i < plain.size(); ++i) ASSERT_EQ(history.at(base + static_cast<int64_t>(i)), plain[i]);
      ASSERT_LE(history.bytes(), 4 * window);
      ASSERT_LE(history.bytes(), 4 * (2 * history.size() + 8));
    }
  }
}

TEST(HistoryTest, AppendingOneAtATimeHoldsAnEighthMoreAtTheMost) {
  History history;
  for (int32_t id = 0; id < 100'000; ++id) {
    history.Append({id}, 8192);
    ASSERT_LE(history.bytes(), 4 * (history.size() + std::max<int64_t>(8, history.size() / 8)));
  }
  EXPECT_EQ(history.bytes(), 4 * 8192);
}

}  // namespace
}  // namespace engram
