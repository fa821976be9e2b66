// Clients that race over a real server's sockets: every answer is a stated refusal or the bits of a history that can
// be.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/api_model/network_driver.h"
#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/model/small_synth.h"

namespace engram {
namespace {

constexpr int32_t kLayerId = 5;
constexpr int kLayer = 1;

// A call of a sequence, what was sent and what came back.
struct Asked {
  int64_t start = 0;
  std::vector<int32_t> tokens;
  Reply reply;
  bool by_ticket = false;
};

class RacesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const e2e::TempDir dir;
    const std::string path = WriteSmallSynth(dir.path());
    auto model = EngramModel::Load(path, {});
    ASSERT_TRUE(model.ok()) << model.status();
    compute_ = std::make_unique<PlainCompute>(*model);
    auto server =
        e2e::ServerProcess::Start(path, {"--max-batch-tokens", "13", "--ticket-ttl-ms", "3600000", "--threads", "2"});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    // Four tokens that the hash tells apart.
    std::set<int32_t> ids;
    const absl::Span<const int32_t> map = (*model)->token_map();
    for (int32_t token = 0; alphabet_.size() < 4; ++token) {
      const int32_t id = map[static_cast<size_t>(token)];
      if (id >= 0 && ids.insert(id).second) alphabet_.push_back(token);
    }
  }

  std::vector<int32_t> Tokens(std::mt19937& random, size_t most) const {
    std::vector<int32_t> tokens(1 + random() % most);
    for (int32_t& token : tokens) token = alphabet_[random() % alphabet_.size()];
    return tokens;
  }

  static void Fill(v1::Sequence& sequence, const std::string& session, const Asked& asked) {
    sequence.set_session(session);
    sequence.set_start_pos(asked.start);
    for (const int32_t token : asked.tokens) sequence.add_token_ids(token);
  }
  static v1::StreamRequest Kv(const std::string& session, const Asked& asked, v1::Priority priority) {
    v1::StreamRequest request;
    request.mutable_apply()->set_form(v1::FORM_KV);
    request.mutable_apply()->set_priority(priority);
    request.mutable_apply()->add_layers()->set_layer_id(kLayerId);
    Fill(*request.mutable_apply()->add_sequences(), session, asked);
    return request;
  }
  static v1::StreamRequest Close(const std::vector<std::string>& sessions) {
    v1::StreamRequest request;
    for (const std::string& session : sessions) request.mutable_close_sessions()->add_sessions(session);
    return request;
  }

  // Are these the bits of the tokens after that look-back (tokens; -1: before the start)?
  bool AreBitsOf(const std::string& kv, std::vector<int32_t> lookback, const std::vector<int32_t>& tokens) {
    lookback.insert(lookback.end(), tokens.begin(), tokens.end());
    for (int32_t& id : lookback) id = id < 0 ? kernels::kDead : compute_->model().token_map()[static_cast<size_t>(id)];
    v1::LayerOutput expected;
    for (size_t t = 0; t < tokens.size(); ++t) {
      const PlainToken token = compute_->TokenAt(absl::MakeConstSpan(lookback).subspan(t, 3), true);
      compute_->Append(token, kLayer, {Form::kKv, {}, {}}, {}, expected);
    }
    return kv == expected.kv();
  }

  // Whatever history it met: of all that there may be behind these tokens, one gives the answer's bits.
  bool AreBitsOfSomeHistory(const Asked& asked) {
    if (asked.reply.layers.size() != 1) return false;
    const std::string& kv = asked.reply.layers[0].kv();
    if (asked.start == 0) return AreBitsOf(kv, {-1, -1}, asked.tokens);
    for (const int32_t newest : alphabet_) {
      if (asked.start == 1 && AreBitsOf(kv, {-1, newest}, asked.tokens)) return true;
      for (const int32_t oldest : alphabet_) {
        if (asked.start > 1 && AreBitsOf(kv, {oldest, newest}, asked.tokens)) return true;
      }
    }
    return false;
  }

  // Each is refused for one of the reasons or right; how many were served.
  int ExpectLegal(const std::vector<Asked>& all, const std::set<std::string>& reasons) {
    int served = 0;
    for (const Asked& asked : all) {
      if (asked.reply.reason.empty()) {
        ++served;
        EXPECT_TRUE(AreBitsOfSomeHistory(asked)) << asked.tokens.size() << " tokens at " << asked.start;
      } else {
        EXPECT_TRUE(reasons.contains(asked.reply.reason)) << asked.reply.reason;
      }
    }
    return served;
  }

  // Runs body(thread, its own driver, its own list) on so many threads; all that was asked.
  template <typename Body>
  std::vector<Asked> OnThreads(int count, const Body& body) {
    std::vector<std::vector<Asked>> asked(static_cast<size_t>(count));
    std::vector<std::thread> threads;
    for (int t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        NetworkDriver driver(t % 2 == 0 ? server_->unix_address() : server_->tcp_address());
        body(t, driver, asked[static_cast<size_t>(t)]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<Asked> all;
    for (std::vector<Asked>& some : asked) all.insert(all.end(), some.begin(), some.end());
    return all;
  }

  void ExpectNothingLeft(const std::vector<std::string>& sessions) {
    NetworkDriver driver(server_->unix_address());
    EXPECT_EQ(driver.Unary(Close(sessions)).reason, "");
    for (const char* gauge : {"engram_sessions", "engram_session_bytes", "engram_tickets", "engram_prepare_bytes",
                              "engram_queue_tokens", "engram_inflight_requests"}) {
      EXPECT_TRUE(e2e::AwaitMetric(server_->metrics_address(), gauge, 0)) << gauge;
    }
  }

  std::unique_ptr<PlainCompute> compute_;
  std::unique_ptr<e2e::ServerProcess> server_;
  std::vector<int32_t> alphabet_;
};

TEST_F(RacesTest, SixtyFourClientsOnEightSessionsWhileTheyAreClosed) {
  std::vector<std::string> sessions;
  for (int i = 0; i < 8; ++i) sessions.push_back("s" + std::to_string(i));
  const std::vector<Asked> asked = OnThreads(64, [&](int t, NetworkDriver& driver, std::vector<Asked>& mine) {
    std::mt19937 random(static_cast<uint32_t>(t));
    for (int i = 0; i < 12; ++i) {
      const std::string& session = sessions[random() % 8];
      if (random() % 10 == 0) {
        EXPECT_EQ(driver.Unary(Close({session})).reason, "");
        continue;
      }
      Asked& call = mine.emplace_back();
      call.start = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 8);
      call.tokens = Tokens(random, 9);
      const auto priority = random() % 2 == 0 ? v1::PRIORITY_DECODE : v1::PRIORITY_PREFILL;
      call.reply = driver.Run({{Kv(session, call, priority), random() % 2, {}}}).front();
    }
  });
  EXPECT_GT(ExpectLegal(asked, {"SESSION_LOST", "POSITION_GAP"}), 200);
  ExpectNothingLeft(sessions);
}

TEST_F(RacesTest, ATicketAnswersWithTheTokensItWasPreparedWithOrNotAtAll) {
  std::mutex mutex;
  std::vector<Asked> prepared;
  const auto prepare = [](NetworkDriver& driver, const std::string& session, Asked& call) {
    v1::StreamRequest request;
    request.mutable_prepare()->add_layer_ids(kLayerId);
    Fill(*request.mutable_prepare()->add_sequences(), session, call);
    call.reply = driver.Unary(request);
  };
  {
    NetworkDriver driver(server_->unix_address());
    for (const char* session : {"c", "a", "b"}) {  // nobody writes to c any more
      Asked& begin = prepared.emplace_back();
      begin.tokens = {alphabet_[0], alphabet_[1], alphabet_[2], alphabet_[3], alphabet_[0]};
      prepare(driver, session, begin);
    }
  }
  const std::vector<Asked> asked = OnThreads(9, [&](int t, NetworkDriver& driver, std::vector<Asked>& mine) {
    std::mt19937 random(static_cast<uint32_t>(t));
    for (int i = 0; i < 80; ++i) {
      const std::string session(1, static_cast<char>('a' + random() % 2));
      Asked call;
      call.start = static_cast<int64_t>(2 + random() % 3);
      call.tokens = Tokens(random, 9);
      if (t % 3 == 0) {
        prepare(driver, session, call);
        const std::lock_guard<std::mutex> lock(mutex);
        if (call.reply.reason.empty()) prepared.push_back(call);
      } else if (t % 3 == 1) {
        call.reply = driver.Unary(Kv(session, call, v1::PRIORITY_PREFILL));
        mine.push_back(call);
      } else {
        {
          const std::lock_guard<std::mutex> lock(mutex);
          call = random() % 8 == 0 ? prepared.front()
                                   : prepared[prepared.size() - 1 - random() % std::min<size_t>(3, prepared.size())];
        }
        v1::StreamRequest request;
        request.mutable_lookup()->set_form(v1::FORM_KV);
        request.mutable_lookup()->add_layer_ids(kLayerId);
        request.mutable_lookup()->set_ticket(call.reply.ticket);
        call.reply = driver.Unary(request);
        call.by_ticket = true;
        mine.push_back(call);
      }
    }
  });
  EXPECT_GT(ExpectLegal(asked, {"POSITION_GAP", "TICKET_EXPIRED"}), 100);
  EXPECT_TRUE(std::any_of(asked.begin(), asked.end(),
                          [](const Asked& call) { return call.by_ticket && call.reply.reason.empty(); }));
  ExpectNothingLeft({"a", "b", "c"});
}

TEST_F(RacesTest, PipelinedCallsOfOneSessionMeetItsHistoryInTheirOrder) {
  constexpr int kStreams = 4;
  constexpr int kNoise = 2;
  const std::vector<Asked> asked =
      OnThreads(kStreams + kNoise, [&](int t, NetworkDriver& driver, std::vector<Asked>& mine) {
        std::mt19937 random(static_cast<uint32_t>(t));
        const bool noise = t >= kStreams;
        int64_t start = 0;
        for (int burst = 0; burst < 4; ++burst) {
          std::vector<Planned> calls;
          for (int i = 0; i < 40; ++i) {
            Asked& call = mine.emplace_back();
            call.tokens = Tokens(random, noise ? 20 : 6);
            call.start = noise ? 0 : start;
            start += static_cast<int64_t>(call.tokens.size());
            const auto priority = random() % 2 == 0 ? v1::PRIORITY_DECODE : v1::PRIORITY_PREFILL;
            calls.push_back({Kv(noise ? "" : std::to_string(t), call, priority), 1, {}});
          }
          const std::vector<Reply> replies = driver.Run(calls);
          for (size_t i = 0; i < replies.size(); ++i) mine[mine.size() - replies.size() + i].reply = replies[i];
        }
      });
  EXPECT_EQ(ExpectLegal(asked, {}), (kStreams + kNoise) * 160);
  for (int t = 0; t < kStreams; ++t) {
    std::vector<int32_t> history = {-1, -1};
    for (int i = 0; i < 160; ++i) {
      const Asked& call = asked[static_cast<size_t>(t * 160 + i)];
      ASSERT_TRUE(AreBitsOf(call.reply.layers.at(0).kv(), {history.end() - 2, history.end()}, call.tokens))
          << "call " << i << " of session " << t;
      history.insert(history.end(), call.tokens.begin(), call.tokens.end());
    }
  }
  ExpectNothingLeft({"0", "1", "2", "3"});
}

}  // namespace
}  // namespace engram
