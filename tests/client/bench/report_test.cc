#include "client/bench/report.h"

#include <string>

#include "client/bench/load_options.h"
#include "client/bench/server_metrics.h"
#include "client/bench/svg_plot.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/sample_model.h"

namespace engram::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// With everything that a report can tell, and texts of a server's that want to be markup.
Report FullReport() {
  Report report;
  report.version = "0";
  report.command = "engram-bench --target '<script>alert(1)</script>'";
  report.targets = {"<b>\"quoted\" & 'so'</b>"};
  report.path = "loopback TCP, same host";
  report.same_host = true;
  report.model = client::SampleModel();
  report.model.server_version = "<img src=http://example.com/x onerror=alert(1)>";
  report.load = "f32";
  report.rounds = 3;
  report.verify_against = "all";
  for (const int64_t concurrency : {1, 4, 16}) {
    Point point;
    point.calls = "highway";
    point.tokens_per_call = 2;
    point.concurrency = concurrency;
    for (int i = 1; i <= 1000; ++i) point.service.tally.latency.Add(absl::Microseconds(i * concurrency));
    point.service.tally.tokens = 2000;
    point.service.tally.payload_up = 3'000'000;
    point.service.tally.errors["UNAVAILABLE <DRAINING>"] = 2;
    point.service.elapsed = absl::Seconds(2);
    point.service.client_cpu = absl::Milliseconds(501);
    point.echo.emplace();
    point.echo->stretch = point.service;
    point.echo->throughput_ratio = 0.75;
    point.echo->p50_ratio = 1.25;
    point.server.emplace();
    point.server->calls = 1000;
    point.server->stages["gate"] = {0.25, 1000};
    point.server->cpu_seconds = 0.5;
    point.server->resident_begin = 1e9;
    point.server->resident_end = 1.001e9;
    point.verify.emplace();
    point.verify->checked = 10;
    point.verify->wrong = 1;
    point.verify->mismatches = {"session \"<i>\", position 3"};
    report.points.push_back(point);
  }
  return report;
}

TEST(Report, TheTableHoldsTheFigures) {
  const std::string text = TextReport(FullReport());
  for (const char* part :
       {"500", "1.00k", "0.002", "500 us", "989 us", "1.00 ms", "throughput 0.75 x, p50 1.25 x (medians of 3 rounds)",
        "gate 250 us a call", "server CPU         500 us a call", "client CPU         500 us a call",
        "1001.0 MB resident, +1.0 MB", "2 x UNAVAILABLE", "10 replies, 1 wrong", "WRONG", "loopback TCP, same host",
        "shared by server and bench"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(Report, QuantilesThatSoFewCallsCannotShowAreLeftOutOfTablesAndNotOfJson) {
  Report report = FullReport();
  report.points.resize(1);
  Tally& tally = report.points[0].service.tally;
  const auto cells = [&](int calls) {
    tally.latency = LatencyHistogram();
    for (int i = 0; i < calls; ++i) tally.latency.Add(absl::Microseconds(500));
    return FigureCells(report.points[0].service);
  };
  const auto p99 = static_cast<size_t>(7);
  ASSERT_EQ(FigureHeads()[p99], "p99");
  EXPECT_EQ(cells(99)[0], "99");
  EXPECT_EQ(cells(99)[p99], "–");
  EXPECT_EQ(cells(100)[p99], "500 us");
  EXPECT_EQ(cells(999)[p99 + 1], "–");
  EXPECT_EQ(cells(1000)[p99 + 1], "500 us");
  EXPECT_EQ(cells(0), (std::vector<std::string>{"0", "–", "–", "–", "–", "–", "–", "–", "–", "–", "2"}));
  cells(3);
  EXPECT_GT(nlohmann::json::parse(JsonReport(report))["points"][0]["service"]["latency_seconds"]["p99.9"], 0);
}

TEST(Report, RatiosThatThereAreNotAreToldAsNone) {
  Report report;
  EXPECT_EQ(RatiosText(report, {.stretch = {}, .throughput_ratio = 0.5, .p50_ratio = 2}),
            "throughput 0.50 x, p50 2.00 x");
  EXPECT_EQ(RatiosText(report, {}), "throughput –, p50 –");
  report.open_loop = true;
  EXPECT_EQ(RatiosText(report, {.stretch = {}, .throughput_ratio = {}, .p50_ratio = 2}), "p50 2.00 x")
      << "both sides get one rate";
}

TEST(Report, JsonHoldsTheFiguresInSecondsAndBytes) {
  const nlohmann::json json = nlohmann::json::parse(JsonReport(FullReport()));
  EXPECT_EQ(json["same_host"], true);
  ASSERT_EQ(json["points"].size(), 3u);
  const nlohmann::json& point = json["points"][1];
  EXPECT_EQ(point["concurrency"], 4);
  EXPECT_EQ(point["service"]["calls"], 1000);
  EXPECT_EQ(point["service"]["calls_per_second"], 500.0);
  EXPECT_EQ(point["service"]["errors"]["UNAVAILABLE <DRAINING>"], 2);
  EXPECT_NEAR(point["service"]["latency_seconds"]["p50"].get<double>(), 2e-3, 2e-5);
  EXPECT_EQ(point["echo"]["throughput_ratio"], 0.75);
  EXPECT_EQ(point["server"]["stages"]["gate"]["seconds"], 0.25);
  EXPECT_EQ(point["verify"]["wrong"], 1);
}

TEST(Report, ThePageFetchesNothingRunsNothingAndEscapesWhatServersSay) {
  const std::string html = HtmlReport(FullReport());
  EXPECT_THAT(html, HasSubstr("<!DOCTYPE html>"));
  EXPECT_THAT(html, HasSubstr("&lt;script&gt;alert(1)&lt;/script&gt;"));
  EXPECT_THAT(html, HasSubstr("&lt;b&gt;&quot;quoted&quot; &amp; &#39;so&#39;&lt;/b&gt;"));
  EXPECT_THAT(html, HasSubstr("Replies were wrong"));
  EXPECT_THAT(html, HasSubstr("session &quot;&lt;i&gt;&quot;, position 3"));
  for (const char* reference : {"<script", "<link", "<img", "<iframe", "@import", "url(", " src=\"", "href=", "<i>"}) {
    EXPECT_THAT(html, Not(HasSubstr(reference)));
  }
  // Each point's histogram and one curve.
  size_t plots = 0;
  for (size_t at = 0; (at = html.find("<svg ", at)) != std::string::npos; ++at) ++plots;
  EXPECT_EQ(plots, 4u);
  EXPECT_THAT(html, Not(HasSubstr("nan")));
  EXPECT_THAT(html, Not(HasSubstr("inf")));
}

TEST(Report, APointWithoutAServedCallIsToldAndNotDrawnFromNothing) {
  Report report = FullReport();
  report.points.resize(1);
  report.points[0] = Point();
  report.points[0].calls = "kv";
  report.points[0].echo.emplace();
  for (const std::string& text : {TextReport(report), HtmlReport(report), JsonReport(report)}) {
    EXPECT_THAT(text, Not(HasSubstr("nan")));
    EXPECT_THAT(text, HasSubstr("kv"));
  }
  EXPECT_THAT(HtmlReport(report), HasSubstr("No call was served"));
}

TEST(Report, DurationsAndRatesHaveThreeDigits) {
  EXPECT_EQ(DurationText(absl::Nanoseconds(1234)), "1.23 us");
  EXPECT_EQ(DurationText(absl::Microseconds(999)), "999 us");
  EXPECT_EQ(DurationText(absl::Microseconds(999.7)), "1.00 ms");
  EXPECT_EQ(DurationText(absl::Milliseconds(45.67)), "45.7 ms");
  EXPECT_EQ(DurationText(absl::Seconds(12.3)), "12.3 s");
  EXPECT_EQ(RateText(4.789), "4.79");
  EXPECT_EQ(RateText(12345), "12.3k");
  EXPECT_EQ(RateText(9'876'543), "9.88M");
}

TEST(ServerMetrics, WhatHappenedIsTheDifferenceOfTwoReadings) {
  const MetricValues before = ParseMetrics(
      "# HELP engram_requests_total Calls\n"
      "engram_requests_total{method=\"Apply\",code=\"OK\"} 5\n"
      "engram_stage_duration_seconds_sum{stage=\"hash\"} 0.5\n"
      "process_cpu_seconds_total 10.5\n"
      "process_resident_memory_bytes 1e+09\n");
  const MetricValues after = ParseMetrics(
      "engram_requests_total{method=\"Apply\",code=\"OK\"} 15\r\n"
      "engram_requests_total{method=\"Apply\",code=\"INVALID ARGUMENT\"} 2 1700000000\n"
      "engram_stage_duration_seconds_sum{stage=\"hash\"} 0.75\n"
      "engram_stage_duration_seconds_count{stage=\"hash\"} 8\n"
      "engram_stage_duration_seconds_bucket{stage=\"hash\",le=\"+Inf\"} 8\n"
      "not a metric at all\n"
      "process_cpu_seconds_total 12\n"
      "process_resident_memory_bytes 1.5e+09\n");
  ServerChange change = ChangeBetween(before, after);
  EXPECT_EQ(change.calls, 12);
  EXPECT_THAT(StageOrder(change), ElementsAre("hash"));
  EXPECT_EQ(change.stages["hash"].seconds, 0.25);
  EXPECT_EQ(change.stages["hash"].count, 8);
  EXPECT_EQ(change.cpu_seconds, 1.5);
  EXPECT_EQ(change.resident_begin, 1e9);
  change.Merge(ChangeBetween(before, after));
  EXPECT_EQ(change.calls, 24);
  EXPECT_EQ(change.cpu_seconds, 3.0);
  EXPECT_EQ(change.resident_end, 1.5e9);
}

TEST(ServerMetrics, AServerThatDoesNotSayIsNotMadeUp) {
  const ServerChange change = ChangeBetween({}, ParseMetrics("engram_sessions 3\n"));
  EXPECT_FALSE(change.cpu_seconds.has_value());
  EXPECT_FALSE(change.resident_end.has_value());
  EXPECT_EQ(change.calls, 0);
}

TEST(LoadOptions, CountsAreListsAndRanges) {
  EXPECT_THAT(*ParseCounts("4", 100), ElementsAre(4));
  EXPECT_THAT(*ParseCounts("1,16,4,16", 100), ElementsAre(1, 16, 4));
  EXPECT_THAT(*ParseCounts("1:4", 100), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(*ParseCounts("1:10:4,2", 100), ElementsAre(1, 5, 9, 2));
  for (const char* wrong : {"", "0", "-1", "x", "1,", "1:", ":4", "4:1", "1:4:0", "1:2:3:4", "101", "1:1000000000",
                            "99999999999999999999", "1.5", "1: 4x"}) {
    EXPECT_FALSE(ParseCounts(wrong, wrong == std::string("1:1000000000") ? int64_t{1} << 40 : 100).ok()) << wrong;
  }
}

TEST(LoadOptions, FormsAreNamedAsTheProtoOrTheTools) {
  EXPECT_THAT(*ParseForms("HIGHWAY,rows-native,ROWS_BF16"),
              ElementsAre(client::Form::kHighway, client::Form::kRowsNative, client::Form::kRowsBf16));
  EXPECT_THAT(std::string(ParseForms("auto").status().message()),
              HasSubstr("\"auto\" is no form, expected highway, kv"));
}

TEST(LoadOptions, ContradictionsNameTheirFlags) {
  const auto mistake = [](auto change) {
    LoadOptions options;
    change(options);
    return std::string(CheckLoadOptions(options).message());
  };
  EXPECT_EQ(mistake([](LoadOptions&) {}), "");
  EXPECT_THAT(mistake([](LoadOptions& o) { o.targets = {"nowhere"}; }), HasSubstr("--target: target is \"nowhere\""));
  EXPECT_THAT(mistake([](LoadOptions& o) { o.verify_fraction = 1; }), HasSubstr("--verify-fraction needs --model"));
  EXPECT_THAT(mistake([](LoadOptions& o) { o.model = "m"; }), HasSubstr("--model is given"));
  EXPECT_THAT(mistake([](LoadOptions& o) { o.sequences_per_call = 2; }), HasSubstr("--tokens-per-call 1 is below"));
  EXPECT_THAT(mistake([](LoadOptions& o) {
                o.sessions = 3;
                o.concurrency = {4};
              }),
              HasSubstr("--sessions 3 is below 4 calls at a time"));
  EXPECT_THAT(mistake([](LoadOptions& o) {
                o.prepare = true;
                o.forms = {client::Form::kRowsNative};
              }),
              HasSubstr("--prepare is given, but --form rows-native"));
  EXPECT_THAT(mistake([](LoadOptions& o) {
                o.rate = 5;
                o.concurrency = {1, 2};
              }),
              HasSubstr("--concurrency-range sweeps a closed loop"));
}

TEST(LoadOptions, WhatTheServerDoesNotTakeIsToldBeforeTheRun) {
  const client::ModelInfo model = client::SampleModel();
  LoadOptions options;
  EXPECT_TRUE(CheckAgainstModel(options, model).ok());
  options.tokens_per_call = {65};
  EXPECT_EQ(CheckAgainstModel(options, model).message(),
            "--tokens-per-call: 65 tokens in a call, the server takes at most 64");
  options = {};
  options.layers = {2};
  EXPECT_EQ(CheckAgainstModel(options, model).message(), "--layers: the model has no engram layer 2, it has 1, 14");
  client::ModelInfo tight = model;
  tight.limits.max_message_bytes = 63;
  EXPECT_EQ(CheckAgainstModel(LoadOptions(), tight).message(),
            "--tokens-per-call: 1 tokens of form highway and 2 layers make a message of 64 bytes, the server takes at "
            "most 63");
}

}  // namespace
}  // namespace engram::bench
