#include "client/replica_set.h"

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"
#include "tests/client/raw_calls.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ReplicaOptions Options(std::vector<std::string> targets) {
  ReplicaOptions options;
  options.targets = std::move(targets);
  options.ejection = {.failures = 3, .base = absl::Milliseconds(50), .max = absl::Milliseconds(400)};
  return options;
}

std::unique_ptr<ReplicaSet> ConnectOrDie(const ReplicaOptions& options, ReplicaSet::Resolver resolver = ResolveTarget) {
  auto set = ReplicaSet::Connect(options, std::move(resolver));
  EXPECT_TRUE(set.ok()) << set.status();
  return set.ok() ? *std::move(set) : nullptr;
}

class ReplicaSetTest : public testing::Test {
 protected:
  // Both, in service.
  std::unique_ptr<ReplicaSet> ConnectToBoth() {
    a_.Start();
    b_.Start();
    auto set = ConnectOrDie(Options({a_.target(), b_.target()}));
    if (set != nullptr) {
      EXPECT_TRUE(Eventually([&] { return Serves(*set, a_.target()) && Serves(*set, b_.target()); }));
    }
    return set;
  }

  FakeServer a_;
  FakeServer b_;
};

TEST_F(ReplicaSetTest, TheFirstThatAnswersIsEnoughAndTheOthersJoin) {
  a_.Start();
  auto set = ConnectOrDie(Options({b_.target(), a_.target()}));
  ASSERT_NE(set, nullptr);
  EXPECT_EQ(set->model().layers.size(), 2u);
  EXPECT_EQ(set->model().server_epoch, 7u);
  EXPECT_EQ(StatusOf(*set, b_.target()).state, ReplicaState::kNew);
  EXPECT_EQ(set->Choose({})->replica(), a_.target());
  b_.Start();
  EXPECT_TRUE(Eventually([&] { return Serves(*set, b_.target()); }));
}

TEST_F(ReplicaSetTest, WhenNoneAnswersTheErrorNamesEveryTargetAndWhy) {
  b_.get_model = [](grpc::ServerContext& context) {
    while (!context.IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
    return grpc::Status::OK;
  };
  b_.Start();
  ReplicaOptions options = Options({a_.target(), b_.target(), "engram.invalid:8001"});
  options.connect_timeout = absl::Milliseconds(400);
  const absl::Status status = ReplicaSet::Connect(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(a_.target() + ": GetModel: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("No such file"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(b_.target() + ": connected, but GetModel was not answered"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("engram.invalid:8001: "));

  options.targets = {b_.target()};
  EXPECT_EQ(ReplicaSet::Connect(options).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(ReplicaSetTest, AHashDigestThatNoServerHasFailsAtOnce) {
  a_.Start();
  b_.Start();
  ReplicaOptions options = Options({a_.target(), b_.target()});
  options.hash_digest = std::string(64, 'a');
  options.connect_timeout = absl::Hours(1);
  const absl::Status status = ReplicaSet::Connect(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(status), "DIGEST_MISMATCH");
  EXPECT_THAT(std::string(status.message()), HasSubstr(a_.target() + " has hash_digest 1111"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(b_.target() + " has hash_digest 1111"));
}

TEST_F(ReplicaSetTest, AServerWithAnotherHashDigestNeverFixesTheModel) {
  a_.model.set_hash_digest(std::string(32, '\x33'));
  a_.Start();
  ReplicaOptions options = Options({a_.target(), b_.target()});
  options.hash_digest = std::string(32, '\x11');
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(200));
    b_.Start();
  });
  auto set = ConnectOrDie(options);
  late.join();
  ASSERT_NE(set, nullptr);
  EXPECT_EQ(set->model().hash_digest, std::string(32, '\x11'));
  EXPECT_EQ(StatusOf(*set, a_.target()).state, ReplicaState::kOtherModel);
}

TEST_F(ReplicaSetTest, AConfigDigestSaysWhichModelIsMeantWhoeverAnswersFirst) {
  a_.model.set_config_digest(std::string(32, '\x23'));
  a_.Start();
  ReplicaOptions options = Options({a_.target(), b_.target()});
  options.config_digest = b_.model.config_digest();
  std::thread late([&] {
    absl::SleepFor(absl::Milliseconds(200));
    b_.Start();
  });
  auto set = ConnectOrDie(options);
  late.join();
  ASSERT_NE(set, nullptr);
  EXPECT_EQ(set->model().config_digest, b_.model.config_digest());
  EXPECT_EQ(StatusOf(*set, a_.target()).state, ReplicaState::kOtherModel);

  options.targets = {a_.target()};
  options.config_digest = std::string(64, 'b');
  options.connect_timeout = absl::Hours(1);
  const absl::Status status = ReplicaSet::Connect(options).status();
  EXPECT_EQ(ErrorReason(status), "DIGEST_MISMATCH");
  EXPECT_THAT(std::string(status.message()), HasSubstr(a_.target() + " has config_digest 2323"));
}

TEST_F(ReplicaSetTest, AnotherConfigDigestNeverGetsCallsAndIsTold) {
  a_.Start();
  auto set = ConnectOrDie(Options({a_.target(), b_.target()}));
  ASSERT_NE(set, nullptr);
  b_.model.set_config_digest(std::string(32, '\x23'));
  b_.Start();
  ASSERT_TRUE(Eventually([&] { return StatusOf(*set, b_.target()).state == ReplicaState::kOtherModel; }));
  EXPECT_THAT(std::string(StatusOf(*set, b_.target()).last_error.message()), HasSubstr("has config_digest 2323"));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(set->Choose({})->replica(), a_.target());
  const absl::Status status = set->Choose({.only = b_.target()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(b_.target() + " is other model ("));
}

TEST_F(ReplicaSetTest, AnotherNumericsIdGetsCallsOnlyWhereThatIsAllowed) {
  for (bool allowed : {false, true}) {
    FakeServer a;
    FakeServer b;
    a.Start();
    ReplicaOptions options = Options({a.target(), b.target()});
    options.allow_numerics_change = allowed;
    auto set = ConnectOrDie(options);
    ASSERT_NE(set, nullptr);
    b.model.set_numerics_id("another");
    b.Start();
    const ReplicaState expected = allowed ? ReplicaState::kServing : ReplicaState::kOtherNumerics;
    EXPECT_TRUE(Eventually([&] { return StatusOf(*set, b.target()).state == expected; })) << allowed;
    EXPECT_EQ(StatusOf(*set, b.target()).numerics_id, "another");
    EXPECT_EQ(set->Choose({.only = b.target()}).ok(), allowed);
  }
}

TEST_F(ReplicaSetTest, TheSmallestLimitsHold) {
  a_.Start();
  ReplicaOptions options = Options({a_.target(), b_.target()});
  options.max_message_bytes = 32 << 20;
  auto set = ConnectOrDie(options);
  ASSERT_NE(set, nullptr);
  EXPECT_EQ(set->max_message_bytes(), 32 << 20);
  EXPECT_EQ(set->max_call_tokens(), 64);
  b_.model.mutable_limits()->set_max_message_bytes(1 << 20);
  b_.model.mutable_limits()->set_max_call_tokens(16);
  b_.Start();
  ASSERT_TRUE(Eventually([&] { return Serves(*set, b_.target()); }));
  EXPECT_EQ(set->max_message_bytes(), 1 << 20);
  EXPECT_EQ(set->max_call_tokens(), 16);
}

TEST_F(ReplicaSetTest, TheFewestTokensInFlightAreChosenAndTiesGoRound) {
  auto set = ConnectToBoth();
  ASSERT_NE(set, nullptr);
  std::vector<std::string> names;
  names.reserve(4);
  for (int i = 0; i < 4; ++i) names.push_back(set->Choose({.weight_tokens = 1})->replica());
  EXPECT_THAT(names, testing::AnyOf(ElementsAre(a_.target(), b_.target(), a_.target(), b_.target()),
                                    ElementsAre(b_.target(), a_.target(), b_.target(), a_.target())));

  const auto heavy = set->Choose({.weight_tokens = 100});
  ASSERT_TRUE(heavy.ok());
  std::vector<Lease> light;
  for (int i = 0; i < 10; ++i) {
    auto lease = set->Choose({.weight_tokens = 10});
    ASSERT_TRUE(lease.ok());
    EXPECT_NE(lease->replica(), heavy->replica()) << i;
    light.push_back(*std::move(lease));
  }
  EXPECT_EQ(StatusOf(*set, heavy->replica()).tokens_in_flight, 100);
  EXPECT_EQ(StatusOf(*set, light[0].replica()).calls_in_flight, 10);
  EXPECT_EQ(set->Choose({.weight_tokens = 10})->replica(), heavy->replica()) << "as many, and the other came last";
  light.clear();
  EXPECT_EQ(StatusOf(*set, heavy->replica()).tokens_in_flight, 100);
}

TEST_F(ReplicaSetTest, AnUnwelcomeReplicaIsTakenRatherThanNone) {
  auto set = ConnectToBoth();
  ASSERT_NE(set, nullptr);
  const std::string a = a_.target();
  const std::string b = b_.target();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(set->Choose({.avoid = {a}})->replica(), b);
    EXPECT_EQ(set->Choose({.avoid = {b, a}})->replica(), b) << "the last is the least welcome";
    EXPECT_EQ(set->Choose({.only = a, .avoid = {a}})->replica(), a);
  }
  EXPECT_FALSE(set->Choose({.avoid = {b, a}, .never_avoided = true}).ok());
  const absl::Status gone = set->Choose({.only = "unix:/elsewhere"}).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(gone.message(), "replica unix:/elsewhere is gone: no target names it now");
}

TEST_F(ReplicaSetTest, AnEpochThatIsNotTheOneAskedForMeansARestart) {
  a_.Start();
  auto set = ConnectOrDie(Options({a_.target()}));
  ASSERT_NE(set, nullptr);
  EXPECT_TRUE(set->KnowsEpoch(a_.target(), 7));
  a_.Stop();
  a_.model.set_server_epoch(8);
  a_.model.set_numerics_id("another");
  a_.Start();
  EXPECT_FALSE(set->KnowsEpoch(a_.target(), 8));
  EXPECT_TRUE(Eventually([&] { return StatusOf(*set, a_.target()).state == ReplicaState::kOtherNumerics; }));
  EXPECT_EQ(StatusOf(*set, a_.target()).server_epoch, 8u);
  EXPECT_FALSE(set->KnowsEpoch("unix:/elsewhere", 8));
}

// A reply of the new start may come after it was asked, and was then taken for one of a server that is known.
TEST_F(ReplicaSetTest, TheEpochOfAReplicaThatWasFoundToBeAnotherIsNotKnown) {
  for (const bool other_model : {false, true}) {
    FakeServer server;
    server.Start();
    auto set = ConnectOrDie(Options({server.target()}));
    ASSERT_NE(set, nullptr);
    EXPECT_EQ(set->Choose({})->server_epoch(), 7u);
    server.Stop();
    server.model.set_server_epoch(8);
    server.model.set_numerics_id("another");
    if (other_model) server.model.set_config_digest(std::string(32, '\x23'));
    server.Start();
    EXPECT_FALSE(set->KnowsEpoch(server.target(), 8));
    const ReplicaState expected = other_model ? ReplicaState::kOtherModel : ReplicaState::kOtherNumerics;
    ASSERT_TRUE(Eventually([&] { return StatusOf(*set, server.target()).state == expected; }));
    EXPECT_FALSE(set->KnowsEpoch(server.target(), 8));
    EXPECT_FALSE(set->KnowsEpoch(server.target(), 7)) << "nor is the one before: it is gone";
  }
}

TEST(ReplicaSetDns, ReplicasComeAndGoWithTheirAddresses) {
  FakeServer a;
  FakeServer b;
  a.StartTcp("127.0.0.1");
  b.StartTcp("127.0.0.1");
  std::mutex mutex;
  absl::StatusOr<std::vector<Address>> known = *ResolveTarget(a.target());
  const auto set_known = [&](absl::StatusOr<std::vector<Address>> now) {
    std::lock_guard<std::mutex> lock(mutex);
    known = std::move(now);
  };
  ReplicaOptions options = Options({"engram:8001"});
  options.resolve_interval = absl::Milliseconds(20);
  auto set = ConnectOrDie(options, [&](const std::string& target) {
    EXPECT_EQ(target, "engram:8001");
    std::lock_guard<std::mutex> lock(mutex);
    return known;
  });
  ASSERT_NE(set, nullptr);
  auto lease = set->Choose({.weight_tokens = 3});
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(lease->replica(), a.target());
  EXPECT_EQ(StatusOf(*set, a.target()).target, "engram:8001");

  std::vector<Address> both = *ResolveTarget(b.target());
  both.push_back(ResolveTarget(a.target())->front());
  set_known(both);
  EXPECT_TRUE(Eventually([&] { return Serves(*set, b.target()); }));
  EXPECT_TRUE(Serves(*set, a.target()));

  set_known(absl::UnavailableError("the name server is down"));
  absl::SleepFor(absl::Milliseconds(100));
  set_known(std::vector<Address>());
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_TRUE(Serves(*set, a.target())) << "what failed or said nothing takes nobody away";
  EXPECT_TRUE(Serves(*set, b.target()));

  set_known(*ResolveTarget(b.target()));
  EXPECT_TRUE(Eventually([&] { return StatusOf(*set, a.target()).state == ReplicaState::kGone; }));
  EXPECT_EQ(set->Replicas().size(), 2u) << "it has a call";
  for (int i = 0; i < 4; ++i) EXPECT_EQ(set->Choose({})->replica(), b.target());
  { const Lease ends = *std::move(lease); }
  EXPECT_EQ(set->Replicas().size(), 1u);
  EXPECT_EQ(Await(*set, ApplyOneToken()).replica, b.target());
}

// The table has forgotten such a replica when its reply is looked at, which was then taken for one of a restart.
TEST(ReplicaSetDns, AReplyOfAReplicaThatDnsDroppedMeanwhileSaysWhoWasAsked) {
  FakeServer a;
  FakeServer b;
  std::atomic<bool> held = true;
  a.apply = [&](grpc::ServerContext& context, auto&, auto*) {
    while (held && !context.IsCancelled()) absl::SleepFor(absl::Milliseconds(2));
    return grpc::Status::OK;
  };
  a.StartTcp("127.0.0.1");
  b.StartTcp("127.0.0.1");
  std::atomic<bool> dropped = false;
  ReplicaOptions options = Options({"engram:8001"});
  options.resolve_interval = absl::Milliseconds(20);
  auto set =
      ConnectOrDie(options, [&](const std::string&) { return ResolveTarget(dropped ? b.target() : a.target()); });
  ASSERT_NE(set, nullptr);
  RawReply reply;
  std::thread call([&] { reply = Await(*set, ApplyOneToken()); });
  EXPECT_TRUE(Eventually([&] { return !a.requests().empty(); }));
  dropped = true;
  EXPECT_TRUE(Eventually([&] { return StatusOf(*set, a.target()).state == ReplicaState::kGone; }));
  held = false;
  call.join();
  EXPECT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.replica, a.target());
  EXPECT_EQ(reply.server_epoch, 7u);
  EXPECT_FALSE(set->KnowsEpoch(a.target(), 7)) << "it is forgotten with its last call";
}

TEST(ReplicaSetDns, ANameOfTheSystemsResolverIsConnectedToAndKeptAsAuthority) {
  FakeServer server;
  std::mutex mutex;
  std::set<std::string> peers;
  std::set<std::string> authorities;
  server.apply = [&](grpc::ServerContext& context, auto&, auto*) {
    std::lock_guard<std::mutex> lock(mutex);
    peers.insert(context.peer());
    authorities.insert({context.ExperimentalGetAuthority().data(), context.ExperimentalGetAuthority().size()});
    return grpc::Status::OK;
  };
  server.StartTcp("127.0.0.1");
  const std::string named = "localhost" + server.target().substr(server.target().rfind(':'));
  auto set = ConnectOrDie(Options({named}));
  ASSERT_NE(set, nullptr);
  for (int i = 0; i < 6; ++i) {
    const RawReply reply = Await(*set, ApplyOneToken());
    ASSERT_TRUE(reply.status.ok()) << reply.status;
    EXPECT_EQ(reply.replica, server.target());
  }
  std::lock_guard<std::mutex> lock(mutex);
  EXPECT_EQ(peers.size(), 2u) << "channels_per_replica connections";
  EXPECT_THAT(authorities, ElementsAre(named));
}

TEST(ReplicaSetDns, Ipv6) {
  FakeServer server;
  server.StartTcp("[::1]");
  auto set = ConnectOrDie(Options({server.target()}));
  ASSERT_NE(set, nullptr);
  EXPECT_EQ(Await(*set, ApplyOneToken()).replica, server.target());
}

TEST(ReplicaSetDns, AResolverThatHangsHoldsUpNeitherConnectNorTheEnd) {
  // Lives longer than the set: nobody waits for it.
  auto let_go = std::make_shared<absl::Notification>();
  ReplicaOptions options = Options({"engram:8001"});
  options.connect_timeout = absl::Milliseconds(100);
  const absl::Time start = absl::Now();
  const absl::Status status =
      ReplicaSet::Connect(options, [let_go](const std::string&) -> absl::StatusOr<std::vector<Address>> {
        let_go->WaitForNotification();
        return absl::UnavailableError("late");
      }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "engram:8001: DNS has not answered yet");
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  let_go->Notify();
}

TEST(ReplicaSetOptions, OneThatCannotBeIsNamedWithItsValue) {
  const auto message = [](const std::function<void(ReplicaOptions&)>& spoil) {
    ReplicaOptions options = Options({"unix:/a"});
    spoil(options);
    const absl::Status status = ReplicaSet::Connect(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(message([](auto& o) { o.targets = {}; }), "targets is empty, expected at least one");
  EXPECT_EQ(message([](auto& o) {
              o.targets = {"unix:/a", "here"};
            }),
            "target is \"here\", expected host:port or unix:/path");
  EXPECT_EQ(message([](auto& o) { o.channels_per_replica = 65; }), "channels_per_replica is 65, expected 1..64");
  EXPECT_EQ(message([](auto& o) { o.max_message_bytes = 0; }), "max_message_bytes is 0, expected at least 1");
  EXPECT_EQ(message([](auto& o) { o.resolve_interval = absl::ZeroDuration(); }),
            "resolve_interval is 0, expected more than 0");
  EXPECT_EQ(message([](auto& o) { o.ejection.failures = 0; }), "ejection.failures is 0, expected at least 1");
  EXPECT_EQ(message([](auto& o) { o.ejection.base = absl::ZeroDuration(); }),
            "ejection.base is 0, expected at least 1ms");
  EXPECT_EQ(message([](auto& o) { o.ejection.max = absl::Milliseconds(2); }),
            "ejection.max is 2ms, expected at least ejection.base, 50ms");
  EXPECT_THAT(message([](auto& o) { o.hash_digest = "abc"; }), HasSubstr("hash_digest has 3 characters"));
  EXPECT_THAT(message([](auto& o) { o.config_digest = "abcd"; }), HasSubstr("config_digest has 4 characters"));
}

}  // namespace
}  // namespace engram::client
