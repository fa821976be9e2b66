// Calls of the client library through a real server: every form, prepared results, look-ups, calls that are cut.
#include <atomic>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "client/engram_client.h"
#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/calls_through_a_server.h"
#include "tests/e2e/process.h"

namespace engram::client {
namespace {

using testing::HasSubstr;

TEST_F(ClientCallsTest, EveryFormComesToTheBitsOfHighway) {
  const auto near = Connect(*server_);
  const auto far = Connect(server_->tcp_address());
  EXPECT_EQ(near->model().suggested_form, Form::kHighway);
  EXPECT_EQ(far->model().suggested_form, Form::kUpdate);
  const std::vector<int32_t> ids = Tokens(21);
  std::vector<uint8_t> mask(21, 1);
  mask[4] = mask[20] = 0;
  const std::vector<SequenceRun> runs = {{.token_ids = ids, .token_mask = mask}};
  for (const HighwayDtype dtype : {HighwayDtype::kF32, HighwayDtype::kBf16}) {
    const Tensors highway = Apply(*near, Form::kHighway, runs, 21, dtype);
    const Tensors update = Apply(*near, Form::kUpdate, runs, 21, dtype);
    Tensors gate = Apply(*near, Form::kGate, runs, 21, dtype);
    PrepareCall prepare;
    prepare.sequences = runs;
    prepare.layer_ids = {1, 14};
    prepare.values = {absl::MakeSpan(gate.value[0]), absl::MakeSpan(gate.value[1])};
    ASSERT_TRUE(near->Prepare(prepare).ok());
    const Tensors automatic = Apply(*far, Form::kAuto, runs, 21, dtype);
    for (int l = 0; l < 2; ++l) {
      EXPECT_NE(highway.out[l], highway.highway[l]);
      EXPECT_EQ(update.Updated(l, dtype, mask), highway.out[l]);
      EXPECT_EQ(gate.Updated(l, dtype, mask), highway.out[l]);
      EXPECT_EQ(automatic.out[l], highway.out[l]);
    }
  }
}

TEST_F(ClientCallsTest, APreparedResultIsAppliedWholeAndInSlicesAndAgainByIds) {
  const auto client = Connect(*server_);
  const std::vector<int32_t> ids = Tokens(19), other = Tokens(3, 9);
  const std::vector<uint8_t> mask = {1, 0, 1};
  SequenceHistory history(4);
  ASSERT_TRUE(history.Write(0, std::vector<int32_t>{7, 8, 9, 10}, {}).ok());
  PrepareCall prepare;
  prepare.sequences = {{.history = &history, .start_pos = 4, .token_ids = ids},
                       {.token_ids = other, .token_mask = mask}};
  prepare.layer_ids = {1, 14};
  const absl::StatusOr<Prepared> prepared = client->Prepare(prepare);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(prepared->tokens(), 22);
  EXPECT_EQ(history.length(), 23) << "the tokens were taken";

  const std::vector<int32_t> before = {10, 9, 8};
  const std::vector<SequenceRun> by_ids = {{.start_pos = 4, .token_ids = ids, .lookback = before},
                                           {.token_ids = other, .token_mask = mask}};
  const auto apply = [&](Form form, std::optional<Range> slice, CallReport* report = nullptr) {
    const Range range = slice.value_or(Range{0, 22});
    Tensors tensors(range.end - range.begin, HighwayDtype::kF32, range.begin);
    ApplyCall call;
    call.prepared = &*prepared;
    call.token_slice = slice;
    call.form = form;
    call.layers = tensors.Layers(form);
    const absl::Status status = client->Apply(call, report);
    EXPECT_TRUE(status.ok()) << status;
    return tensors;
  };
  for (const Form form : {Form::kHighway, Form::kUpdate, Form::kGate, Form::kKv, Form::kAuto}) {
    const Tensors direct = Apply(*client, form, by_ids, 22);
    CallReport report;
    EXPECT_EQ(apply(form, std::nullopt, &report).All(), direct.All()) << FormName(form);
    EXPECT_EQ(report.attempts, 1);
    const Tensors slice = apply(form, Range{17, 21});
    if (form == Form::kHighway) {
      EXPECT_EQ(slice.out[1], direct.out[1].substr(17 * kValues * 4, 4 * kValues * 4));
    }
  }
  EXPECT_EQ(client->Release(*prepared).value(), 1);
  EXPECT_EQ(client->Release(*prepared).value(), 0);
  for (const Form form : {Form::kHighway, Form::kUpdate}) {
    CallReport report;
    EXPECT_EQ(apply(form, std::nullopt, &report).All(), Apply(*client, form, by_ids, 22).All());
    EXPECT_EQ(report.attempts, 2) << "the ticket is gone: by ids";
    const Tensors slice = apply(form, Range{2, 9});
    EXPECT_EQ(slice.out[0].size(), size_t{7} * kValues * 4);
  }
}

TEST_F(ClientCallsTest, LookupsByIdsByRowIdsAndByAPreparedResultAgree) {
  const auto client = Connect(*server_);
  const std::vector<int32_t> ids = Tokens(11);
  const std::vector<SequenceRun> runs = {{.token_ids = ids}};
  const Tensors direct = Apply(*client, Form::kKv, runs, 11);
  PrepareCall prepare;
  prepare.sequences = runs;
  prepare.layer_ids = {14, 1};
  const absl::StatusOr<Prepared> prepared = client->Prepare(prepare);
  ASSERT_TRUE(prepared.ok()) << prepared.status();

  const auto lookup = [&](LookupCall call, Form form, size_t token_bytes, std::optional<Range> slice = std::nullopt) {
    std::string out(11 * token_bytes, 'o');
    call.form = form;
    call.slice = slice;
    call.layers = {{.layer_id = 14, .out = absl::MakeSpan(out)}};
    const absl::Status status = client->Lookup(call);
    EXPECT_TRUE(status.ok()) << status;
    return out;
  };
  LookupCall by_ids;
  by_ids.sequences = runs;
  LookupCall by_ticket;
  by_ticket.prepared = &*prepared;
  constexpr size_t kKvBytes = (kValues + kDim) * 2;
  EXPECT_EQ(lookup(by_ids, Form::kKv, kKvBytes), direct.kv[1]);
  EXPECT_EQ(lookup(by_ticket, Form::kKv, kKvBytes), direct.kv[1]);
  const std::string native = lookup(by_ids, Form::kRowsNative, kColumns * 84);
  EXPECT_EQ(lookup(by_ticket, Form::kRowsNative, kColumns * 84), native);
  const std::string decoded = lookup(by_ids, Form::kRowsBf16, kColumns * 512);
  const std::string columns = lookup(by_ticket, Form::kRowsBf16, 4 * 512, Range{5, 9});
  std::string cut;
  for (size_t t = 0; t < 11; ++t) cut += decoded.substr((t * kColumns + 5) * 512, 4 * 512);
  EXPECT_EQ(columns, cut);

  std::vector<int32_t> rows(11 * kColumns, -1);
  LookupCall by_rows;
  by_rows.row_ids = rows;
  EXPECT_EQ(lookup(by_rows, Form::kRowsNative, kColumns * 84), std::string(11 * kColumns * 84, '\0'));
  std::iota(rows.begin(), rows.end(), 100);
  EXPECT_NE(lookup(by_rows, Form::kRowsNative, kColumns * 84), native);
}

// 16 KiB are 8 tokens of an f32 highway of both layers, 12 of kv; 1,500 bytes are a token of one layer's highway.
TEST_F(ClientCallsTest, ACallThatIsCutIsTheSameBits) {
  const auto small = Start({"--max-message-bytes", "16384", "--max-batch-tokens", "8"});
  const auto whole = Connect(*server_);
  const auto cut = Connect(*small);
  const auto by_layers = Connect(server_->unix_address(), 0, 1500);
  const auto striped = Connect(server_->tcp_address(), 3000);
  const std::vector<int32_t> a = Tokens(21), b = Tokens(1, 8), c = Tokens(13, 5), lookback = {4, -1, 6};
  std::vector<uint8_t> mask(21, 1);
  mask[6] = mask[7] = mask[20] = 0;
  for (const Form form : {Form::kHighway, Form::kKv, Form::kUpdate, Form::kGate, Form::kAuto}) {
    std::string expected;
    for (Client* client : {whole.get(), cut.get(), by_layers.get(), striped.get()}) {
      SequenceHistory history(4), in_session(4);
      const std::vector<SequenceRun> runs = {{.history = &history, .token_ids = a, .token_mask = mask},
                                             {.history = &in_session, .token_ids = b, .session = "both"},
                                             {.start_pos = 70, .token_ids = c, .lookback = lookback}};
      CallReport report;
      const Tensors got = Apply(*client, form, runs, 35, HighwayDtype::kF32, &report);
      EXPECT_EQ(report.parts > 1, client != whole.get() && client != striped.get()) << FormName(form);
      EXPECT_EQ(history.length(), 21);
      EXPECT_EQ(in_session.length(), 1);
      if (expected.empty()) expected = got.All();
      EXPECT_EQ(got.All(), expected) << FormName(form);
      ASSERT_TRUE(client->CloseSessions({"both"}).ok());
    }
  }
}

TEST_F(ClientCallsTest, PartsOfASessionGoInOrderAndContinueEachOther) {
  const auto small = Start({"--max-message-bytes", "16384"});
  const auto client = Connect(*small);
  const std::vector<int32_t> ids = Tokens(40), more = Tokens(30, 7);
  Tensors tensors(40, HighwayDtype::kF32);
  ApplyCall call;
  call.sequences = {{.token_ids = ids, .session = "s"}};
  call.layers = tensors.Layers(Form::kHighway);
  CallReport report;
  ASSERT_TRUE(client->Apply(call, &report).ok());
  EXPECT_EQ(report.parts, 5);
  EXPECT_EQ(report.attempts, 5);
  EXPECT_EQ(report.replica, small->unix_address());
  EXPECT_EQ(report.server_epoch, client->model().server_epoch);
  EXPECT_EQ(tensors.All(), Apply(*client, Form::kHighway, {{.token_ids = ids}}, 40).All());

  const std::vector<int32_t> lookback = {ids[39], ids[38], ids[37]};
  const Tensors continued = Apply(*client, Form::kHighway, {{.start_pos = 40, .token_ids = more, .session = "s"}}, 30);
  EXPECT_EQ(continued.All(),
            Apply(*client, Form::kHighway, {{.start_pos = 40, .token_ids = more, .lookback = lookback}}, 30).All());
  const Tensors forked =
      Apply(*client, Form::kHighway, {{.start_pos = 40, .token_ids = more, .session = "child", .fork_from = "s"}}, 30);
  EXPECT_EQ(forked.All(), continued.All());
  EXPECT_EQ(client->CloseSessions({"s", "child", "nobody"}).value(), 2);
  call.sequences[0].start_pos = 70;
  EXPECT_EQ(ErrorReason(client->Apply(call)), "SESSION_LOST");
}

TEST_F(ClientCallsTest, APreparedResultOfManyPartsIsOneToTheCaller) {
  const auto small = Start({"--max-message-bytes", "4096", "--ticket-ttl-ms", "60000"});
  const auto client = Connect(*small);
  const std::vector<int32_t> ids = Tokens(50);
  Tensors values(50, HighwayDtype::kF32);
  PrepareCall prepare;
  prepare.sequences = {{.token_ids = ids}};
  prepare.layer_ids = {1, 14};
  prepare.values = {absl::MakeSpan(values.value[0]), absl::MakeSpan(values.value[1])};
  CallReport report;
  const absl::StatusOr<Prepared> prepared = client->Prepare(prepare, &report);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ(report.parts, 4) << "256 bytes of value a token";
  const Tensors direct = Apply(*client, Form::kUpdate, {{.token_ids = ids}}, 50);
  EXPECT_EQ(values.value[1], direct.value[1]);
  Tensors tensors(50, HighwayDtype::kF32);
  ApplyCall call;
  call.prepared = &*prepared;
  call.layers = tensors.Layers(Form::kUpdate);
  call.form = Form::kUpdate;
  ASSERT_TRUE(client->Apply(call, &report).ok());
  EXPECT_EQ(report.attempts, report.parts) << "all by ticket";
  EXPECT_EQ(tensors.All(), direct.All());
  EXPECT_EQ(client->Release(*prepared).value(), 4);
}

TEST_F(ClientCallsTest, APartialCallServesEachSequenceAtItsOwnPlace) {
  const auto small = Start({"--max-message-bytes", "16384"});
  const std::vector<int32_t> a = Tokens(5), bad = {1, 9999}, negative = {-1, 2}, last = Tokens(14, 8);
  for (const auto* server : {server_.get(), small.get()}) {
    const auto client = Connect(*server);
    SequenceHistory histories[4] = {SequenceHistory(4), SequenceHistory(4), SequenceHistory(4), SequenceHistory(4)};
    Tensors tensors(23, HighwayDtype::kF32);
    ApplyCall call;
    call.sequences = {{.history = &histories[0], .token_ids = a},
                      {.history = &histories[1], .token_ids = bad},
                      {.history = &histories[2], .token_ids = negative},
                      {.history = &histories[3], .token_ids = last}};
    call.layers = tensors.Layers(Form::kHighway);
    EXPECT_EQ(ErrorReason(client->Apply(call)), "TOKEN_OUT_OF_RANGE");
    EXPECT_EQ(tensors.All(), Tensors(23, HighwayDtype::kF32).All()) << "a failed call writes nothing";
    call.partial_ok = true;
    CallReport report;
    ASSERT_TRUE(client->Apply(call, &report).ok());
    ASSERT_EQ(report.sequences.size(), 4u);
    EXPECT_TRUE(report.sequences[0].ok());
    EXPECT_EQ(ErrorReason(report.sequences[1]), "TOKEN_OUT_OF_RANGE");
    EXPECT_THAT(std::string(report.sequences[2].message()), HasSubstr("token id -1 is below 0"));
    EXPECT_TRUE(report.sequences[3].ok());
    EXPECT_EQ(histories[0].length(), 5);
    EXPECT_EQ(histories[1].length(), 0);
    EXPECT_EQ(histories[3].length(), 14);
    // The same tokens with ids that all can be served, in the same places.
    const std::vector<int32_t> good = {1, 2};
    const Tensors full = Apply(*client, Form::kHighway,
                               {{.token_ids = a}, {.token_ids = good}, {.token_ids = good}, {.token_ids = last}}, 23);
    constexpr size_t kToken = kValues * 4;
    for (int l = 0; l < 2; ++l) {
      EXPECT_EQ(tensors.out[l].substr(0, 5 * kToken), full.out[l].substr(0, 5 * kToken));
      EXPECT_EQ(tensors.out[l].substr(5 * kToken, 4 * kToken), std::string(4 * kToken, 'o'));
      EXPECT_EQ(tensors.out[l].substr(9 * kToken), full.out[l].substr(9 * kToken));
    }
  }
}

TEST_F(ClientCallsTest, CallsWithoutBlockingAreTheSameCalls) {
  const auto client = Connect(*server_);
  const std::vector<int32_t> ids = Tokens(9);
  const std::vector<SequenceRun> runs = {{.token_ids = ids}};
  const Tensors expected = Apply(*client, Form::kHighway, runs, 9);
  Tensors by_callback(9, HighwayDtype::kF32), by_future(9, HighwayDtype::kF32);
  ApplyCall call;
  call.sequences = runs;
  call.layers = by_callback.Layers(Form::kHighway);
  absl::Notification there;
  absl::Status outcome;
  client->ApplyAsync(call, [&](absl::Status status, const CallReport& report) {
    outcome = std::move(status);
    EXPECT_EQ(report.parts, 1);
    there.Notify();
  });
  call.layers = by_future.Layers(Form::kHighway);
  std::future<absl::Status> future = client->ApplyFuture(call);
  PrepareCall prepare;
  prepare.sequences = runs;
  prepare.layer_ids = {1};
  std::future<absl::StatusOr<Prepared>> prepared = client->PrepareFuture(prepare);
  std::string rows(9 * kColumns * 84, ' ');
  LookupCall lookup;
  lookup.sequences = runs;
  lookup.layers = {{.layer_id = 1, .out = absl::MakeSpan(rows)}};
  EXPECT_TRUE(client->LookupFuture(lookup).get().ok());
  EXPECT_EQ(prepared.get()->tokens(), 9);
  EXPECT_TRUE(future.get().ok());
  there.WaitForNotification();
  EXPECT_TRUE(outcome.ok()) << outcome;
  EXPECT_EQ(by_callback.All(), expected.All());
  EXPECT_EQ(by_future.All(), expected.All());
  call.layers.clear();
  EXPECT_EQ(ErrorReason(client->ApplyFuture(call).get()), "EMPTY_CALL");
}

TEST_F(ClientCallsTest, EightThreadsShareAClient) {
  const auto client = Connect(server_->tcp_address(), 4096);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      const std::vector<int32_t> ids = Tokens(17, t);
      const Tensors expected = Apply(*client, Form::kHighway, {{.token_ids = ids}}, 17);
      for (int i = 0; i < 8; ++i) {
        SequenceHistory history(4);
        Tensors got(17, HighwayDtype::kF32);
        ApplyCall call;
        call.sequences = {{.history = &history, .token_ids = ids, .session = i % 2 == 0 ? absl::StrCat("s", t) : ""}};
        call.form = i % 3 == 0 ? Form::kAuto : Form::kHighway;
        call.layers = got.Layers(call.form);
        if (!client->Apply(call).ok() || got.out[0] != expected.out[0] || got.out[1] != expected.out[1]) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ClientCallsTest, TheToolWritesWhatTheLibraryReads) {
  const auto client = Connect(*server_);
  const std::vector<int32_t> ids = {17, 4, 99};
  const e2e::TempDir dir;
  const auto run = [&](const std::string& command, const std::string& form) {
    const std::string path = absl::StrCat(dir.path(), "/", form);
    const e2e::Finished done = e2e::RunToEnd({ENGRAM_CLI, command, "--target", server_->unix_address(), "--tokens",
                                              "17,4,99", "--layer", "14", "--form", form, "--out", path});
    EXPECT_EQ(done.exit_code, 0) << done.err;
    EXPECT_THAT(done.out, HasSubstr("layer 14"));
    std::ifstream file(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  };
  std::string native(3 * kColumns * 84, ' '), decoded(3 * kColumns * 512, ' ');
  LookupCall lookup;
  lookup.sequences = {{.token_ids = ids}};
  lookup.layers = {{.layer_id = 14, .out = absl::MakeSpan(native)}};
  ASSERT_TRUE(client->Lookup(lookup).ok());
  EXPECT_EQ(run("lookup", "rows-native"), native);
  lookup.form = Form::kRowsBf16;
  lookup.layers[0].out = absl::MakeSpan(decoded);
  ASSERT_TRUE(client->Lookup(lookup).ok());
  EXPECT_EQ(run("lookup", "rows-bf16"), decoded);
  EXPECT_EQ(run("lookup", "kv"), run("apply", "kv"));

  // A highway of zeros: gates, and then the value.
  Tensors zeros(3, HighwayDtype::kF32);
  zeros.highway[1].assign(zeros.highway[1].size(), '\0');
  ApplyCall call;
  call.sequences = lookup.sequences;
  call.form = Form::kUpdate;
  call.layers = {zeros.Layers(Form::kUpdate)[1]};
  ASSERT_TRUE(client->Apply(call).ok());
  const std::string update = run("apply", "update");
  EXPECT_EQ(update.substr(0, 48), std::string(reinterpret_cast<const char*>(zeros.gates[1].data()), 48));
  EXPECT_EQ(update.substr(48), std::string(reinterpret_cast<const char*>(zeros.value[1].data()), 3 * kDim * 2));
  EXPECT_EQ(run("apply", "gate"), update.substr(0, 48));
  EXPECT_EQ(run("apply", "auto"), run("apply", "highway"));
}

}  // namespace
}  // namespace engram::client
