#include "server/engine/ticket_store.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "server/refusal/refusal.h"

namespace engram {
namespace {

class TicketStoreTest : public ::testing::Test {
 protected:
  TicketOptions Options() {
    TicketOptions options;
    options.epoch = 7;
    options.memory_bytes = 100;
    options.ttl = absl::Seconds(10);
    options.clock = [this] { return now_; };
    return options;
  }

  static std::shared_ptr<Prepared> Result(int64_t tokens, const std::vector<int>& layers) {
    auto prepared = std::make_shared<Prepared>();
    prepared->tokens = tokens;
    for (const int layer : layers) prepared->layers.push_back({layer, {}});
    return prepared;
  }

  std::string Make(int64_t bytes, std::vector<TicketSpan> spans = {}, uint64_t stream = 0) {
    absl::StatusOr<std::string> ticket = store_.Reserve("p", bytes, stream);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    store_.Bind(*ticket, std::move(spans));
    store_.Fill(*ticket, Result(4, {0, 1}));
    return *ticket;
  }

  bool Good(const std::string& ticket) const { return store_.Get("p", ticket).ok(); }

  absl::Time now_ = absl::UnixEpoch();
  TicketStore store_{Options()};
};

TEST_F(TicketStoreTest, AFilledTicketAnswersAnyNumberOfTimesAndOnlyItsPrincipal) {
  const std::string ticket = Make(10);
  EXPECT_EQ(ticket.size(), 24);
  EXPECT_TRUE(Good(ticket));
  EXPECT_TRUE(Good(ticket));
  EXPECT_FALSE(store_.Get("other", ticket).ok());
  EXPECT_FALSE(store_.Release("other", ticket));
}

TEST_F(TicketStoreTest, WhatIsNoTicketIsExpired) {
  const std::string ticket = Make(10);
  std::string forged = ticket;
  forged[20] = static_cast<char>(forged[20] + 1);
  for (const std::string& bad : {std::string(), std::string("x"), forged, ticket.substr(0, 23), ticket + "x"}) {
    const absl::Status status = store_.Get("p", bad).status();
    EXPECT_EQ(DetailOf(status).offenders.at(0).reason, Reason::kTicketExpired);
  }
}

TEST_F(TicketStoreTest, AnUnfilledTicketAnswersNothing) {
  const std::string ticket = *store_.Reserve("p", 10, 0);
  EXPECT_FALSE(Good(ticket));
}

TEST_F(TicketStoreTest, TtlReleaseAndEndOfStreamEndIt) {
  const std::string old = Make(10);
  now_ += absl::Seconds(6);
  const std::string released = Make(10), streamed = Make(10, {}, 5), other_stream = Make(10, {}, 6);
  EXPECT_TRUE(store_.Release("p", released));
  EXPECT_FALSE(store_.Release("p", released));
  store_.EndStream(5);
  EXPECT_FALSE(Good(released));
  EXPECT_FALSE(Good(streamed));
  EXPECT_TRUE(Good(other_stream));
  EXPECT_TRUE(Good(old));
  now_ += absl::Seconds(5);
  EXPECT_FALSE(Good(old));
  EXPECT_TRUE(Good(other_stream));
  EXPECT_EQ(store_.stats().tickets, 1);
  EXPECT_EQ(store_.stats().bytes, 10);
}

TEST_F(TicketStoreTest, ARollbackBelowItsPositionsEndsItAndOneBehindThemDoesNot) {
  const std::string ticket = Make(10, {{"s", 20}, {"t", 5}});
  store_.RollBack("s", 20);
  store_.RollBack("t", 5);
  store_.RollBack("u", 0);
  EXPECT_TRUE(Good(ticket));
  store_.RollBack("s", 19);
  EXPECT_FALSE(Good(ticket));
}

// ATOM #2185: a dropped request raced with the prefetch that refilled its entry.
TEST_F(TicketStoreTest, AResultOfARolledBackTicketNeverComesToLife) {
  const std::string ticket = *store_.Reserve("p", 10, 0);
  store_.Bind(ticket, {{"s", 20}});
  store_.RollBack("s", 3);
  store_.Fill(ticket, Result(4, {0}));
  EXPECT_FALSE(Good(ticket));
  EXPECT_EQ(store_.stats().bytes, 0);
}

TEST_F(TicketStoreTest, ASliceAppliedTwiceIsNotTheWhole) {
  const std::string retried = Make(100);
  for (const int layer : {0, 1}) {
    store_.Applied(retried, layer, 0, 2);
    store_.Applied(retried, layer, 0, 2);
  }
  EXPECT_FALSE(store_.Reserve("p", 10, 0).ok());
  EXPECT_TRUE(Good(retried)) << "its other half is still to come";
  for (const int layer : {0, 1}) store_.Applied(retried, layer, 1, 3);
  EXPECT_TRUE(store_.Reserve("p", 10, 0).ok());
  EXPECT_FALSE(Good(retried));
}

TEST_F(TicketStoreTest, UnderPressureFullyAppliedOnesGoFirstThenPrepareIsRefused) {
  const std::string fresh = Make(40), half = Make(30), used = Make(30);
  store_.Applied(half, 0, 0, 4);
  for (const int layer : {0, 1}) {
    store_.Applied(used, layer, 0, 2);
    store_.Applied(used, layer, 2, 2);
  }
  const std::string next = Make(25);
  EXPECT_FALSE(Good(used));
  EXPECT_TRUE(Good(half));
  EXPECT_TRUE(Good(fresh));
  const absl::Status full = store_.Reserve("p", 10, 0).status();
  EXPECT_EQ(DetailOf(full).offenders.at(0).reason, Reason::kPrepareFull);
  EXPECT_TRUE(Good(next));
}

TEST_F(TicketStoreTest, ManyThreadsLeaveNothingBehind) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 500; ++i) {
        const absl::StatusOr<std::string> ticket = store_.Reserve("p", 10, static_cast<uint64_t>(1 + t));
        if (!ticket.ok()) continue;
        store_.Bind(*ticket, {{"s", 9}});
        store_.Fill(*ticket, Result(1, {0}));
        (void)store_.Get("p", *ticket).ok();
        if (i % 3 == 0) store_.RollBack("s", 0);
        if (i % 3 == 1) store_.Release("p", *ticket);
        if (i % 3 == 2) store_.EndStream(static_cast<uint64_t>(1 + t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  store_.RollBack("s", 0);
  EXPECT_EQ(store_.stats().tickets, 0);
  EXPECT_EQ(store_.stats().bytes, 0);
}

}  // namespace
}  // namespace engram
