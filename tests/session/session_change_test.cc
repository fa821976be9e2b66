// What a call does to histories besides appending: forks, steps, rollbacks, masks, partial_ok, closing.
#include "tests/session/session_fixture.h"

namespace engram {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kNowhere = -1;

std::string Key(const std::string& session) { return SessionTable::KeyOf("p", session); }

// --- fork_from

TEST_F(SessionTableTest, AForkContinuesItsParentsHistoryAndMayRewindIntoIt) {
  ASSERT_TRUE(Commit("parent", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_THAT(*WindowOf(Fork("child", "parent", 5, {6})), ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(*Commit("child", 6, {7}), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(*Commit("child", 2, {9}), ElementsAre(kDead, 1, 2, 9));
  EXPECT_THAT(*Commit("parent", 5, {8}), ElementsAre(3, 4, 5, 8)) << "the parent is its own";
}

TEST_F(SessionTableTest, AForkTakesNothingFromStartPosOn) {
  ASSERT_TRUE(Commit("parent", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_THAT(*WindowOf(Fork("child", "parent", 3, {9})), ElementsAre(1, 2, 3, 9));
  EXPECT_EQ(ReasonOf(Commit("child", 5, {6}).status()), Reason::kPositionGap);
}

TEST_F(SessionTableTest, AForkSeesItsParentAsItWasBeforeTheCallInEitherOrder) {
  ASSERT_TRUE(Commit("parent", 0, {1, 2, 3, 4}).ok());
  const absl::StatusOr<CommitResult> result =
      Call({Fork("before", "parent", 4, {5}), {"parent", 2, {8}, {}}, Fork("after", "parent", 4, {6})});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->windows, ElementsAre(2, 3, 4, 5, kDead, 1, 2, 8, 2, 3, 4, 6));
  EXPECT_THAT(*Commit("before", 5, {0}), ElementsAre(3, 4, 5, 0));
  EXPECT_THAT(*Commit("after", 5, {0}), ElementsAre(3, 4, 6, 0));
  EXPECT_THAT(*Commit("parent", 3, {0}), ElementsAre(1, 2, 8, 0));
}

TEST_F(SessionTableTest, TwoSessionsMaySwapTheirHistoriesInOneCall) {
  ASSERT_TRUE(Commit("a", 0, {1, 2, 3}).ok());
  ASSERT_TRUE(Commit("b", 0, {7, 8, 9}).ok());
  ASSERT_TRUE(Call({Fork("a", "b", 3, {4}), Fork("b", "a", 3, {4})}).ok());
  EXPECT_THAT(*Commit("a", 4, {0}), ElementsAre(8, 9, 4, 0));
  EXPECT_THAT(*Commit("b", 4, {0}), ElementsAre(2, 3, 4, 0));
}

TEST_F(SessionTableTest, AForkOfAnUnknownParentIsLostAndNamesTheField) {
  ASSERT_TRUE(Commit("child", 0, {1}).ok());
  const absl::Status lost = WindowOf(Fork("child", "nobody", 1, {2})).status();
  EXPECT_EQ(ReasonOf(lost), Reason::kSessionLost);
  EXPECT_EQ(DetailOf(lost).offenders.at(0).field, "sequences[0].fork_from");
  EXPECT_EQ(ReasonOf(WindowOf(Fork("x", "nobody", 0, {2})).status()), Reason::kSessionLost) << "at 0 too";
}

TEST_F(SessionTableTest, AForkOfASiblingBornInTheSameCallIsLost) {
  EXPECT_EQ(ReasonOf(Call({{"parent", 0, {1}, {}}, Fork("child", "parent", 1, {2})}).status()), Reason::kSessionLost);
  EXPECT_EQ(table_.stats().sessions, 0);
}

TEST_F(SessionTableTest, AForkOnGroundItsParentDoesNotKnowIsAGapNotAPad) {
  ASSERT_TRUE(Commit("parent", 100, {4, 5, 6}, {1, 2, 3}).ok());  // knows [97, 103)
  EXPECT_EQ(ReasonOf(WindowOf(Fork("child", "parent", 104, {9})).status()), Reason::kPositionGap);
  const absl::Status gap = WindowOf(Fork("child", "parent", 99, {9})).status();
  EXPECT_EQ(ReasonOf(gap), Reason::kPositionGap);
  EXPECT_THAT(std::string(gap.message()),
              AllOf(HasSubstr("sequences[0].start_pos"), HasSubstr("to fork from knows positions [97, 103)")));
  EXPECT_THAT(*WindowOf(Fork("child", "parent", 100, {9})), ElementsAre(1, 2, 3, 9));
}

TEST_F(SessionTableTest, AForkAtZeroIsABirthAtZero) {
  ASSERT_TRUE(Commit("parent", 100, {4}, {1, 2, 3}).ok());
  EXPECT_THAT(*WindowOf(Fork("child", "parent", 0, {9})), ElementsAre(kDead, kDead, kDead, 9));
  EXPECT_THAT(*Commit("child", 1, {8}), ElementsAre(kDead, kDead, 9, 8));
}

TEST_F(SessionTableTest, AForkIntoAnExistingSessionReplacesItsHistory) {
  ASSERT_TRUE(Commit("parent", 0, {1, 2, 3, 4}).ok());
  ASSERT_TRUE(Commit("child", 0, {1, 2, 9, 9, 9, 9}).ok());
  EXPECT_EQ(RolledBack(Fork("child", "parent", 4, {5})), 2);
  EXPECT_THAT(*Commit("child", 5, {0}), ElementsAre(3, 4, 5, 0));
  EXPECT_EQ(RolledBack(Fork("child", "parent", 4, {5})), 5) << "only what lay behind";
  EXPECT_EQ(RolledBack(Fork("child", "parent", 4, {5})), kNowhere) << "a retry";
}

TEST_F(SessionTableTest, ASessionForkedFromItselfIsMerelyContinued) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4}).ok());
  EXPECT_EQ(RolledBack(Fork("s", "s", 3, {9})), 3);
  EXPECT_THAT(*Commit("s", 4, {0}), ElementsAre(2, 3, 9, 0));
  EXPECT_EQ(ReasonOf(WindowOf(Fork("new", "new", 0, {1})).status()), Reason::kSessionLost);
}

TEST_F(SessionTableTest, AForkKeepsItsParentInUse) {
  ASSERT_TRUE(Commit("parent", 0, {1}).ok());
  for (int i = 0; i < 5; ++i) {
    now_ += absl::Seconds(400);
    ASSERT_TRUE(WindowOf(Fork("child", "parent", 1, {2})).ok()) << i;
  }
}

TEST_F(SessionTableTest, AForkWithLookbackOrWithoutASessionHeedsNotTheFork) {
  EXPECT_THAT(*WindowOf({"s", 5, {4}, {1, 2, 3}, {}, "nobody"}), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(ReasonOf(WindowOf({"", 5, {4}, {}, {}, "s"}).status()), Reason::kLookbackLength);
}

// --- step

TEST_F(SessionTableTest, ALowerStepIsStaleAndAnEqualOneIsARetry) {
  ASSERT_TRUE(WindowOf({"s", 0, {1, 2}, {}, 7}).ok());
  const absl::Status stale = WindowOf({"s", 2, {91}, {}, 6}).status();
  EXPECT_EQ(ReasonOf(stale), Reason::kStaleStep);
  EXPECT_EQ(stale.code(), absl::StatusCode::kFailedPrecondition);
  const Offender offender = DetailOf(stale).offenders.at(0);
  EXPECT_EQ(offender.field, "sequences[0].step");
  EXPECT_EQ(offender.value, "6");
  EXPECT_EQ(offender.bound, ">= 7");
  EXPECT_THAT(*WindowOf({"s", 0, {1, 2}, {}, 7}), ElementsAre(kDead, kDead, kDead, 1, 2));
  EXPECT_THAT(*WindowOf({"s", 2, {3}, {}, 8}), ElementsAre(kDead, 1, 2, 3)) << "91 must not be there";
}

TEST_F(SessionTableTest, AReorderedCallCannotResurrectDraftsByAnyKindOfBirth) {
  ASSERT_TRUE(Commit("parent", 0, {1, 2, 3}).ok());
  ASSERT_TRUE(WindowOf({"s", 0, {1, 2, 3}, {}, 5}).ok());
  EXPECT_EQ(ReasonOf(WindowOf({"s", 0, {9}, {}, 4}).status()), Reason::kStaleStep);
  EXPECT_EQ(ReasonOf(WindowOf({"s", 3, {9}, {1, 2, 3}, 4}).status()), Reason::kStaleStep);
  SequenceClaim fork = Fork("s", "parent", 3, {9});
  fork.step = 4;
  EXPECT_EQ(ReasonOf(WindowOf(fork).status()), Reason::kStaleStep);
}

TEST_F(SessionTableTest, ACallWithoutAStepLeavesTheLastOne) {
  ASSERT_TRUE(WindowOf({"s", 0, {1}, {}, 5}).ok());
  ASSERT_TRUE(Commit("s", 0, {1}).ok());
  EXPECT_EQ(ReasonOf(WindowOf({"s", 1, {2}, {}, 4}).status()), Reason::kStaleStep);
}

TEST_F(SessionTableTest, ARefusedCallDoesNotRaiseTheStep) {
  ASSERT_TRUE(WindowOf({"s", 0, {1}, {}, 5}).ok());
  EXPECT_EQ(ReasonOf(WindowOf({"s", 9, {1}, {}, 50}).status()), Reason::kPositionGap);
  EXPECT_TRUE(WindowOf({"s", 1, {2}, {}, 6}).ok());
}

TEST_F(SessionTableTest, AForkDoesNotInheritTheStep) {
  ASSERT_TRUE(WindowOf({"parent", 0, {1}, {}, 5}).ok());
  SequenceClaim fork = Fork("child", "parent", 1, {2});
  fork.step = 1;
  EXPECT_TRUE(WindowOf(fork).ok());
}

TEST_F(SessionTableTest, AClosedSessionForgetsItsStep) {
  ASSERT_TRUE(WindowOf({"s", 0, {1}, {}, 5}).ok());
  EXPECT_THAT(table_.Close("p", {"s"}), SizeIs(1));
  EXPECT_TRUE(WindowOf({"s", 0, {1}, {}, 0}).ok());
}

TEST_F(SessionTableTest, StepsReachTheWholeRange) {
  ASSERT_TRUE(WindowOf({"s", 0, {1}, {}, ~uint64_t{0}}).ok());
  EXPECT_EQ(ReasonOf(WindowOf({"s", 0, {1}, {}, ~uint64_t{0} - 1}).status()), Reason::kStaleStep);
}

// --- rollbacks

TEST_F(SessionTableTest, BirthAppendingAndRewritingTheSameIsNoRollback) {
  EXPECT_EQ(RolledBack({"s", 0, {1, 2, 3}, {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 3, {4, 5}, {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 3, {4, 5}, {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 4, {5}, {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 4, {5}, {2, 3, 4}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 0, {1, 2, 3, 4, 5, 6}, {}}), kNowhere);
}

TEST_F(SessionTableTest, ARewriteRollsBackFromTheFirstPositionThatDiffers) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_EQ(RolledBack({"s", 1, {2, 3, 9, 5}, {}}), 3);
}

TEST_F(SessionTableTest, TruncationRollsBackFromWhatIsCutOff) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_EQ(RolledBack({"s", 1, {2, 3}, {}}), 3);
  EXPECT_EQ(RolledBack({"s", 0, {1}, {}}), 1) << "a restart with the same ids is a truncation";
}

TEST_F(SessionTableTest, AContradictingLookbackRollsBackEverythingThatIsForgotten) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_EQ(RolledBack({"s", 5, {6}, {3, 4, 9}}), 0) << "positions 0 and 1 are unknown now";
  ASSERT_TRUE(Commit("t", 3, {4}, {1, 2, 3}).ok());
  EXPECT_EQ(RolledBack({"t", 3, {4}, {1, 9, 3}}), 1) << "position 0 stands";
}

TEST_F(SessionTableTest, LookbackBelowTheBaseRollsBackAllOfIt) {
  ASSERT_TRUE(Commit("s", 100, {4, 5, 6}, {1, 2, 3}).ok());  // knows [97, 103)
  EXPECT_EQ(RolledBack({"s", 99, {3}, {0, 1, 2}}), 96) << "96 was not known, so it cannot be the same";
  EXPECT_EQ(RolledBack({"s", 50, {3}, {0, 1, 2}}), 47);
  EXPECT_EQ(RolledBack({"s", 80, {3}, {0, 1, 2}}), 47);
}

TEST_F(SessionTableTest, WhatTheWindowDropsIsNoRollbackButARestartAfterItIs) {
  EXPECT_EQ(RolledBack({"s", 0, Ids(100, 5), {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 100, Ids(100, 5), {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 0, Ids(200, 5), {}}), 0) << "nothing is left of position 0 to compare with";
}

TEST_F(SessionTableTest, ASessionThatWasForgottenIsBornWithoutARollback) {
  ASSERT_TRUE(Commit("s", 0, {1, 2}).ok());
  now_ += absl::Seconds(601);
  const absl::StatusOr<CommitResult> result = Call({{"s", 0, {9}, {}}});
  EXPECT_THAT(result->rollbacks, IsEmpty());
  EXPECT_THAT(result->forgotten, ElementsAre(Key("s")));
  EXPECT_EQ(ReasonOf(Commit("s", 2, {3}).status()), Reason::kPositionGap);
}

// --- masks

TEST_F(SessionTableTest, MaskedIsDeadInEveryWindow) {
  EXPECT_THAT(*Commit("s", 0, {1, kMasked, kDead}), ElementsAre(kDead, kDead, kDead, 1, kDead, kDead));
  EXPECT_THAT(*Commit("s", 3, {4}), ElementsAre(1, kDead, kDead, 4));
  EXPECT_THAT(*WindowOf(Fork("child", "s", 3, {4})), ElementsAre(1, kDead, kDead, 4));
}

TEST_F(SessionTableTest, AnotherMaskIsARollbackThoughTheHashIsTheSame) {
  ASSERT_TRUE(Commit("s", 0, {1, kMasked, kDead, 4}).ok());
  EXPECT_EQ(RolledBack({"s", 0, {1, kMasked, kDead, 4}, {}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 0, {1, kMasked, kMasked, 4}, {}}), 2);
  EXPECT_EQ(RolledBack({"s", 0, {1, kDead, kMasked, 4}, {}}), 1);
}

TEST_F(SessionTableTest, LookbackAgreesWithMaskedAndWithUnmappedAndLeavesThemWhatTheyAre) {
  ASSERT_TRUE(Commit("s", 0, {1, kMasked, kDead, 4}).ok());
  EXPECT_EQ(RolledBack({"s", 4, {5}, {kDead, kDead, 4}}), kNowhere);
  EXPECT_EQ(RolledBack({"s", 0, {1, kMasked, kDead, 4, 5}, {}}), kNowhere);
}

TEST_F(SessionTableTest, LookbackThatContradictsLaterOnStillAgreesWithTheMasked) {
  ASSERT_TRUE(Commit("s", 0, {kMasked, 2, 3, 4}).ok());
  EXPECT_EQ(RolledBack({"s", 3, {4}, {kDead, 2, 9}}), 2);
  EXPECT_EQ(RolledBack({"s", 0, {kMasked, 2, 9, 4}, {}}), kNowhere);
}

// --- partial_ok

TEST_F(SessionTableTest, WithPartialOkTheRefusedChangeNothingAndTheOthersAreServed) {
  ASSERT_TRUE(WindowOf({"stale", 0, {1}, {}, 5}).ok());
  ASSERT_TRUE(Commit("good", 0, {1, 2, 3}).ok());
  const absl::StatusOr<CommitResult> result = Call(
      {{"stale", 0, {9, 9}, {}, 4}, {"good", 3, {4}, {}}, {"lost", 7, {1}, {}}, {"", 9, {1}, {}}, {"new", 0, {5}, {}}},
      /*partial_ok=*/true);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->windows, ElementsAre(kDead, kDead, kDead, kDead, kDead, 1, 2, 3, 4, kDead, kDead, kDead, kDead,
                                           kDead, kDead, kDead, kDead, kDead, kDead, kDead, 5));
  ASSERT_THAT(result->refused, SizeIs(5));
  EXPECT_EQ(ReasonOf(result->refused[0]), Reason::kStaleStep);
  EXPECT_EQ(DetailOf(result->refused[0]).offenders.at(0).field, "sequences[0].step");
  EXPECT_TRUE(result->refused[1].ok());
  EXPECT_EQ(ReasonOf(result->refused[2]), Reason::kSessionLost);
  EXPECT_EQ(DetailOf(result->refused[2]).offenders.at(0).field, "sequences[2].start_pos");
  EXPECT_EQ(ReasonOf(result->refused[3]), Reason::kLookbackLength);
  EXPECT_TRUE(result->refused[4].ok());
  EXPECT_EQ(table_.stats().sessions, 3);
  EXPECT_EQ(ReasonOf(Commit("stale", 2, {1}).status()), Reason::kPositionGap);
}

TEST_F(SessionTableTest, WithPartialOkAndNothingRefusedTheListIsEmpty) {
  EXPECT_THAT(Call({{"a", 0, {1}, {}}, {"b", 0, {1}, {}}}, true)->refused, IsEmpty());
}

TEST_F(SessionTableTest, WithPartialOkAllMayBeRefused) {
  const absl::StatusOr<CommitResult> result = Call({{"a", 4, {1}, {}}, {"b", 4, {1}, {}}}, true);
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->refused, SizeIs(2));
  EXPECT_THAT(result->windows, AllOf(SizeIs(8), Each(kDead)));
  EXPECT_EQ(table_.stats().sessions, 0);
}

TEST_F(SessionTableTest, AForkIsServedThoughItsParentsOwnSequenceIsRefused) {
  ASSERT_TRUE(Commit("parent", 0, {1, 2, 3}).ok());
  const absl::StatusOr<CommitResult> result = Call({{"parent", 9, {1}, {}}, Fork("child", "parent", 3, {4})}, true);
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->windows, ElementsAre(kDead, kDead, kDead, kDead, 1, 2, 3, 4));
}

TEST_F(SessionTableTest, ARefusalNamesTheIndexThatTheClaimBringsAlong) {
  SequenceClaim lost{"lost", 7, {1}};
  lost.index = 5;
  const absl::StatusOr<CommitResult> result = Call({{"good", 0, {1}}, lost}, true);
  EXPECT_EQ(DetailOf(result->refused.at(1)).offenders.at(0).field, "sequences[5].start_pos");
  EXPECT_EQ(DetailOf(Call({lost}).status()).offenders.at(0).field, "sequences[5].start_pos");
}

// --- closing

TEST_F(SessionTableTest, CloseForgetsWhatIsKnownAndNamesIt) {
  ASSERT_TRUE(Commit("a", 0, {1}).ok());
  ASSERT_TRUE(Commit("b", 0, {1}).ok());
  EXPECT_THAT(table_.Close("p", {"a", "nobody", "a"}), ElementsAre(Key("a")));
  EXPECT_EQ(ReasonOf(Commit("a", 1, {2}).status()), Reason::kSessionLost);
  EXPECT_THAT(table_.Close("p", {"b"}), ElementsAre(Key("b")));
  EXPECT_EQ(table_.stats().sessions, 0);
  EXPECT_EQ(table_.stats().bytes, 0);
  EXPECT_EQ(table_.stats().evicted_idle + table_.stats().evicted_memory, 0) << "closing is no eviction";
}

}  // namespace
}  // namespace engram
