// A small table with a clock that only the test moves, and calls to it in few words.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "server/refusal/refusal.h"
#include "server/session/session_table.h"

namespace engram {

using Ids = std::vector<int32_t>;

inline constexpr int32_t kDead = kernels::kDead;

// The reason of a refusal; kLoading, which no session gives, where it is none.
inline Reason ReasonOf(const absl::Status& status) {
  const RefusalDetail detail = DetailOf(status);
  return detail.offenders.empty() ? Reason::kLoading : detail.offenders.front().reason;
}

inline SequenceClaim Fork(std::string child, std::string parent, int64_t start, Ids ids) {
  return {std::move(child), start, std::move(ids), {}, {}, std::move(parent)};
}

class SessionTableTest : public ::testing::Test {
 protected:
  SessionOptions Options() {
    SessionOptions options;
    options.max_ngram = 4;
    options.window = 64;
    options.clock = [this] { return now_; };
    return options;
  }

  absl::StatusOr<CommitResult> Call(const std::vector<SequenceClaim>& claims, bool partial_ok = false) {
    return table_.Commit("p", claims, partial_ok);
  }

  // Commits one sequence; its window, or the refusal.
  absl::StatusOr<Ids> Commit(const std::string& session, int64_t start, Ids ids, Ids lookback = {}) {
    return WindowOf({session, start, std::move(ids), std::move(lookback)});
  }
  absl::StatusOr<Ids> WindowOf(const SequenceClaim& claim) {
    absl::StatusOr<CommitResult> result = Call({claim});
    if (!result.ok()) return result.status();
    return result->windows;
  }

  // Commits one sequence; where it is rolled back from, -1 where nowhere, -2 where the call is refused.
  int64_t RolledBack(const SequenceClaim& claim) {
    const absl::StatusOr<CommitResult> result = Call({claim});
    if (!result.ok()) return -2;
    if (result->rollbacks.empty()) return -1;
    EXPECT_EQ(result->rollbacks.size(), 1);
    EXPECT_EQ(result->rollbacks[0].key, SessionTable::KeyOf("p", claim.session));
    return result->rollbacks[0].from;
  }

  absl::Time now_ = absl::UnixEpoch();
  SessionTable table_{Options()};
};

}  // namespace engram
