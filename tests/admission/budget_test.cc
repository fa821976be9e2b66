#include "server/admission/budget.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "server/refusal/refusal.h"

namespace engram {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

Reason ReasonOf(const absl::StatusOr<Permit>& permit) { return DetailOf(permit.status()).offenders.at(0).reason; }

TEST(BudgetTest, ADroppedPermitGivesEverythingBack) {
  Budget budget({.max_tokens = 10, .max_bytes = 100});
  {
    const absl::StatusOr<Permit> permit = budget.Admit({.tokens = 10, .bytes = 100});
    ASSERT_TRUE(permit.ok());
    EXPECT_EQ(budget.taken().tokens, 10);
    EXPECT_EQ(ReasonOf(budget.Admit({.tokens = 1, .bytes = 0})), Reason::kQueueFull);
    EXPECT_EQ(ReasonOf(budget.Admit({.tokens = 0, .bytes = 1})), Reason::kQueueFull);
  }
  EXPECT_EQ(budget.taken().tokens, 0);
  EXPECT_EQ(budget.taken().bytes, 0);
  EXPECT_TRUE(budget.Admit({.tokens = 10, .bytes = 100}).ok());
}

TEST(BudgetTest, AMovedPermitGivesBackOnce) {
  Budget budget({.max_tokens = 10, .max_bytes = 100});
  Permit held;
  {
    absl::StatusOr<Permit> permit = budget.Admit({.tokens = 4, .bytes = 4});
    ASSERT_TRUE(permit.ok());
    held = *std::move(permit);
    Permit moved = std::move(held);
    held = std::move(moved);
  }
  EXPECT_EQ(budget.taken().tokens, 4);
  held = Permit();
  EXPECT_EQ(budget.taken().tokens, 0);
}

// A client that does not read its reply must not keep others out of the queue.
TEST(BudgetTest, TokensGoBackWhenComputedAndBytesWhenSent) {
  Budget budget({.max_tokens = 10, .max_bytes = 100});
  {
    absl::StatusOr<Permit> permit = budget.Admit({.tokens = 10, .bytes = 60});
    ASSERT_TRUE(permit.ok());
    permit->GiveBackTokens();
    permit->GiveBackTokens();
    EXPECT_EQ(budget.taken().tokens, 0);
    EXPECT_EQ(budget.taken().bytes, 60);
    EXPECT_TRUE(budget.Admit({.tokens = 10, .bytes = 40}).ok());
  }
  EXPECT_EQ(budget.taken().tokens, 0);
  EXPECT_EQ(budget.taken().bytes, 0);
}

TEST(BudgetTest, WhatNeverFitsIsSaidToNeverFit) {
  Budget budget({.max_tokens = 10, .max_bytes = 100});
  EXPECT_EQ(ReasonOf(budget.Admit({.tokens = 11, .bytes = 0})), Reason::kTooManyTokens);
  EXPECT_EQ(ReasonOf(budget.Admit({.tokens = 1, .bytes = 101})), Reason::kMessageBytes);
}

TEST(BudgetTest, HugeCostsDoNotWrap) {
  Budget budget({.max_tokens = kMax, .max_bytes = kMax});
  const absl::StatusOr<Permit> permit = budget.Admit({.tokens = kMax - 1, .bytes = kMax - 1});
  ASSERT_TRUE(permit.ok());
  EXPECT_EQ(ReasonOf(budget.Admit({.tokens = kMax, .bytes = 1})), Reason::kQueueFull);
}

TEST(BudgetTest, ClosedAdmitsNothingButPermitsOutStayGood) {
  Budget budget({.max_tokens = 10, .max_bytes = 100});
  const absl::StatusOr<Permit> permit = budget.Admit({.tokens = 4, .bytes = 4});
  budget.Close();
  EXPECT_EQ(ReasonOf(budget.Admit({.tokens = 1, .bytes = 1})), Reason::kDraining);
  EXPECT_EQ(budget.taken().tokens, 4);
}

TEST(BudgetTest, ManyThreadsNeverTakeMoreThanThereIs) {
  Budget budget({.max_tokens = 7, .max_bytes = 700});
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&budget] {
      for (int i = 0; i < 2000; ++i) {
        const absl::StatusOr<Permit> permit = budget.Admit({.tokens = 1 + i % 3, .bytes = 100});
        EXPECT_LE(budget.taken().tokens, 7);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.taken().tokens, 0);
}

}  // namespace
}  // namespace engram
