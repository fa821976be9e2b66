// Calls through servers that are small, dead, or have let go of what was prepared.
#include <signal.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/engram_client.h"
#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/calls_through_a_server.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

using e2e::ServerProcess;
using testing::ElementsAre;
using testing::HasSubstr;

using ClientFaultsTest = ClientCallsTest;

// Sixteen parts at once were more than the queue of an idle server takes, and the call failed.
TEST_F(ClientFaultsTest, ALargeCallGoesThroughAQueueThatIsSmallerThanItsParts) {
  const std::vector<int32_t> ids = Tokens(500);
  const auto whole = Connect(*server_);
  const Tensors expected = Apply(*whole, Form::kHighway, {{.token_ids = ids}}, 500);
  // 500 tokens take 1 MiB up and as much down.
  struct Queue {
    const char* flag;
    const char* value;
    int64_t stripe_bytes;
  };
  for (const auto& [flag, value, stripe_bytes] :
       {Queue{"--max-queue-tokens", "64", 16384}, Queue{"--max-queue-bytes", "1048576", 262144}}) {
    const auto small = Start({flag, value, "--max-message-bytes", "524288", "--max-batch-tokens", "8"});
    ASSERT_NE(small, nullptr);
    const auto client = Connect(small->tcp_address(), stripe_bytes);
    const Tensors got = Apply(*client, Form::kHighway, {{.token_ids = ids}}, 500);
    EXPECT_EQ(got.All(), expected.All()) << flag;
    std::string rows(500 * kColumns * 84, ' ');
    LookupCall lookup;
    lookup.sequences = {{.token_ids = ids}};
    lookup.layers = {{.layer_id = 1, .out = absl::MakeSpan(rows)}};
    EXPECT_EQ(client->Lookup(lookup), absl::OkStatus()) << flag;
  }
}

// The first dead server ended it: the others kept their sessions, and where the dead one's were was forgotten.
TEST_F(ClientFaultsTest, ADeadServerKeepsNoOtherFromClosingItsSessions) {
  std::unique_ptr<ServerProcess> servers[] = {Start({}), Start({}), Start({})};
  ClientOptions options;
  for (const auto& server : servers) options.replicas.targets.push_back(server->unix_address());
  const auto client = *Client::Connect(options);
  const auto serving = [&client] {
    size_t count = 0;
    for (const ReplicaStatus& replica : client->Replicas()) count += replica.state == ReplicaState::kServing ? 1 : 0;
    return count;
  };
  while (serving() < 3) absl::SleepFor(absl::Milliseconds(5));
  const std::vector<int32_t> ids = Tokens(3);
  std::map<std::string, std::vector<std::string>> homes;
  std::vector<std::string> sessions;
  for (int i = 0; homes.size() < 3 || i < 9; ++i) {
    CallReport report;
    sessions.push_back(absl::StrCat("c", i));
    Apply(*client, Form::kHighway, {{.token_ids = ids, .session = sessions.back()}}, 3, HighwayDtype::kF32, &report);
    homes[report.replica].push_back(sessions.back());
  }
  // The first in the client's order too.
  const std::string dead = homes.begin()->first;
  for (const auto& server : servers) {
    if (server->unix_address() == dead) server->Stop(SIGKILL);
  }
  const auto others = static_cast<int64_t>(sessions.size() - homes[dead].size());
  const absl::Status status = client->CloseSessions(sessions).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("(", others, " sessions were closed all the same)")));
  EXPECT_EQ(client->CloseSessions(homes[dead]).status().code(), absl::StatusCode::kUnavailable) << "asked there again";
}

TEST_F(ClientFaultsTest, ADeadServerKeepsNoOtherFromTakingItsTicketsBack) {
  std::unique_ptr<ServerProcess> servers[] = {Start({"--max-message-bytes", "4096"}),
                                              Start({"--max-message-bytes", "4096"})};
  ClientOptions options;
  for (const auto& server : servers) options.replicas.targets.push_back(server->unix_address());
  const auto client = *Client::Connect(options);
  std::map<std::string, int64_t> tickets;
  const std::vector<int32_t> ids = Tokens(200);
  Tensors values(200, HighwayDtype::kF32);
  PrepareCall prepare;
  prepare.sequences = {{.token_ids = ids}};
  prepare.layer_ids = {1, 14};
  prepare.values = {absl::MakeSpan(values.value[0]), absl::MakeSpan(values.value[1])};
  absl::StatusOr<Prepared> prepared;
  while (tickets.size() < 2) {
    tickets.clear();
    prepared = client->Prepare(prepare);
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    for (const PreparedPart& part : prepared->state()->parts) ++tickets[part.replica];
  }
  for (const auto& server : servers) {
    if (server->unix_address() == tickets.begin()->first) server->Stop(SIGKILL);
  }
  const absl::Status status = client->Release(*prepared).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  const int64_t others = tickets.rbegin()->second;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("(", others, " tickets were given back")));
}

// A ticket that was gone sent its tokens into the session once more, which forgot what came after them.
TEST_F(ClientFaultsTest, AGoneTicketTruncatesNoSession) {
  const auto client = Connect(*server_);
  const std::vector<int32_t> ids = Tokens(4);
  const auto run = [&ids](int64_t start) { return SequenceRun{.start_pos = start, .token_ids = ids, .session = "s"}; };
  PrepareCall prepare;
  prepare.layer_ids = {1, 14};
  prepare.sequences = {run(0)};
  const absl::StatusOr<Prepared> first = client->Prepare(prepare);
  prepare.sequences = {run(4)};
  const absl::StatusOr<Prepared> second = client->Prepare(prepare);
  ASSERT_TRUE(first.ok() && second.ok()) << second.status();
  const Tensors direct = Apply(*client, Form::kHighway, {{.token_ids = ids}}, 4);
  Apply(*client, Form::kHighway, {run(8)}, 4);
  ASSERT_EQ(client->Release(*first).value() + client->Release(*second).value(), 2);

  Tensors tensors(4, HighwayDtype::kF32);
  ApplyCall call;
  call.layers = tensors.Layers(Form::kHighway);
  call.prepared = &*first;
  EXPECT_EQ(client->Apply(call), absl::OkStatus()) << "before position 0 nothing needs to be known";
  EXPECT_EQ(tensors.All(), direct.All());
  call.prepared = &*second;
  EXPECT_EQ(ErrorReason(client->Apply(call)), "TICKET_EXPIRED") << "only the session knows the ids before them";
  Apply(*client, Form::kHighway, {run(12)}, 4);
}

TEST_F(ClientFaultsTest, WithoutAServerASkippedCallGoesOnAndSaysSo) {
  const auto client = Connect(*server_);
  const std::vector<int32_t> ids = Tokens(6);
  server_->Stop(SIGKILL);
  for (const Form form : {Form::kHighway, Form::kUpdate, Form::kGate}) {
    SequenceHistory history(4);
    Tensors tensors(6, HighwayDtype::kF32);
    ApplyCall call;
    call.sequences = {{.history = &history, .token_ids = ids}};
    call.form = form;
    call.layers = tensors.Layers(form);
    call.timeout = absl::Seconds(10);
    EXPECT_EQ(client->Apply(call).code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(history.length(), 0);
    call.on_failure = OnFailure::kSkip;
    CallReport report;
    ASSERT_TRUE(client->Apply(call, &report).ok());
    ASSERT_EQ(report.skipped.size(), 1u);
    EXPECT_THAT(report.skipped[0].layer_ids, ElementsAre(1, 14));
    EXPECT_EQ(report.skipped[0].tokens.end, 6);
    EXPECT_EQ(report.skipped[0].why.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(history.length(), 6) << "the tokens were consumed all the same";
    if (form == Form::kHighway) {
      EXPECT_EQ(tensors.out[1], tensors.highway[1]);
    } else {
      EXPECT_EQ(tensors.gates[1], std::vector<float>(24, 0));
    }
    if (form == Form::kUpdate) {
      EXPECT_EQ(tensors.value[1], std::vector<uint16_t>(6 * kDim, 0));
    }
  }
}

}  // namespace
}  // namespace engram::client
