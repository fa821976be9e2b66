#include "client/retry.h"

#include "absl/strings/cord.h"
#include "client/error_details.h"
#include "google/rpc/error_details.pb.h"
#include "gtest/gtest.h"

namespace engram::client {
namespace {

const RetryOptions kOptions = {
    .attempts = 6, .initial_backoff = absl::Milliseconds(20), .max_backoff = absl::Milliseconds(100)};

absl::Status Full(absl::Duration delay) {
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(absl::ToInt64Seconds(delay));
  info.mutable_retry_delay()->set_nanos(static_cast<int>(absl::ToInt64Nanoseconds(delay % absl::Seconds(1))));
  absl::Status status = absl::ResourceExhaustedError("QUEUE_FULL");
  status.SetPayload(kRetryInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

TEST(DelayBeforeRetry, UnavailableWaitsARandomPartOfABackoffThatDoubles) {
  const absl::Status gone = absl::UnavailableError("gone");
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, gone, "", 0), absl::ZeroDuration());
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, gone, "", 0.5), absl::Milliseconds(10));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 2, gone, "", 0.5), absl::Milliseconds(20));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 3, gone, "", 0.5), absl::Milliseconds(40));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 4, gone, "", 0.5), absl::Milliseconds(50)) << "the maximum";
}

TEST(DelayBeforeRetry, EndsWithTheLastAttempt) {
  const absl::Status gone = absl::UnavailableError("gone");
  EXPECT_TRUE(DelayBeforeRetry(kOptions, 5, gone, "", 0.5).has_value());
  EXPECT_FALSE(DelayBeforeRetry(kOptions, 6, gone, "", 0.5).has_value());
  EXPECT_FALSE(DelayBeforeRetry({.attempts = 1}, 1, gone, "", 0.5).has_value());
}

TEST(DelayBeforeRetry, ManyAttemptsDoNotOverflow) {
  const absl::Status gone = absl::UnavailableError("gone");
  EXPECT_EQ(DelayBeforeRetry({.attempts = 1000}, 999, gone, "", 0.5), absl::Seconds(1));
}

TEST(DelayBeforeRetry, AFullServersDelayHoldsWhereItIsLonger) {
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, Full(absl::Milliseconds(50)), "", 0.9), absl::Milliseconds(50));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 3, Full(absl::Milliseconds(50)), "", 0.9), absl::Milliseconds(72));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, absl::ResourceExhaustedError(""), "70", 0.9), absl::Milliseconds(70));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, Full(absl::Milliseconds(50)), "70", 0.9), absl::Milliseconds(70));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, Full(absl::Seconds(3)), "", 0), absl::Seconds(3));
}

TEST(DelayBeforeRetry, ExhaustedWithoutAWordAboutWhenIsFinal) {
  EXPECT_FALSE(DelayBeforeRetry(kOptions, 1, absl::ResourceExhaustedError("too large"), "", 0).has_value());
  EXPECT_FALSE(DelayBeforeRetry(kOptions, 1, absl::ResourceExhaustedError("TOO_MANY_TOKENS"), "-1", 0).has_value());
  EXPECT_FALSE(DelayBeforeRetry(kOptions, 1, absl::UnavailableError(""), "-1", 0).has_value());
}

TEST(DelayBeforeRetry, NothingElseIsRetried) {
  for (int code = 1; code <= 16; ++code) {
    const auto known = static_cast<absl::StatusCode>(code);
    if (known == absl::StatusCode::kUnavailable) continue;
    EXPECT_FALSE(DelayBeforeRetry(kOptions, 1, absl::Status(known, ""), "", 0).has_value()) << code;
  }
}

TEST(DelayBeforeRetry, HostileAdviceIsBounded) {
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(-5);
  info.mutable_retry_delay()->set_nanos(-5);
  absl::Status status = absl::ResourceExhaustedError("");
  status.SetPayload(kRetryInfoUrl, absl::Cord(info.SerializeAsString()));
  EXPECT_EQ(DelayBeforeRetry(kOptions, 1, status, "", 0.5), absl::Milliseconds(10));
  info.mutable_retry_delay()->set_seconds(INT64_MAX);
  status.SetPayload(kRetryInfoUrl, absl::Cord(info.SerializeAsString()));
  EXPECT_GT(*DelayBeforeRetry(kOptions, 1, status, "", 0.5), absl::Hours(1));
  status.SetPayload(kRetryInfoUrl, absl::Cord("\xff\xff"));
  EXPECT_FALSE(DelayBeforeRetry(kOptions, 1, status, "garbage", 0.5).has_value());
}

}  // namespace
}  // namespace engram::client
