// The codec against protobuf: whatever bytes arrive, in whatever slices, both see the same request or none.
#include "server/transport/arrived_message.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "server/refusal/refusal.h"
#include "tests/transport/wire_messages.h"

namespace engram {
namespace {

constexpr ListLimits kFew = {.layers = 10, .others = 10};

std::vector<size_t> RandomLengths(std::mt19937& random) {
  std::vector<size_t> lengths;
  for (int i = 1 + static_cast<int>(random() % 4); i > 0; --i) {
    lengths.push_back(random() % 5 == 0 ? 16384 : random() % 40);
  }
  lengths.push_back(1 + random() % 8);  // else empty slices for ever
  return lengths;
}

template <typename Request>
void CompareRandom(int rounds, uint32_t seed) {
  std::mt19937 random(seed);
  int malformed = 0;
  for (int i = 0; i < rounds; ++i) {
    const std::string bytes = RandomWire(*Request::descriptor(), random);
    ASSERT_EQ(Disagreement<Request>(bytes, RandomLengths(random)), "") << "round " << i << " of seed " << seed;
    malformed += Request().ParseFromString(bytes) ? 0 : 1;
  }
  EXPECT_LT(malformed, rounds / 5) << "most of what is written on purpose should parse";
}

TEST(ArrivedMessage, RandomRequestsAreThoseThatProtobufParses) {
  CompareRandom<v1::ApplyRequest>(20000, 1);
  CompareRandom<v1::LookupRequest>(10000, 2);
  CompareRandom<v1::StreamRequest>(20000, 3);
}

TEST(ArrivedMessage, MutatedAndTruncatedRequestsAreMalformedForBothOrNeither) {
  std::mt19937 random(4);
  int malformed = 0;
  for (int i = 0; i < 60000; ++i) {
    std::string bytes = RandomWire(*v1::StreamRequest::descriptor(), random);
    for (int flips = static_cast<int>(random() % 4); flips > 0 && !bytes.empty(); --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (!bytes.empty() && random() % 3 == 0) bytes.resize(random() % bytes.size());
    ASSERT_EQ(Disagreement<v1::StreamRequest>(bytes, RandomLengths(random)), "") << "round " << i;
    malformed += v1::StreamRequest().ParseFromString(bytes) ? 0 : 1;
  }
  EXPECT_GT(malformed, 10000);
}

// What the fuzzer's corpus holds, and what it found.
TEST(ArrivedMessage, TheFuzzersCorpusIsReadAsProtobufReadsIt) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(ENGRAM_TEST_DATA) + "/../fuzz/codec")) {
    std::ifstream in(entry.path(), std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    bytes.erase(0, 2);  // which request and which slices: here all of them
    for (const std::vector<size_t>& slices : {std::vector<size_t>{1u << 20}, {1}, {7, 0, 3}}) {
      EXPECT_EQ(Disagreement<v1::StreamRequest>(bytes, slices), "") << entry.path();
      EXPECT_EQ(Disagreement<v1::ApplyRequest>(bytes, slices), "") << entry.path();
      EXPECT_EQ(Disagreement<v1::LookupRequest>(bytes, slices), "") << entry.path();
    }
    ++files;
  }
  EXPECT_GE(files, 10);
}

TEST(ArrivedMessage, AnEmptyMessageIsOne) { EXPECT_EQ(Disagreement<v1::ApplyRequest>("", {1}), ""); }

// gRPC hands a call that was cancelled on its way to the handler all the same.
TEST(ArrivedMessage, NoMessageIsACallThatEnded) {
  v1::ApplyRequest request;
  EXPECT_EQ(ArrivedMessage(grpc::ByteBuffer()).Parse(kFew, request).code(), absl::StatusCode::kCancelled);
}

TEST(ArrivedMessage, AHighwayIsCopiedFromAsManySlicesAsItCameIn) {
  v1::ApplyRequest request;
  std::mt19937 random(5);
  for (int layer = 0; layer < 3; ++layer) {
    std::string highway(100'000 + static_cast<size_t>(layer), '\0');
    for (char& byte : highway) byte = static_cast<char>(random());
    request.add_layers()->set_highway(highway);
  }
  EXPECT_EQ(Disagreement<v1::ApplyRequest>(request.SerializeAsString(), {16384, 1, 0, 5000}), "");
}

// Sixteen megabytes of empty sequences were a gigabyte of parsed ones.
TEST(ArrivedMessage, AListOfMoreElementsThanACallMayHaveIsRefusedBeforeItIsParsed) {
  const auto refusal = [](int field, google::protobuf::Message& request) {
    std::string bytes;
    for (int i = 0; i < 1001; ++i) {
      bytes.push_back(static_cast<char>(field << 3 | 2));
      bytes.push_back('\0');
    }
    const absl::Status status =
        ArrivedMessage(InSlices(bytes, {4096})).Parse({.layers = 1000, .others = 1000}, request);
    EXPECT_TRUE(
        ArrivedMessage(InSlices(bytes.substr(2), {4096})).Parse({.layers = 1000, .others = 1000}, request).ok());
    const RefusalDetail detail = DetailOf(status);
    return detail.offenders.empty()
               ? status.ToString()
               : std::string(ReasonName(detail.offenders[0].reason)) + " " + detail.offenders[0].field + " " +
                     detail.offenders[0].value + " " + detail.offenders[0].bound;
  };
  v1::ApplyRequest apply;
  EXPECT_EQ(refusal(v1::ApplyRequest::kSequencesFieldNumber, apply), "TOO_MANY_TOKENS sequences 1001 <= 1000");
  EXPECT_EQ(refusal(v1::ApplyRequest::kLayersFieldNumber, apply), "LAYER_UNKNOWN layers 1001 <= 1000");
  v1::ReleaseRequest release;
  EXPECT_EQ(refusal(v1::ReleaseRequest::kTicketsFieldNumber, release), "MESSAGE_BYTES tickets 1001 <= 1000");
  v1::CloseSessionsRequest close;
  EXPECT_EQ(refusal(v1::CloseSessionsRequest::kSessionsFieldNumber, close), "MESSAGE_BYTES sessions 1001 <= 1000");
}

// Sixty megabytes of fields of two bytes kept a handler thread, and all it should read, for seconds.
TEST(ArrivedMessage, MoreThanAMillionFieldsAreRefusedAsSoonAsTheyAreSeen) {
  std::string known, unknown;
  for (int i = 0; i < (1 << 20) + 1; ++i) known += "\x18\x01", unknown += "\xf8\x01\x01";
  for (const std::string* bytes : {&known, &unknown}) {
    v1::ApplyRequest request;
    const RefusalDetail detail = DetailOf(ArrivedMessage(InSlices(*bytes, {16384})).Parse(kFew, request));
    ASSERT_EQ(detail.total, 1);
    EXPECT_EQ(detail.offenders[0].reason, Reason::kMessageBytes);
    EXPECT_EQ(detail.offenders[0].bound, "<= 1048576");
  }
}

TEST(ArrivedMessage, UnknownFieldsAreNotKept) {
  std::string bytes;
  for (int i = 0; i < 100'000; ++i) bytes += "\xb8\x3e\x01";  // field 999
  v1::GetModelRequest request;
  ASSERT_TRUE(ArrivedMessage(InSlices(bytes, {4096})).Parse(kFew, request).ok());
  EXPECT_EQ(request.ByteSizeLong(), 0);
}

TEST(ArrivedMessage, AMalformedMessageIsToldByTypeAndPlace) {
  v1::ApplyRequest request;
  const absl::Status status = ArrivedMessage(InSlices("\x20\x01\x0a\x7f", {1})).Parse(kFew, request);
  const RefusalDetail detail = DetailOf(status);
  ASSERT_EQ(detail.total, 1) << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(detail.offenders[0].reason, Reason::kMalformed);
  EXPECT_EQ(detail.offenders[0].field, "ApplyRequest");
  EXPECT_EQ(detail.offenders[0].value, "byte 4");
}

}  // namespace
}  // namespace engram
